"""GRUUnit and its gradient in vectorised operators.

    z_r, z_u, z_o = split(gates)            z_r has done its work: the unit makes nothing of it
    u = sigmoid(z_u),  o = tanh(z_o)
    d = h_prev - o,    r = u d
    h = o + r                               = u h_prev + (1 - u) o

    b = dh - dh u
    d(h_prev) = dh u,  d(z_r) = 0,  d(z_u) = b r,  d(z_o) = b (1 - o^2)

so that all the backward step needs to know of a step is u, o and r. One sigmoid here costs less than a tanh with what
it takes to turn it into one.
"""

from typing import Iterable, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.emit import Emitter, aten_is_missing
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.sequences.masks import step_mask, step_outside, why_no_mask
from caffe2_recurrent.rewriting.sequences.padding import cut_if_possible, emit_only_inside
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before

UNIT, UNIT_GRADIENT = "GRUUnit", "GRUUnitGradient"
# Below this many elements of a state, `GRUUnit` is faster than half a dozen operators.
FEWEST_ELEMENTS = 450
# With lengths there are the operators that mix old and new states: a GRU took 2 to 13% longer for 512, 0 to 8% for 640
# and 3% less to 3% more for 800.
FEWEST_WITH_LENGTHS = 800

Operators = List[caffe2_pb2.OperatorDef]


class Unit(NamedTuple):
    """The blobs of a GRUUnit; `lengths` None if all sequences are T long."""

    hidden_prev: str
    gates: str
    lengths: Optional[str]
    timestep: str
    hidden: str


class Gates(NamedTuple):
    """The three parts of the gates `[1, N, D]`, or of their gradient."""

    reset: str
    update: str
    output: str


class Past(NamedTuple):
    """What happens past the end of a sequence: `outside` is 1 there and 0 before, or `mask` 0 there and 1 before.

    The state stays what it was (`outside`) or is 0 (`mask`); neither is given if all sequences are T long.
    """

    outside: Optional[str]
    mask: Optional[str]


class Opened(NamedTuple):
    """u, o, d and r of the module's docstring."""

    update: str
    output: str
    difference: str
    share: str


class GRUUnits(Rule):
    """step: h = GRUUnit(h_prev, Concat(z_r, z_u, z_o), (lengths), t)
    backward step: dh_prev, d = GRUUnitGradient(..);  dz_r, dz_u, dz_o = Split(d)

    =>  step: u, o, r and h by vectorised operators on z_u and z_o
        backward step: dh_prev, dz_u, dz_o from u, o and r;  dz_r = 0      (see the module)

    Past the end of a sequence u is 1, and h_prev stays, to the last bit; with `drop_states` h and dh are multiplied by
    a mask. Gates that come in one piece, or whose parts are not known to be equally wide, are split here.
    """

    name = "gru_unit"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if operator.type == UNIT:
                yield Site("GRUUnit -> '{}'".format(operator.output[0]), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        unit = _unit(loop.operators[site.where])
        if loop.gradient is not None and dataflow.writers(loop.gradient.operators, unit.hidden):
            return "the backward step computes '{}' again".format(unit.hidden)
        return why_no_mask(loop, unit.lengths, unit.timestep, sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        elements = _elements(loop, sizes, site.where)
        if elements is None:
            return "the size of a state is not known, and GRUUnit is faster for a small one; give shapes"
        lengths = _unit(loop.operators[site.where]).lengths
        if elements < (FEWEST_ELEMENTS if lengths is None else FEWEST_WITH_LENGTHS):
            return "with {} elements in a state GRUUnit is faster".format(elements)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operator = loop.operators[site.where]
        lengths = _unit(operator).lengths
        if lengths is not None:
            cut_if_possible(loop, lengths, sizes)
        # Now, as the gates may be the slice itself, which has another name if it has been cut.
        unit = _unit(operator)
        past = _past(loop, operator, unit)
        size = _size(loop, sizes, site.where)
        elements = _elements(loop, sizes, site.where)
        joining = _joining(loop, sizes, site.where)
        emitter = Emitter(loop, operator, unit.hidden)
        parts = _parts(emitter, unit, joining)
        opened = _emit_opened(emitter, unit, parts, past, elements)
        _emit_hidden(emitter, unit, opened, past)
        backward = _unit_gradient_position(loop, unit)
        again = backward is not None and unit.gates in loop.shared
        loop.operators[site.where : site.where + 1] = emitter.operators
        if backward is not None:
            # What the backward step does not read is not kept in each step.
            kept = () if again else (opened.update, opened.output, opened.share)
            loop.shared += [blob for blob in emitter.made if blob not in kept]
            if size is not None:
                loop.known.columns.update(dict.fromkeys(kept, size))
            _rewrite_gradient(loop, unit, past, backward, joining, None if again else opened, elements)
        if joining is not None:
            _remove_if_unread(loop, joining)


def _unit(operator: caffe2_pb2.OperatorDef) -> Unit:
    hidden_prev, gates, *lengths, timestep = operator.input[:]
    has_lengths = bool(integer(operator, "sequence_lengths", 1)) and bool(lengths)
    return Unit(hidden_prev, gates, lengths[0] if has_lengths else None, timestep, operator.output[0])


def _size(loop: Loop, sizes: Sizes, position: int) -> Optional[int]:
    """D of the GRUUnit at `position`, if it is known."""
    return _width(loop, sizes, position, _unit(loop.operators[position]).hidden_prev)


def _width(loop: Loop, sizes: Sizes, position: int, blob: str) -> Optional[int]:
    """How many columns `blob` has where the operator at `position` sees it, if it is known."""
    shape = shapes_before(loop, sizes, loop.operators, position).get(blob)
    return shape[-1] if shape else None


def _elements(loop: Loop, sizes: Sizes, position: int) -> Optional[int]:
    """How many a state has, if it is known."""
    size, batch = _size(loop, sizes, position), sizes.batch(loop)
    return None if size is None or batch is None else size * batch


def _past(loop: Loop, operator: caffe2_pb2.OperatorDef, unit: Unit) -> Past:
    if unit.lengths is None:
        return Past(None, None)
    if integer(operator, "drop_states", 0):
        return Past(None, step_mask(loop, unit.lengths))
    return Past(step_outside(loop, unit.lengths), None)


def _unit_gradient_position(loop: Loop, unit: Unit) -> Optional[int]:
    for position, operator in enumerate(loop.gradient.operators if loop.gradient is not None else []):
        if operator.type == UNIT_GRADIENT and operator.input[-2] == unit.hidden:
            return position
    return None


def _joining(loop: Loop, sizes: Sizes, position: int) -> Optional[caffe2_pb2.OperatorDef]:
    """The Concat of three parts that makes the gates of the unit at `position`, if its parts can be used instead."""
    unit = _unit(loop.operators[position])
    joining = _concat(loop.operators, unit.gates, position)
    size = _size(loop, sizes, position)
    if joining is None or size is None:
        return None
    return joining if all(_width(loop, sizes, position, part) == size for part in joining.input) else None


def _concat(operators: Operators, gates: str, before: int) -> Optional[caffe2_pb2.OperatorDef]:
    position = dataflow.writer(operators, gates, before)
    if position is None or operators[position].type != "Concat":
        return None
    joining = operators[position]
    changed = {blob for operator in operators[position + 1 : before] for blob in operator.output}
    in_three = len(joining.input) == len(Gates._fields) and integer(joining, "axis", 1) == FEATURES
    return joining if in_three and changed.isdisjoint(joining.input) else None


def _parts(emitter: Emitter, unit: Unit, joining: Optional[caffe2_pb2.OperatorDef]) -> Gates:
    if joining is not None:
        return Gates(*joining.input)
    return Gates(*emitter.split(unit.gates, Gates._fields, FEATURES))


def _emit_opened(emitter: Emitter, unit: Unit, parts: Gates, past: Past, elements: Optional[int]) -> Opened:
    if unit.lengths is not None:
        update, output = emit_only_inside(emitter, unit.lengths, parts.update, parts.output)
        parts = parts._replace(update=update, output=output)
    update = vectorised.emit(emitter, vectorised.SIGMOID, parts.update, "update_gate", elements)
    if past.outside is not None:
        update = emitter.aten("max", [update, past.outside], "update_gate_past")
    output = vectorised.emit(emitter, vectorised.TANH, parts.output, "output_gate", elements)
    difference = emitter.new("Sub", [unit.hidden_prev, output], "difference")
    return Opened(update, output, difference, emitter.new("Mul", [update, difference], "share"))


def _emit_hidden(emitter: Emitter, unit: Unit, opened: Opened, past: Past) -> None:
    if past.outside is not None:
        # Where u is 1 the change is 0, and the state what it was; o + (h_prev - o) would round.
        change = emitter.new("Sub", [opened.difference, opened.share], "change")
        emitter.add("Sub", [unit.hidden_prev, change], unit.hidden)
    elif past.mask is not None:
        emitter.add("Mul", [emitter.new("Sum", [opened.output, opened.share], "new"), past.mask], unit.hidden)
    else:
        emitter.add("Sum", [opened.output, opened.share], unit.hidden)


def _rewrite_gradient(
    loop: Loop,
    unit: Unit,
    past: Past,
    position: int,
    joining: Optional[caffe2_pb2.OperatorDef],
    opened: Optional[Opened],
    elements: Optional[int],
) -> None:
    """Rewrite the backward step, whose GRUUnitGradient is at `position`; without `opened` it computes that again."""
    assert loop.gradient is not None
    operators = loop.gradient.operators
    original = operators[position]
    of_hidden, (of_hidden_prev, of_gates) = original.input[-1], original.output
    emitter = Emitter(loop, original, unit.hidden + "_grad")
    if opened is None:
        again = _concat(operators, unit.gates, position)
        same = joining if joining is not None and again is not None and again.input == joining.input else None
        opened = _emit_opened(emitter, unit, _parts(emitter, unit, same), past, elements)
    if past.mask is not None:
        of_hidden = emitter.new("Mul", [of_hidden, past.mask], "inside")
    emitter.add("Mul", [of_hidden, opened.update], of_hidden_prev)
    changing = emitter.new("Sub", [of_hidden, of_hidden_prev], "changing")
    splitting = None if joining is None else _splitting(loop, position, of_gates, joining)
    if splitting is None:
        if unit.gates in loop.shared:
            loop.known.overwritten[unit.gates] = of_gates
        of_parts = Gates(*(emitter.blob("of_" + name) for name in Gates._fields))
        _emit_parts(emitter, opened, changing, of_parts)
        outputs = [of_gates, emitter.blob("sizes")]
        emitter.operators.append(new_operator("Concat", of_parts, outputs, original, axis=FEATURES))
    else:
        # Where the parts have been written so far, in case that something else has their names before.
        at_split = Emitter(loop, original, unit.hidden + "_grad")
        _emit_parts(at_split, opened, changing, Gates(*operators[splitting].output))
        operators[splitting : splitting + 1] = at_split.operators
    operators[position : position + 1] = emitter.operators


def _emit_parts(emitter: Emitter, opened: Opened, changing: str, of_parts: Gates) -> None:
    emitter.add("ConstantFill", [changing], of_parts.reset, value=0.0)
    emitter.add("Mul", [changing, opened.share], of_parts.update)
    emitter.add("TanhGradient", [opened.output, changing], of_parts.output)


def _splitting(loop: Loop, position: int, of_gates: str, joining: caffe2_pb2.OperatorDef) -> Optional[int]:
    """The Split that takes the gradient of the gates apart as `joining` joined them, if nothing else reads it."""
    gradient = loop.gradient
    assert gradient is not None
    reading = dataflow.readers(gradient.operators, of_gates, position)
    if len(reading) != 1 or any(link.inner == of_gates for link in gradient.backward_links):
        return None
    operator = gradient.operators[reading[0]]
    apart = operator.type == "Split" and operator.input[1:] == joining.output[1:]
    return reading[0] if apart and integer(operator, "axis", 0) == FEATURES else None


def _remove_if_unread(loop: Loop, joining: caffe2_pb2.OperatorDef) -> None:
    gradient = loop.gradient
    backward: Operators = [] if gradient is None else gradient.operators
    if any(loop.link(blob) for blob in joining.output):
        return
    again = [other for other in backward if other.type == "Concat" and other.output == joining.output]
    for blob in joining.output:
        if dataflow.reads(loop.operators, blob) or dataflow.reads(backward, blob):
            return
    loop.operators.remove(joining)
    for other in again:
        backward.remove(other)
    loop.shared[:] = [blob for blob in loop.shared if blob not in joining.output]
