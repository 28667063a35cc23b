"""A step of an LSTM, and its gradient, in vectorised operators.

All that the backward step needs to know of a step is three factors, computed in the forward step while everything is in
the cache:

    z_i, z_f, z_o, z_g = split(gates)
    i = sigmoid(z_i),  f = sigmoid(z_f + forget_bias),  o = sigmoid(z_o),  g = tanh(z_g)
    c = f c_prev + i g,   h = o tanh(c)

    dc  = dc_of_next + dh * (o (1 - tanh(c)^2))
    d(gates) = [dc, dc, dh, dc] * [g i (1 - i), c_prev f (1 - f), tanh(c) o (1 - o), i (1 - g^2)]
    dc_prev  = dc * f

Where a step is to keep no more than what fits into the memory of the gradient of its gates, it keeps i, f, o and g, as
their form has them, and the backward step computes the factors.

The activations have several forms, see `lstm_forms.py`.
"""

from typing import NamedTuple, Optional

from caffe2_recurrent.rewriting.elementwise.lstm_forms import Form, Opened
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.sequences.padding import emit_only_inside
from caffe2_recurrent.rewriting.steps.rows import FEATURES


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


def emit_gates(emitter: Emitter, unit: Unit, form: Form) -> Opened:
    """The gates, from what the product and what is added to it have made."""
    scaled = unit.gates
    if form.shift is not None and form.scale is not None:
        scaled = emitter.aten("addcmul", [form.shift, unit.gates, form.scale], "scaled")
    if unit.lengths is not None:
        (scaled,) = emit_only_inside(emitter, unit.lengths, scaled)
    return form.opened(emitter, scaled)


def emit_step(
    emitter: Emitter, unit: Unit, form: Form, opened: Opened, mask: Optional[str], drop: bool, keep_factors: bool
) -> Optional[Factors]:
    """The new states, and the factors if they are to be kept; past the end of a sequence the old ones, or 0."""
    cell = unit.cell if mask is None else emitter.blob("new")
    form.emit_cell(emitter, opened, unit.cell_prev, cell)
    bounded = form.bounded(emitter, cell)
    hidden = unit.hidden if mask is None else emitter.blob("new_hidden")
    form.emit_hidden(emitter, opened, bounded, hidden)
    if mask is not None:
        _mix(emitter, mask, drop, cell, unit.cell_prev, unit.cell)
        _mix(emitter, mask, drop, hidden, unit.hidden_prev, unit.hidden)
    return emit_factors(emitter, unit, form, opened, bounded) if keep_factors else None


def emit_factors(emitter: Emitter, unit: Unit, form: Form, opened: Opened, bounded: str) -> Factors:
    """What the backward step needs to know; `bounded` is tanh of the new cell state."""
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


def emit_backward(
    emitter: Emitter, gradient: UnitGradient, form: Form, factors: Factors, mask: Optional[str], drop: bool
) -> None:
    """The operators of the backward step."""
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
        inside = form.product(emitter, total, factors.forget, "through_cell")
        outside = emitter.new("Sub", [gradient.of_cell, of_cell], "cell_outside")
        emitter.add("Sum", [inside, outside], gradient.of_cell_prev)
        emitter.add("Sub", [gradient.of_hidden, of_hidden], gradient.of_hidden_prev)
