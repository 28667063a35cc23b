"""Products with slices of a sequence, computed for all steps at once.

The gain is in the product: its weights are read once and not once a step. An operator that works element by element
costs a step as much as the link to its result does, and for large sizes more when the whole sequence streams through
it than while a slice is in the cache; so such operators move only if a product needs them. MILSTM's two
`ElementwiseLinear` of x_t, moved, made the forward pass 4 to 17% slower and changed nothing in training.
"""

from typing import Iterable, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import copied, is_on_onednn
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow, versions
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.wiring import Link

PRODUCTS = frozenset(["FC", "FCTransposed"])
# One input with rows, the others the same in all steps; the output is float32 as the input is.
IN_FRONT = frozenset(["Copy", "Negative", "Relu", "Scale", "Sigmoid", "Tanh"])
IN_FRONT_ALONG_FEATURES = frozenset(["ElementwiseLinear", "Softmax", "Split"])
# With more sequences the product of a single step is as fast, sequence by sequence, as that of all.
MOST_SEQUENCES = 64


class SequenceOperators(Rule):
    """step: x_t -> slice t of X;  Y = FC(x_t, W, b)

    =>  before the loop: Y' = FC(X, W, b) for all steps
        step: Y -> slice t of Y'

    And operators in front of such a product, like Tanh, that work on x_t row by row. W and b must be the same in all
    steps. What the backward step reads of Y it finds in its slice. The price is the memory of Y'.
    """

    name = "sequence_operators"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if _is_of_rows(operator) and _slice_of_sequence(loop, operator.input[0]) is not None:
                is_for_product = _reason(loop, position) is None and _is_for_product(loop, position)
                if operator.type in PRODUCTS or is_for_product:
                    blobs = ", ".join("'{}'".format(blob) for blob in operator.output)
                    yield Site("{} -> {}".format(operator.type, blobs), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        sequence = loop.operators[site.where].input[0]
        if sequence in loop.written:
            return "the step writes to '{}'".format(sequence)
        return _reason(loop, site.where)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if _is_recomputed(loop, site.where):
            blob = loop.operators[site.where].output[0]
            return "'{}' is computed again in the backward step to save memory".format(blob)
        batch = sizes.batch(loop)
        if batch is not None and batch >= MOST_SEQUENCES:
            return "with {} sequences the product of a step is as fast".format(batch)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operator = loop.operators[site.where]
        seen = _slice_of_sequence(loop, operator.input[0])
        assert seen is not None
        moved = copied(operator)
        moved.input[0] = seen.outer
        moved.output[:] = [loop.new_blob(blob + "_of_all_steps") for blob in operator.output]
        loop.before.append(moved)
        spent = [operator]
        found = [versions.of_step(loop, site.where, blob) for blob in operator.output]
        for blob, outer, version in zip(operator.output, moved.output, found):
            assert isinstance(version, versions.Version)
            inner = blob
            if len(dataflow.writers(loop.operators, blob)) > 1:
                # Operators that work in place then do so on a blob of the step.
                inner = loop.new_blob(blob + "_slice")
                versions.rename(version, blob, inner)
            spent += [version.copy] if version.copy is not None else []
            loop.add_reference(outer)
            loop.links.append(Link(inner, outer, 0))
        versions.remove(loop.operators, spent)
        if loop.gradient is not None:
            versions.remove(loop.gradient.operators, spent)
        loop.shared[:] = [blob for blob in loop.shared if blob not in operator.output or blob in loop.written]
        _remove_if_unread(loop, seen)


def _is_of_rows(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the operator makes rows of its first input's rows, if that has the shape `[1, N, k]`."""
    along_features = operator.type in PRODUCTS or operator.type in IN_FRONT_ALONG_FEATURES
    axis = integer(operator, "axis", 1)
    # Split may see its sizes as a second input, which is as good a reference as weights are.
    found = operator.type in IN_FRONT or (along_features and axis == FEATURES)
    return found and not is_on_onednn(operator)


def _slice_of_sequence(loop: Loop, blob: str) -> Optional[Link]:
    """The link of `blob`, if it shows a slice of an outer blob that is there before the loop starts."""
    link = loop.link(blob)
    if link is None or link.outer not in loop.inputs or link.offset != 0:
        return None
    return None if any(state.outer_states == link.outer for state in loop.states) else link


def _reason(loop: Loop, position: int) -> Optional[str]:
    """Why an operator cannot move, be its first input a sequence or not."""
    operator = loop.operators[position]
    changing = [blob for blob in operator.input[1:] if blob not in loop.inputs or not loop.is_reference(blob)]
    if changing:
        return "'{}' is not the same in all steps".format(changing[0])
    for blob in operator.output:
        if loop.link(blob) is not None:
            return "'{}' is a slice of another blob already".format(blob)
        if blob in loop.net.external_output:
            return "'{}' is an output of the step".format(blob)
        version = versions.of_step(loop, position, blob)
        if isinstance(version, str):
            return version
    return None


def _is_recomputed(loop: Loop, position: int) -> bool:
    version = versions.of_step(loop, position, loop.operators[position].output[0])
    return isinstance(version, versions.Version) and version.copy is not None


def _is_for_product(loop: Loop, position: int) -> bool:
    """Whether a product that can move reads what the operator computes, perhaps through others that can move."""
    for blob in loop.operators[position].output:
        for reading in dataflow.readers(loop.operators, blob, position):
            reader = loop.operators[reading]
            if _is_of_rows(reader) and reader.input[0] == blob and _reason(loop, reading) is None:
                is_product = reader.type in PRODUCTS and not _is_recomputed(loop, reading)
                if is_product or _is_for_product(loop, reading):
                    return True
    return False


def _remove_if_unread(loop: Loop, link: Link) -> None:
    """A link costs a step as much as a small operator."""
    operators = loop.operators + (loop.gradient.operators if loop.gradient is not None else [])
    if dataflow.reads(operators, link.inner):
        return
    loop.links.remove(link)
    if loop.gradient is not None:
        loop.gradient.links[:] = [other for other in loop.gradient.links if other.inner != link.inner]
