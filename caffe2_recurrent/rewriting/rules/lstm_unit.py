"""LSTMUnit and its gradient in vectorised operators.

One `tanh` over all gates does for the sigmoids as well, sigmoid(z) = 0.5 + 0.5 tanh(z / 2), and all that the backward
step needs to know of a step is three factors, computed in the forward step while everything is in the cache:

    z_i, z_f, z_o, z_g = split(gates)
    i = sigmoid(z_i),  f = sigmoid(z_f + forget_bias),  o = sigmoid(z_o),  g = tanh(z_g)
    c = f c_prev + i g,   h = o tanh(c)

    dc  = dc_of_next + dh * (o (1 - tanh(c)^2))
    d(gates) = [dc, dc, dh, dc] * [g i (1 - i), c_prev f (1 - f), tanh(c) o (1 - o), i (1 - g^2)]
    dc_prev  = dc * f
"""

from typing import Iterable, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer, number
from caffe2_recurrent.rewriting import dataflow, vectorised
from caffe2_recurrent.rewriting.emit import Emitter, aten_is_missing
from caffe2_recurrent.rewriting.masks import emit_only_inside, step_mask, why_no_mask
from caffe2_recurrent.rewriting.rows import FEATURES
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

UNIT, UNIT_GRADIENT = "LSTMUnit", "LSTMUnitGradient"
# Below this many elements of a state, `LSTMUnit` is faster than a dozen operators.
FEWEST_ELEMENTS = 600
# The factors, and with them the input and the forget gate, come four times as large; see `_emit_factors`.
QUARTERS = 4.0
GATES = ("i", "f", "o", "g")


class Unit(NamedTuple):
    """The blobs of an LSTMUnit; `lengths` None if all sequences are T long."""

    hidden_prev: str
    cell_prev: str
    gates: str
    lengths: Optional[str]
    timestep: str
    hidden: str
    cell: str


class UnitGradient(NamedTuple):
    """The blobs that an LSTMUnitGradient reads beside the unit's, and those it writes."""

    of_hidden: str
    of_cell: str
    of_hidden_prev: str
    of_cell_prev: str
    of_gates: str


class Factors(NamedTuple):
    """What the backward step reads of the forward step: `[N, 4 D]`, and twice `[N, D]`."""

    gates: str
    cell: str
    forget: str


class Constants(NamedTuple):
    """Outer blobs: `[4 D]` before and after the tanh, `[1]` else; `share` is 1, or 1 / 4 where two gates
    come four times."""

    scale: str
    shift: str
    opening: str
    middle: str
    one: str
    share: str
    is_whole: bool


class Opened(NamedTuple):
    """tanh of the scaled gates `[1, N, 4 D]`, and the gates `[1, N, D]`, the first two perhaps four times as large."""

    squashed: str
    input: str
    forget: str
    output: str
    candidate: str


class LSTMUnits(Rule):
    """step: h, c = LSTMUnit(h_prev, c_prev, gates, (lengths), t)

    =>  step: vectorised operators that compute h, c and, if there is a backward step, its factors
        backward step: LSTMUnitGradient  =>  products with the factors (see the module)

    Past the end of a sequence a state stays what it was, or is 0 with `drop_states`: the new states are mixed with the
    old ones by a mask that is computed once for all steps.
    """

    name = "lstm_unit"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if operator.type == UNIT:
                yield Site("LSTMUnit -> '{}'".format(operator.output[0]), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        operator = loop.operators[site.where]
        unit = _unit(operator)
        if loop.gradient is not None and dataflow.writers(loop.gradient.operators, unit.cell):
            return "the backward step computes '{}' again".format(unit.cell)
        if sizes.state_size(loop, unit.cell_prev) is None:
            return "the size of the state '{}' is not known; give shapes".format(unit.cell_prev)
        return why_no_mask(loop, unit.lengths, unit.timestep, sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        unit = _unit(loop.operators[site.where])
        size, batch = sizes.state_size(loop, unit.cell_prev), sizes.batch(loop)
        assert size is not None
        if size < FEWEST_ELEMENTS and batch is None:
            return "the batch size is not known, and LSTMUnit is faster for a small one; give shapes"
        if size * (batch or 1) < FEWEST_ELEMENTS:
            return "with {} elements in a state LSTMUnit is faster".format(size * (batch or 1))
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operator = loop.operators[site.where]
        unit = _unit(operator)
        size = sizes.state_size(loop, unit.cell_prev)
        assert size is not None
        mask = None if unit.lengths is None else step_mask(loop, unit.lengths)
        drop = bool(integer(operator, "drop_states", 0))
        backward = _gradient_position(loop, unit)
        # Where the gates are computed again, the factors are too.
        keep_factors = backward is not None and unit.gates not in loop.shared
        constants = _constants(loop, operator, size, QUARTERS if keep_factors else 1.0)
        batch = sizes.batch(loop)
        elements = None if batch is None else batch * size

        emitter = Emitter(loop, operator, unit.cell)
        opened = _emit_gates(emitter, unit, constants, elements)
        bounded = _emit_states(emitter, unit, opened, constants, mask, drop, elements)
        factors = _emit_factors(emitter, unit, opened, bounded, constants) if keep_factors else None
        loop.operators[site.where : site.where + 1] = emitter.operators
        # What the backward step does not read is not kept in each step, and stays in the cache from step to step.
        loop.shared += [blob for blob in emitter.made if factors is None or blob not in factors]
        if backward is None:
            return
        assert loop.gradient is not None
        original = loop.gradient.operators[backward]
        emitter = Emitter(loop, original, unit.cell + "_grad")
        gradient = _unit_gradient(original)
        if factors is None:
            constants = _constants(loop, operator, size, QUARTERS)
            opened = _emit_gates(emitter, unit, constants, elements)
            bounded = vectorised.emit(emitter, vectorised.TANH, unit.cell, "bounded", elements)
            factors = _emit_factors(emitter, unit, opened, bounded, constants)
            loop.overwritten[unit.gates] = gradient.of_gates
        else:
            loop.overwritten[factors.gates] = gradient.of_gates
        _emit_backward(emitter, gradient, factors, constants, mask, drop)
        loop.gradient.operators[backward : backward + 1] = emitter.operators


def _unit(operator: caffe2_pb2.OperatorDef) -> Unit:
    hidden_prev, cell_prev, gates, *lengths, timestep = operator.input[:]
    has_lengths = bool(integer(operator, "sequence_lengths", 1)) and bool(lengths)
    return Unit(hidden_prev, cell_prev, gates, lengths[0] if has_lengths else None, timestep, *operator.output)


def _gradient_position(loop: Loop, unit: Unit) -> Optional[int]:
    for position, operator in enumerate(loop.gradient.operators if loop.gradient is not None else []):
        if operator.type == UNIT_GRADIENT and operator.input[-4:-2] == [unit.hidden, unit.cell]:
            return position
    return None


def _unit_gradient(operator: caffe2_pb2.OperatorDef) -> UnitGradient:
    return UnitGradient(*operator.input[-2:], *operator.output)


def _constants(loop: Loop, unit: caffe2_pb2.OperatorDef, size: int, times: float) -> Constants:
    """Outer blobs with what the gates are multiplied with and what is added, one value for each gate."""
    forget_bias = number(unit, "forget_bias", 0.0)

    def columns(name: str, *values: float) -> str:
        parts = [loop.add_before("ConstantFill", [], "lstm_constant", shape=[size], value=value) for value in values]
        return loop.add_columns(parts, name)

    def single(name: str, value: float) -> str:
        return loop.add_before("ConstantFill", [], name, shape=[1], value=value)

    constants = Constants(
        scale=columns("lstm_scale", 0.5, 0.5, 0.5, 1.0),
        shift=columns("lstm_shift", 0.0, forget_bias / 2, 0.0, 0.0),
        opening=columns("lstm_opening", times / 2, times / 2, 0.5, 1.0),
        middle=columns("lstm_middle", times / 2, times / 2, 0.5, 0.0),
        one=single("lstm_one", 1.0),
        share=single("lstm_share", 1 / times),
        is_whole=times == 1.0,
    )
    for outer in constants:
        if isinstance(outer, str):
            loop.add_reference(outer)
    return constants


def _emit_gates(emitter: Emitter, unit: Unit, constants: Constants, elements: Optional[int]) -> Opened:
    """`elements` is the size of a state `[N, D]`, None if it is not known."""
    scaled = emitter.aten("addcmul", [constants.shift, unit.gates, constants.scale], "scaled")
    if unit.lengths is not None:
        (scaled,) = emit_only_inside(emitter, unit.lengths, scaled)
    of_all = None if elements is None else len(GATES) * elements
    squashed = vectorised.emit(emitter, vectorised.TANH, scaled, "squashed", of_all)
    opened = emitter.aten("addcmul", [constants.middle, squashed, constants.opening], "opened")
    return Opened(squashed, *emitter.split(opened, GATES, FEATURES))


def _emit_states(
    emitter: Emitter,
    unit: Unit,
    opened: Opened,
    constants: Constants,
    mask: Optional[str],
    drop: bool,
    elements: Optional[int],
) -> str:
    """The new states; gives tanh(c)."""
    kept = emitter.new("Mul", [opened.forget, unit.cell_prev], "kept")
    added = emitter.new("Mul", [opened.input, opened.candidate], "added")
    cell = unit.cell if mask is None else emitter.blob("new")
    if constants.is_whole:
        emitter.add("Sum", [kept, added], cell)
    else:
        emitter.add("WeightedSum", [kept, constants.share, added, constants.share], cell)
    bounded = vectorised.emit(emitter, vectorised.TANH, cell, "bounded", elements)
    hidden = unit.hidden if mask is None else emitter.blob("new_hidden")
    emitter.add("Mul", [opened.output, bounded], hidden)
    if mask is not None:
        _mix(emitter, mask, drop, cell, unit.cell_prev, unit.cell)
        _mix(emitter, mask, drop, hidden, unit.hidden_prev, unit.hidden)
    return bounded


def _emit_factors(emitter: Emitter, unit: Unit, opened: Opened, bounded: str, constants: Constants) -> Factors:
    # The slopes of the sigmoids are 1/4 of 1 - squashed^2, that of tanh is the whole. With 4 i in the place of i all
    # four factors come four times as large, and the backward step divides once by four, where there is least to divide.
    others = emitter.concat([opened.candidate, unit.cell_prev, bounded, opened.input], "others", FEATURES)
    # TanhGradient(Y, X) is X (1 - Y^2).
    of_gates = emitter.new("TanhGradient", [opened.squashed, others], "gate_factors")
    of_cell = emitter.new("TanhGradient", [bounded, opened.output], "cell_factor")
    return Factors(of_gates, of_cell, opened.forget)


def _mix(emitter: Emitter, mask: str, drop: bool, new: str, old: str, target: str) -> None:
    """`target` is `new` where the mask is 1, elsewhere `old` or 0."""
    if drop:
        emitter.add("Mul", [new, mask], target)
    else:
        # ATen's lerp gives either end exactly.
        emitter.add("Copy", [emitter.aten("lerp", [old, new, mask], "mixed")], target)


def _emit_backward(
    emitter: Emitter, gradient: UnitGradient, factors: Factors, constants: Constants, mask: Optional[str], drop: bool
) -> None:
    of_hidden, of_cell = gradient.of_hidden, gradient.of_cell
    if mask is not None:
        of_hidden = emitter.new("Mul", [of_hidden, mask], "hidden_inside")
        of_cell = emitter.new("Mul", [of_cell, mask], "cell_inside")
    # A quarter of each, since the factors come four times as large.
    of_hidden_quarter = emitter.new("Scale", [of_hidden], "hidden_quarter", scale=1 / QUARTERS)
    through_hidden = emitter.new("Mul", [of_hidden_quarter, factors.cell], "through_hidden")
    total = emitter.new("WeightedSum", [of_cell, constants.share, through_hidden, constants.one], "cell_quarter")
    joined = emitter.concat([total, total, of_hidden_quarter, total], "joined", FEATURES)
    emitter.add("Mul", [factors.gates, joined], gradient.of_gates)
    if mask is None or drop:
        emitter.add("Mul", [total, factors.forget], gradient.of_cell_prev)
        emitter.add("ConstantFill", [gradient.of_hidden], gradient.of_hidden_prev, value=0.0)
    else:
        inside = emitter.new("Mul", [total, factors.forget], "through_cell")
        outside = emitter.new("Sub", [gradient.of_cell, of_cell], "cell_outside")
        emitter.add("Sum", [inside, outside], gradient.of_cell_prev)
        emitter.add("Sub", [gradient.of_hidden, of_hidden], gradient.of_hidden_prev)
