"""The gates of an LSTM in vectorised operators, in five forms. In four, one activation over all gates does for both
kinds:

    by tanh           sigmoid(z) = 0.5 + 0.5 tanh(z / 2)
    by halves         the same, but the gates i = (1 + s) / 2 are never there: i g = (g + s g) / 2
    by sigmoid        tanh(z) = 2 sigmoid(2 z) - 1, as LSTMUnit itself has it
    without candidate the same, but the candidate g = 2 s - 1 is never there: i g = 2 (i s) - i
    by kind           three sigmoids and a tanh; where the rule `gates_first` applies, splitting costs nothing

`scale` and `shift` `[4 D]` are what the gates are multiplied with and what is added to them before; there are none if
that changes nothing. The order of the gates is that of LSTMUnit: input, forget, output, candidate.

A form gives the factors of the backward step too. That they may be a multiple of what they should be is for the form
itself to set right, in `gradients`.

Source: caffe2/operators/lstm_unit_op.h.
"""

import abc
from typing import List, NamedTuple, Optional, Sequence, Tuple, Type

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.steps.rows import FEATURES

GATES = ("i", "f", "o", "g")


class Opened(NamedTuple):
    """The activation over all gates `[1, N, 4 D]` (by kind: the three sigmoids), and the gates `[1, N, D]`."""

    squashed: str
    input: str
    forget: str
    output: str
    candidate: str


class Form(abc.ABC):
    """`size` is D, `elements` how many a state `[N, D]` has, if known; `trains`: whether factors will be asked for.

    `of_training` is the form in the place of one that has none.
    """

    of_training: Optional[Type["Form"]] = None
    shift: Optional[str] = None
    scale: Optional[str] = None

    def __init__(self, loop: Loop, size: int, elements: Optional[int], forget_bias: float, trains: bool) -> None:
        self._loop, self._size, self._elements, self._trains = loop, size, elements, trains
        self._make_constants(forget_bias)

    @abc.abstractmethod
    def _make_constants(self, forget_bias: float) -> None:
        """The outer blobs that the form needs."""

    @abc.abstractmethod
    def opened(self, emitter: Emitter, scaled: str) -> Opened:
        """The gates, from what the activation takes."""

    def kept(self, emitter: Emitter, opened: Opened) -> str:
        """What the gates can be had from again, `[1, N, 4 D]`, by an operator that can write to a slice."""
        return emitter.new("Copy", [opened.squashed], "kept_gates")

    @abc.abstractmethod
    def opened_again(self, emitter: Emitter, kept: str) -> Opened:
        """The gates, from what was kept of them."""

    def emit_cell(self, emitter: Emitter, opened: Opened, cell_prev: str, cell: str) -> None:
        """The new cell state: the old one times the forget gate, and the candidate times the input gate."""
        kept = self.product(emitter, opened.forget, cell_prev, "kept")
        added = self.product(emitter, opened.input, opened.candidate, "added")
        self._emit_sum(emitter, opened, kept, added, cell)

    def _emit_sum(self, emitter: Emitter, opened: Opened, kept: str, added: str, cell: str) -> None:
        emitter.add("Sum", [kept, added], cell)

    def emit_hidden(self, emitter: Emitter, opened: Opened, bounded: str, hidden: str) -> None:
        """The new hidden state; `bounded` is tanh of the new cell state."""
        emitter.add("Mul", [opened.output, bounded], hidden)

    @abc.abstractmethod
    def gate_factors(self, emitter: Emitter, opened: Opened, cell_prev: str, bounded: str) -> str:
        """What the gradients of the gates are multiples of, `[1, N, 4 D]`; `bounded` is tanh of the new state."""

    def gradients(self, emitter: Emitter, of_hidden: str, of_cell: str, cell_factor: str) -> Tuple[str, str]:
        """The gradients of the new states to multiply the factors with: of the hidden, and of the cell through both."""
        through_hidden = self.product(emitter, of_hidden, cell_factor, "through_hidden")
        return of_hidden, emitter.new("Sum", [of_cell, through_hidden], "cell_total")

    def bounded(self, emitter: Emitter, cell: str) -> str:
        """tanh of the new state."""
        return vectorised.emit(emitter, vectorised.TANH, cell, "bounded", self._elements)

    def product(self, emitter: Emitter, one: str, other: str, name: str) -> str:
        """Of two blobs `[1, N, D]`, into a new one."""
        return vectorised.emit_product(emitter, [one, other], name, self._elements)

    def _activated(self, emitter: Emitter, kind: str, scaled: str, name: str = "squashed", gates: int = 4) -> str:
        elements = None if self._elements is None else gates * self._elements
        return vectorised.emit(emitter, kind, scaled, name, elements)

    def _columns(self, name: str, *values: float) -> str:
        """An outer blob with one value for each gate."""
        parts = [
            self._loop.add_before("ConstantFill", [], "lstm_constant", shape=[self._size], value=value)
            for value in values
        ]
        return self._outer(self._loop.add_columns(parts, name))

    def _single(self, name: str, value: float) -> str:
        return self._outer(self._loop.add_before("ConstantFill", [], name, shape=[1], value=value))

    def _outer(self, blob: str) -> str:
        self._loop.add_reference(blob)
        return blob


class ByTanh(Form):
    """The slopes of the sigmoids are 1/4 of 1 - squashed^2, that of tanh is the whole. With 4 i in the place of i all
    four factors come four times as large; then f does so too, and the backward step divides where there is least to.
    """

    def _make_constants(self, forget_bias: float) -> None:
        times = 4.0 if self._trains else 1.0
        self._make_halves(forget_bias)
        self._opening = self._columns("lstm_opening", times / 2, times / 2, 0.5, 1.0)
        self._middle = self._columns("lstm_middle", times / 2, times / 2, 0.5, 0.0)
        if self._trains:
            self._one, self._quarter = self._single("lstm_one", 1.0), self._single("lstm_quarter", 1 / times)

    def _make_halves(self, forget_bias: float) -> None:
        self.scale = self._columns("lstm_scale", 0.5, 0.5, 0.5, 1.0)
        self.shift = self._columns("lstm_shift", 0.0, forget_bias / 2, 0.0, 0.0)

    def opened(self, emitter: Emitter, scaled: str) -> Opened:
        return self.opened_again(emitter, self._activated(emitter, vectorised.TANH, scaled))

    def opened_again(self, emitter: Emitter, kept: str) -> Opened:
        opened = emitter.aten("addcmul", [self._middle, kept, self._opening], "opened")
        return Opened(kept, *emitter.split(opened, GATES, FEATURES))

    def _emit_sum(self, emitter: Emitter, opened: Opened, kept: str, added: str, cell: str) -> None:
        if self._trains:
            emitter.add("WeightedSum", [kept, self._quarter, added, self._quarter], cell)
        else:
            emitter.add("Sum", [kept, added], cell)

    def gate_factors(self, emitter: Emitter, opened: Opened, cell_prev: str, bounded: str) -> str:
        others = emitter.concat([opened.candidate, cell_prev, bounded, opened.input], "others", FEATURES)
        # TanhGradient(Y, X) is X (1 - Y^2).
        return emitter.new("TanhGradient", [opened.squashed, others], "gate_factors")

    def gradients(self, emitter: Emitter, of_hidden: str, of_cell: str, cell_factor: str) -> Tuple[str, str]:
        quarter = emitter.new("Scale", [of_hidden], "hidden_quarter", scale=0.25)
        through_hidden = self.product(emitter, quarter, cell_factor, "through_hidden")
        return quarter, emitter.new("WeightedSum", [of_cell, self._quarter, through_hidden, self._one], "cell_quarter")


class ByHalves(ByTanh):
    """`opened` has what tanh makes of all four gates; factors are of the gates themselves."""

    of_training = ByTanh

    def _make_constants(self, forget_bias: float) -> None:
        self._make_halves(forget_bias)
        self._half = self._single("lstm_half", 0.5)

    def opened_again(self, emitter: Emitter, kept: str) -> Opened:
        names = ["{}_squashed".format(gate) for gate in GATES[:-1]]
        return Opened(kept, *emitter.split(kept, [*names, GATES[-1]], FEATURES))

    def emit_cell(self, emitter: Emitter, opened: Opened, cell_prev: str, cell: str) -> None:
        # In this order: of a gate that is closed nothing is left, and of a state that is kept all of it.
        added = self._twice(emitter, opened.input, opened.candidate, "added")
        self._emit_half(emitter, added + self._twice(emitter, opened.forget, cell_prev, "kept"), cell)

    def emit_hidden(self, emitter: Emitter, opened: Opened, bounded: str, hidden: str) -> None:
        self._emit_half(emitter, self._twice(emitter, opened.output, bounded, "shown"), hidden)

    def _twice(self, emitter: Emitter, squashed: str, blob: str, name: str) -> List[str]:
        """What twice the product of a gate and `blob` is the sum of."""
        if vectorised.prefers_atens_product(self._elements):
            return [emitter.aten("addcmul", [blob, squashed, blob], name + "_twice")]
        return [blob, self.product(emitter, squashed, blob, name)]

    def _emit_half(self, emitter: Emitter, addends: Sequence[str], target: str) -> None:
        """Half their sum."""
        if len(addends) == 1:
            emitter.add("Scale", addends, target, scale=0.5)
        else:
            emitter.add("WeightedSum", [blob for addend in addends for blob in (addend, self._half)], target)


class BySigmoid(Form):
    """The slope of tanh is four times that of the sigmoid in its place."""

    def _make_constants(self, forget_bias: float) -> None:
        self.scale = self._columns("lstm_scale", 1.0, 1.0, 1.0, 2.0)
        self.shift = self._columns("lstm_shift", 0.0, forget_bias, 0.0, 0.0)

    def opened(self, emitter: Emitter, scaled: str) -> Opened:
        return self.opened_again(emitter, self._activated(emitter, vectorised.SIGMOID, scaled))

    def opened_again(self, emitter: Emitter, kept: str) -> Opened:
        i, f, o, half = emitter.split(kept, ("i", "f", "o", "half_g"), FEATURES)
        if vectorised.prefers_sum_of_three(self._elements):
            return Opened(kept, i, f, o, emitter.new("Sum", [half, half, self._minus_ones()], "g"))
        return Opened(kept, i, f, o, emitter.aten("add", [self._minus_one(), half], "g", alpha=2.0))

    def _minus_one(self) -> str:
        return self._single("lstm_minus_one", -1.0)

    def _minus_ones(self) -> str:
        """As many as a state has numbers."""
        shape = self._loop.add_shape_of_rows(self._size)
        ones = self._loop.add_before("ConstantFill", [shape], "lstm_minus_ones", input_as_shape=1, value=-1.0)
        self._loop.known.always_rows[ones] = self._size
        return self._outer(ones)

    def gate_factors(self, emitter: Emitter, opened: Opened, cell_prev: str, bounded: str) -> str:
        of_candidate = emitter.new("Scale", [opened.input], "i_times_4", scale=4.0)
        others = emitter.concat([opened.candidate, cell_prev, bounded, of_candidate], "others", FEATURES)
        # SigmoidGradient(Y, X) is X Y (1 - Y).
        return emitter.new("SigmoidGradient", [opened.squashed, others], "gate_factors")


class WithoutCandidate(BySigmoid):
    """In place of the candidate there is its sigmoid; that is no way to get at factors."""

    of_training = BySigmoid

    def _make_constants(self, forget_bias: float) -> None:
        super()._make_constants(forget_bias)
        self._one, self._two = self._single("lstm_one", 1.0), self._single("lstm_two", 2.0)
        self._subtracted = self._minus_one()

    def opened(self, emitter: Emitter, scaled: str) -> Opened:
        squashed = self._activated(emitter, vectorised.SIGMOID, scaled)
        return Opened(squashed, *emitter.split(squashed, ("i", "f", "o", "half_g"), FEATURES))

    def _emit_sum(self, emitter: Emitter, opened: Opened, kept: str, added: str, cell: str) -> None:
        terms = [kept, self._one, added, self._two, opened.input, self._subtracted]
        emitter.add("WeightedSum", terms, cell)


class ByKind(Form):
    """Each gate by its own activation, and nothing to set right before and after."""

    def _make_constants(self, forget_bias: float) -> None:
        if forget_bias:
            self.scale = self._columns("lstm_scale", 1.0, 1.0, 1.0, 1.0)
            self.shift = self._columns("lstm_shift", 0.0, forget_bias, 0.0, 0.0)

    def opened(self, emitter: Emitter, scaled: str) -> Opened:
        *names, candidate = GATES
        widths = [len(names) * self._size, self._size]
        opening, adding = emitter.split(scaled, ("ifo_sums", "g_sums"), FEATURES, split=widths)
        squashed = self._activated(emitter, vectorised.SIGMOID, opening, gates=len(names))
        i, f, o = emitter.split(squashed, names, FEATURES)
        return Opened(squashed, i, f, o, self._activated(emitter, vectorised.TANH, adding, candidate, gates=1))

    def kept(self, emitter: Emitter, opened: Opened) -> str:
        return emitter.concat([opened.squashed, opened.candidate], "kept_gates", FEATURES)

    def opened_again(self, emitter: Emitter, kept: str) -> Opened:
        return Opened(kept, *emitter.split(kept, GATES, FEATURES))

    def gate_factors(self, emitter: Emitter, opened: Opened, cell_prev: str, bounded: str) -> str:
        # SigmoidGradient(Y, X) is X Y (1 - Y), TanhGradient(Y, X) is X (1 - Y^2).
        factors = [
            emitter.new("SigmoidGradient", [opened.input, opened.candidate], "i_factor"),
            emitter.new("SigmoidGradient", [opened.forget, cell_prev], "f_factor"),
            emitter.new("SigmoidGradient", [opened.output, bounded], "o_factor"),
            emitter.new("TanhGradient", [opened.candidate, opened.input], "g_factor"),
        ]
        return emitter.concat(factors, "gate_factors", FEATURES)


# Of these the fastest is found by itself.
FORMS: Tuple[Type[Form], ...] = (ByTanh, ByHalves, BySigmoid, WithoutCandidate)
# They do nothing with all gates but squash and split them. Whether they are faster depends on what the product can be,
# as then the rule `gates_first` applies.
ONLY_SPLIT: Tuple[Type[Form], ...] = (ByHalves, ByKind)


def make_form(
    form: Type[Form], loop: Loop, size: int, elements: Optional[int], forget_bias: float, trains: bool
) -> Form:
    """The form, or the one in its place where it `trains`."""
    chosen = form.of_training if trains and form.of_training is not None else form
    return chosen(loop, size, elements, forget_bias, trains)
