"""LSTMUnit and its gradient in vectorised operators.

All that the backward step needs to know of a step is three factors, computed in the forward step while everything is in
the cache:

    z_i, z_f, z_o, z_g = split(gates)
    i = sigmoid(z_i),  f = sigmoid(z_f + forget_bias),  o = sigmoid(z_o),  g = tanh(z_g)
    c = f c_prev + i g,   h = o tanh(c)

    dc  = dc_of_next + dh * (o (1 - tanh(c)^2))
    d(gates) = [dc, dc, dh, dc] * [g i (1 - i), c_prev f (1 - f), tanh(c) o (1 - o), i (1 - g^2)]
    dc_prev  = dc * f

The activations have several forms, see `lstm_forms.py`; the fastest one is taken, after a trial.
"""

import functools
from typing import Dict, Iterable, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer, number
from caffe2_recurrent.rewriting import dataflow, trial
from caffe2_recurrent.rewriting.emit import Emitter, aten_is_missing
from caffe2_recurrent.rewriting.lstm_forms import FORMS, GATES, ByTanh, Form, MakeForm, Opened, WithoutCandidate
from caffe2_recurrent.rewriting.masks import emit_only_inside, step_mask, why_no_mask
from caffe2_recurrent.rewriting.rows import FEATURES
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Shape, Sizes

UNIT, UNIT_GRADIENT = "LSTMUnit", "LSTMUnitGradient"
# Below this many elements of a state, `LSTMUnit` is faster than a dozen operators.
FEWEST_ELEMENTS = 600


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
        batch = sizes.batch(loop)
        made = functools.partial(_form(size, batch, keep_factors), loop, size, batch and batch * size)

        emitter = Emitter(loop, operator, unit.cell)
        form = made(number(operator, "forget_bias", 0.0), keep_factors)
        factors = _emit_step(emitter, unit, form, mask, drop, keep_factors)
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
            form = made(number(operator, "forget_bias", 0.0), True)
            opened = _emit_gates(emitter, unit, form)
            bounded = form.bounded(emitter, unit.cell)
            factors = _emit_factors(emitter, unit, form, opened, bounded)
            loop.overwritten[unit.gates] = gradient.of_gates
        else:
            loop.overwritten[factors.gates] = gradient.of_gates
        _emit_backward(emitter, gradient, form, factors, mask, drop)
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


def _emit_gates(emitter: Emitter, unit: Unit, form: Form) -> Opened:
    scaled = emitter.aten("addcmul", [form.shift, unit.gates, form.scale], "scaled")
    if unit.lengths is not None:
        (scaled,) = emit_only_inside(emitter, unit.lengths, scaled)
    return form.opened(emitter, scaled)


def _emit_step(
    emitter: Emitter, unit: Unit, form: Form, mask: Optional[str], drop: bool, keep_factors: bool
) -> Optional[Factors]:
    """The new states, and the factors if they are to be kept."""
    opened = _emit_gates(emitter, unit, form)
    kept = emitter.new("Mul", [opened.forget, unit.cell_prev], "kept")
    added = emitter.new("Mul", [opened.input, opened.candidate], "added")
    cell = unit.cell if mask is None else emitter.blob("new")
    form.emit_cell(emitter, opened, kept, added, cell)
    bounded = form.bounded(emitter, cell)
    hidden = unit.hidden if mask is None else emitter.blob("new_hidden")
    emitter.add("Mul", [opened.output, bounded], hidden)
    if mask is not None:
        _mix(emitter, mask, drop, cell, unit.cell_prev, unit.cell)
        _mix(emitter, mask, drop, hidden, unit.hidden_prev, unit.hidden)
    return _emit_factors(emitter, unit, form, opened, bounded) if keep_factors else None


def _emit_factors(emitter: Emitter, unit: Unit, form: Form, opened: Opened, bounded: str) -> Factors:
    of_gates = form.gate_factors(emitter, opened, unit.cell_prev, bounded)
    # TanhGradient(Y, X) is X (1 - Y^2).
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
    emitter: Emitter, gradient: UnitGradient, form: Form, factors: Factors, mask: Optional[str], drop: bool
) -> None:
    of_hidden, of_cell = gradient.of_hidden, gradient.of_cell
    if mask is not None:
        of_hidden = emitter.new("Mul", [of_hidden, mask], "hidden_inside")
        of_cell = emitter.new("Mul", [of_cell, mask], "cell_inside")
    through_output, total = form.gradients(emitter, of_hidden, of_cell, factors.cell)
    joined = emitter.concat([total, total, through_output, total], "joined", FEATURES)
    emitter.add("Mul", [factors.gates, joined], gradient.of_gates)
    if mask is None or drop:
        emitter.add("Mul", [total, factors.forget], gradient.of_cell_prev)
        emitter.add("ConstantFill", [gradient.of_hidden], gradient.of_hidden_prev, value=0.0)
    else:
        inside = emitter.new("Mul", [total, factors.forget], "through_cell")
        outside = emitter.new("Sub", [gradient.of_cell, of_cell], "cell_outside")
        emitter.add("Sum", [inside, outside], gradient.of_cell_prev)
        emitter.add("Sub", [gradient.of_hidden, of_hidden], gradient.of_hidden_prev)


# ---------------------------------------------------------------------------------------------------------- the trial


def _form(size: int, batch: Optional[int], trains: bool) -> MakeForm:
    """The fastest form; that by tanh if the number of sequences is not known."""
    if batch is None:
        return ByTanh
    found: Dict[MakeForm, trial.Seconds] = _tried(size, batch, trains)
    return min(found, key=lambda form: found[form].step)


@trial.remembered
def _tried(size: int, batch: int, trains: bool) -> Dict[MakeForm, trial.Seconds]:
    forms = [form for form in FORMS if form is not WithoutCandidate or not trains]
    return trial.in_turn({form: functools.partial(_seconds, form, size, batch, trains) for form in forms})


def _seconds(form: MakeForm, size: int, batch: int, trains: bool) -> trial.Seconds:
    """The time of a step, and of the backward step, by themselves."""
    state: Shape = (1, batch, size)
    unit = Unit("hidden_prev", "cell_prev", "gates", None, "timestep", "hidden", "cell")
    gradient = UnitGradient("of_hidden", "of_cell", "of_hidden_prev", "of_cell_prev", "of_gates")
    shapes: Dict[str, Shape] = {unit.cell_prev: state, unit.gates: (1, batch, len(GATES) * size)}
    loop = trial.lone_loop([*filter(None, unit), *gradient])
    emitter = Emitter(loop, loop.forward, unit.cell)
    made = form(loop, size, batch * size, 0.0, trains)
    factors = _emit_step(emitter, unit, made, None, False, trains)
    if factors is not None:
        shapes.update({gradient.of_hidden: state, gradient.of_cell: state})
        _emit_backward(emitter, gradient, made, factors, None, False)
    return trial.seconds(emitter.operators, shapes, loop.before)
