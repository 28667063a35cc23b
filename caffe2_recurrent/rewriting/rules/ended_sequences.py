"""What the gates of an LSTM are past the end of a sequence, from the product that makes the sequence."""

from typing import Iterable, List, Optional, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer, remove_arguments, set_arguments
from caffe2_recurrent.operators import SUM, copied, new_operator
from caffe2_recurrent.rewriting.products.step_products import weights_shape
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules import lstm_unit
from caffe2_recurrent.rewriting.rules.lstm_unit import (
    UNIT,
    UNIT_GRADIENT,
    LSTMUnits,
    read_unit,
    read_unit_gradient,
    unit_gradient_position,
)
from caffe2_recurrent.rewriting.sequences import masks, own_sequence, padding
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS, FEATURES
from caffe2_recurrent.wiring import Link

# What is added to a gate to close it, and taken away to open it: sigmoids of it are 0 and 1, whatever computes them,
# and so they are for whatever a product may add.
CLOSING = -1e30
# What a product of states with weights is made by, and what lays the states side by side for it.
OF_ROWS = frozenset(["FC", "FCTransposed", "Concat", SUM])


class EndedSequences(Rule):
    """before the loop: X = FC(x, V, c)
    step: z = Sum(y, x_t);  h, c = LSTMUnit(h_prev, c_prev, z, lengths, t)

    =>  before the loop: X = FC([x or 0, ended], [V, v], c)
        step: z = Sum(y, X_t);  u, c = LSTMUnit(h_prev, c_prev, z, t);  h = Sum(u, ended_t * h_prev)
        backward step: dh_prev = ended_t * dh, and LSTMUnitGradient without lengths

    `ended` is 1 past the end of a sequence, and v closes the gates of input and output there, and opens that of the
    state before: c = 1 c_prev + 0 g stays, u = 0, and no gate has a gradient. With `drop_states` v closes that one too,
    so that all is 0, and h = u. What the sequence is made of is 0 there, since padding need not be numbers. Nothing of
    it is rounded: the states stay what they are to the last bit.
    """

    name = "ended_sequences"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if operator.type == UNIT and read_unit(operator).lengths is not None:
                yield Site("LSTMUnit -> '{}'".format(operator.output[0]), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operator = loop.operators[site.where]
        unit = read_unit(operator)
        why_not = LSTMUnits().refusal(loop, site, sizes)
        if why_not is not None:
            return why_not
        link = _slice(loop, site.where)
        if link is None:
            return "its gates '{}' are not a sum of a product and a slice of the first sequence".format(unit.gates)
        why_not = own_sequence.why_not_own(loop, link)
        if why_not is not None:
            return why_not
        adding = dataflow.writer(loop.operators, unit.gates, site.where)
        if dataflow.readers(loop.operators, link.inner) != [adding] or link.inner in loop.written:
            return "'{}' is needed elsewhere in the step too".format(link.inner)
        if link.inner in loop.net.external_output:
            return "'{}' is needed behind the step too".format(link.inner)
        assert adding is not None
        if dataflow.readers(loop.operators, unit.gates, adding) != [site.where] or _is_seen(loop, unit.gates):
            return "its gates '{}' are needed elsewhere too".format(unit.gates)
        others = [blob for blob in loop.operators[adding].input if blob != link.inner]
        if not all(_is_of_states(loop, blob, adding) for blob in others):
            return "what is added to '{}' is not a product of states alone".format(link.inner)
        x, weights, _ = _inputs(loop, link)
        for blob, dimensions in ((x, DIMENSIONS), (weights, 2)):
            shape = weights_shape(loop, blob, sizes)
            if shape is None:
                return "the size of '{}' is not known; give shapes".format(blob)
            if len(shape) != dimensions:
                return "'{}' has {} dimensions".format(blob, len(shape))
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        # What it leaves has no lengths.
        why_not = lstm_unit.why_too_few(loop, site.where, sizes, lstm_unit.FEWEST_ELEMENTS)
        if why_not is not None:
            return why_not
        link = _slice(loop, site.where)
        assert link is not None
        x, weights, _ = _inputs(loop, link)
        outer, inner = weights_shape(loop, weights, sizes) or (0, 0)
        # What a step is spared are passes over its gates, at the price of two over x.
        return "'{}' is wider than the gates".format(x) if inner > outer else None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operator = loop.operators[site.where]
        unit, drop = read_unit(operator), bool(integer(operator, "drop_states", 0))
        link = _slice(loop, site.where)
        assert link is not None and unit.lengths is not None
        backward = unit_gradient_position(loop, unit)
        x, *_ = _inputs(loop, link)
        is_enough = padding.may_be_cut(loop) is not None
        inside = masks.mask(loop, unit.lengths, x)
        ended = masks.outside(loop, inside)
        _close_gates(loop, link, inside, ended, sizes, drop)
        if is_enough:
            padding.note(loop, unit.lengths)
        ended_t = None if drop else masks.step_of(loop, ended, "ended_t")

        forward, behind, own = _without_lengths(operator, len(operator.input) - 2), [], unit.hidden
        if ended_t is not None:
            own = forward.output[0] = loop.new_blob(unit.hidden + "_inside")
            behind = _hold(loop, operator, unit.hidden_prev, ended_t, own, unit.hidden)
        loop.operators[site.where : site.where + 1] = [forward, *behind]
        if backward is None:
            return
        assert loop.gradient is not None
        original = loop.gradient.operators[backward]
        gradient = read_unit_gradient(original)
        changed, behind = _without_lengths(original, len(original.input) - 6), []
        if ended_t is not None:
            changed.input[-4] = own
            changed.output[0] = loop.new_blob(gradient.of_hidden_prev + "_through_unit")
            behind = _hold(loop, original, gradient.of_hidden, ended_t, changed.output[0], gradient.of_hidden_prev)
        loop.gradient.operators[backward : backward + 1] = [changed, *behind]


def _slice(loop: Loop, position: int) -> Optional[Link]:
    """The link to the first sequence whose slice is added to something to make the gates."""
    adding = dataflow.writer(loop.operators, read_unit(loop.operators[position]).gates, position)
    if adding is None or loop.operators[adding].type != SUM:
        return None
    inputs = list(loop.operators[adding].input)
    links = [link for link in loop.links if link.outer == loop.inputs[0] and inputs.count(link.inner) == 1]
    return links[0] if len(links) == 1 and len(inputs) > 1 else None


def _inputs(loop: Loop, link: Link) -> List[str]:
    source = own_sequence.source_of(loop, link.outer)
    assert source is not None
    return list(source.input)


def _is_seen(loop: Loop, gates: str) -> bool:
    """Whether somebody may want to look at the gates past the end of a sequence."""
    linked = any(link.inner == gates for link in loop.all_links)
    backward = loop.gradient.operators if loop.gradient is not None else []
    reading = [operator for operator in backward if gates in operator.input and gates not in operator.output]
    return linked or gates in loop.net.external_output or any(other.type != UNIT_GRADIENT for other in reading)


def _is_of_states(loop: Loop, blob: str, before: int) -> bool:
    """Whether a blob is made of states and of what is the same in all steps, row by row: of no sequence's padding."""
    writing = dataflow.writer(loop.operators, blob, before)
    if writing is None:
        states: Set[str] = {state.outer_states for state in loop.states}
        link = loop.link(blob)
        return loop.is_reference(blob) if link is None else link.outer in states
    operator = loop.operators[writing]
    return operator.type in OF_ROWS and all(_is_of_states(loop, other, writing) for other in operator.input)


def _close_gates(loop: Loop, link: Link, inside: str, ended: str, sizes: Sizes, drop: bool) -> None:
    """Have the sequence close the gates past the ends. What operators it takes, Caffe2 can infer the shapes of."""
    old = own_sequence.take_source(loop)
    x, weights, bias = old.input
    x_shape, shape = weights_shape(loop, x, sizes), weights_shape(loop, weights, sizes)
    assert x_shape is not None and shape is not None
    rows = _side_by_side(loop, [padding.cut(loop, x, inside), ended], "x_and_ended", FEATURES)
    # In the order of LSTMUnit's gates: input, forget, output, candidate.
    values = [CLOSING, CLOSING if drop else -CLOSING, CLOSING, 0.0]
    parts = [
        loop.add_before("ConstantFill", [], "closing", shape=[shape[0] // len(values)], value=value) for value in values
    ]
    closing = loop.add_before("ExpandDims", [loop.add_columns(parts, "closing_gates")], "closing_column", dims=[1])
    all_weights = _side_by_side(loop, [weights, closing], weights + "_and_closing", 1)
    made = loop.new_blob(link.outer + "_until_end")
    slice_ = loop.new_blob(link.inner + "_until_end")
    sizes.set(rows, (*x_shape[:-1], x_shape[-1] + 1))
    sizes.set(all_weights, (shape[0], shape[1] + 1))
    sizes.add(made, link.outer)
    source = new_operator("FC", [rows, all_weights, bias], [made], old)
    source.arg.extend(old.arg)
    own_sequence.replace(loop, link.inner, slice_, source)


def _side_by_side(loop: Loop, blobs: List[str], name: str, axis: int) -> str:
    """In a blob computed once before the loop."""
    joined, widths = loop.new_blob(name), loop.new_blob(name + "_widths")
    loop.before.append(new_operator("Concat", blobs, [joined, widths], loop.forward, axis=axis))
    return joined


def _without_lengths(operator: caffe2_pb2.OperatorDef, position: int) -> caffe2_pb2.OperatorDef:
    """The operator for sequences that do not end; its lengths are the input at `position`."""
    changed = copied(operator)
    del changed.input[position]
    remove_arguments(changed, ["drop_states"])
    set_arguments(changed, {"sequence_lengths": 0})
    return changed


def _hold(
    loop: Loop, beside: caffe2_pb2.OperatorDef, held: str, ended_t: str, inside: str, total: str
) -> List[caffe2_pb2.OperatorDef]:
    """The operators of `total = inside + ended_t held`."""
    past = loop.new_blob(total + "_held")
    return [
        new_operator("Mul", [held, ended_t], [past], beside),
        new_operator(SUM, [inside, past], [total], beside),
    ]
