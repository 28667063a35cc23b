"""What a sequence is made of, with 0 past the ends of the sequences of its batch: padding need not be numbers."""

from typing import List, Optional, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.sequences import masks, own_sequence
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS, FEATURES, UNITS
from caffe2_recurrent.wiring import Link

# Make numbers of numbers, whichever they are: an element of the result is no quotient, and no root.
TOTAL = frozenset(
    ["Add", "BatchMatMul", "Concat", "Copy", "ElementwiseLinear", "FC", "FCTransposed", "GRUUnit", "LSTMUnit", "MatMul"]
    + ["Mul", "Negative", "Relu", "Scale", "Sigmoid", "Split", "Sub", "Sum", "Tanh"]
)
# Position of the gates among the inputs of a unit that has lengths, which are in front of the step's number.
GATES_INPUT = -3


def may_be_cut(loop: Loop) -> Optional[Link]:
    """The link to the first sequence, if numbers in it are numbers in all blobs of a step, so that to cut it is enough.

    The step sees no slices of another sequence then, but for masks, and divides by nothing.
    """
    numbers = {state.outer_states for state in loop.states} | masks.outer_masks(loop)
    links = [link for link in loop.links if link.outer not in numbers]
    is_only = [link.outer for link in links] == loop.inputs[:1]
    return links[0] if is_only and all(operator.type in TOTAL for operator in loop.operators) else None


def note(loop: Loop, lengths: str) -> None:
    """What the first sequence is made of is 0 past the ends now, and that is enough."""
    loop.made[_key(lengths)] = loop.inputs[0]


def emit_only_inside(emitter: Emitter, lengths: str, *blobs: str) -> List[str]:
    """`blobs` with 0 past the end of the sequences, if they may hold anything there: padding need not be numbers."""
    loop = emitter.loop
    if _key(lengths) in loop.made:
        return list(blobs)
    zero = loop.add_before("ConstantFill", [], "zero", shape=[1], value=0.0)
    loop.add_reference(zero)
    inside = emitter.new("Cast", [masks.step_mask(loop, lengths)], "inside", to=core.DataType.BOOL)
    return [emitter.aten("where", [inside, blob, zero], "only_inside") for blob in blobs]


def cut(loop: Loop, x: str, inside: str) -> str:
    """x `[T, N, k]` with 0 where the mask `inside` `[T, N, 1]` is 0, row by row, in operators of known shapes."""
    rows = loop.add_before("Flatten", [x], "x_rows", axis=FEATURES)
    zeros = loop.add_before("ConstantFill", [rows], "x_zeros", value=0.0)
    is_inside = loop.add_before("Cast", [inside], "is_inside", to=core.DataType.BOOL)
    is_inside = loop.add_before("FlattenToVec", [is_inside], "rows_inside")
    rows = loop.add_before("Where", [is_inside, rows, zeros], "x_rows_inside", broadcast_on_rows=1)
    return loop.add_before("ResizeLike", [rows, x], "x_inside")


def cut_if_possible(loop: Loop, lengths: str, sizes: Sizes) -> None:
    """before the loop: X = FC(x, V, c)    =>    X = FC(x or 0, V, c)

    Steps are spared masks over what they make of X: over the gates of an LSTM, for one. X has to go by way of units
    with these lengths, or somebody would see that its padding is another.
    """
    link = may_be_cut(loop)
    if link is None or _key(lengths) in loop.made or _is_seen_past_the_ends(loop, link.inner, lengths):
        return
    if own_sequence.why_not_own(loop, link, may_be_read_whole=True) is not None:
        return
    source = own_sequence.source_of(loop, link.outer)
    assert source is not None
    x, weights, _ = source.input
    shape, weights_shape = sizes.shape(x), sizes.shape(weights)
    if shape is None or len(shape) != DIMENSIONS or integer(source, "axis", 1) != FEATURES:
        return
    # Passes over a wide x cost more than those over the gates.
    if weights_shape is None or shape[-1] > weights_shape[0]:
        return
    if link.inner in loop.written or link.inner in loop.net.external_output:
        return
    source = own_sequence.take_source(loop)
    made, slice_ = (loop.new_blob(blob + "_inside") for blob in (link.outer, link.inner))
    source.input[0] = cut(loop, x, masks.mask(loop, lengths, x))
    source.output[0] = made
    sizes.set(source.input[0], shape)
    sizes.add(made, link.outer)
    own_sequence.replace(loop, link.inner, slice_, source)
    note(loop, lengths)


def _is_seen_past_the_ends(loop: Loop, inner: str, lengths: str) -> bool:
    """Whether something outside of the step depends on what `inner` holds where sequences of `lengths` have ended."""
    made_of_it = {inner}
    for operator in loop.operators:
        through = list(operator.input)
        if operator.type in UNITS and _lengths(operator) == lengths:
            # Its states do not depend on the gates there.
            through.remove(operator.input[GATES_INPUT])
        depends = not made_of_it.isdisjoint(through)
        made_of_it = made_of_it.union(operator.output) if depends else made_of_it.difference(operator.output)
    # Behind the loop a buffer only meets gradients, which are 0 there.
    linked = {link.inner for link in loop.written_links if link.outer not in loop.buffers}
    return not made_of_it.isdisjoint(linked.union(loop.net.external_output))


def _lengths(unit: caffe2_pb2.OperatorDef) -> Optional[str]:
    return unit.input[-2] if integer(unit, "sequence_lengths", 1) else None


def _key(lengths: str) -> Tuple[str, str]:
    return ("cut", lengths)
