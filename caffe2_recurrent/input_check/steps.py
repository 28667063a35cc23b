"""What the steps of a loop say of the sizes of its states, and whether what they read fits together."""

from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.input_check.operands import COMBINING, check_bias, fits
from caffe2_recurrent.loops.lengths import lengths_of_mask
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.shape_checks import FED, add_misfit, check_dimensions, columns_of, say_columns, show
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.tensors import FLOAT, Tensor, infer


class Unit(NamedTuple):
    """The positions of the states and the gates that it reads, and how many gates an element of a state has."""

    states: Tuple[int, ...]
    gates: int
    each: int


UNITS = {"LSTMUnit": Unit((0, 1), 2, 4), "GRUUnit": Unit((0,), 1, 3)}

# Arguments of a mask with which rows have lengths in common.
READING_OTHERWISE = ("batch", "repeat_from_axis")


class Batch(NamedTuple):
    """How many sequences there are, as far as that is known, and whether all that is fed is for as many."""

    sequences: Optional[int]
    agreed: bool


class Size(NamedTuple):
    """How many elements a state must have, why, in the caller's words, and the blob that says so."""

    elements: int
    reason: str
    shown: str


class Rows(NamedTuple):
    """How many lengths a mask reads, and of what."""

    number: int
    shown: str


class Steps(NamedTuple):
    """What steps say: `sizes` by the outer blob of the states, `rows` by the lengths."""

    sizes: Mapping[str, Size]
    rows: Mapping[str, Rows]


def read_steps(loop: Loop, known: Mapping[str, Shape], batch: Batch, values: Problems) -> Steps:
    """What the steps say, as far as the outer shapes `known` tell.

    Notes what does not fit and is no state, and what steps say of a state that contradicts itself.
    """
    taken: Dict[str, int] = {}
    # What is said late in a step, as by its unit, may be what an early operator needs to know.
    for _ in loop.states:
        step = _Step(loop, known, batch, taken)
        step.run(Problems(""))
        taken = {states: sizes[0].elements for states, sizes in step.said.items()}
    step = _Step(loop, known, batch, taken)
    step.run(values)
    found = dict(step.guessed)
    for states, sizes in step.said.items():
        others = [size for size in sizes if size.elements != sizes[0].elements]
        if others:
            _add_contradiction(loop, states, sizes[0], others[0], values)
            found.pop(states, None)
        else:
            found[states] = sizes[0]
    return Steps(found, step.rows)


def _add_contradiction(loop: Loop, states: str, first: Size, other: Size, values: Problems) -> None:
    initial = next(state.outer_initial for state in loop.states if state.outer_states == states)
    text = (
        "{} and {} contradict each other, so no '{}' fits: it must have {} elements for each sequence, {}, and {}, {}; "
        "feed parameters of one size"
    )
    values.add(text, first.shown, other.shown, initial, first.elements, first.reason, other.elements, other.reason)


class _Step:
    """One step with the shapes of what it reads and makes; states are `taken` for some sizes, others as they were fed.

    `said` is what its operators say of the sizes of states, `guessed` what they make of others as they were fed, and
    `rows` what its masks read.
    """

    def __init__(self, loop: Loop, known: Mapping[str, Shape], batch: Batch, taken: Mapping[str, int]) -> None:
        self.said: Dict[str, List[Size]] = {}
        self.guessed: Dict[str, Size] = {}
        self.rows: Dict[str, Rows] = {}
        self._batch = batch
        # What is as large as some state was fed.
        self._as_fed: Set[str] = set()
        initial = {state.outer_states: state.outer_initial for state in loop.states}
        self._states = {link.inner: link.outer for link in loop.links if link.outer in initial}
        self._operators, self._written = loop.operators, loop.written
        self._shapes: Dict[str, Shape] = {blob: known[blob] for blob in loop.references & set(known)}
        self._shown = {blob: show(blob, known[blob]) for blob in self._shapes}
        for link in loop.links:
            outer = initial.get(link.outer, link.outer)
            if outer not in known or link.inner in self._written:
                continue
            if link.outer not in initial:
                self._shapes[link.inner] = (1, *known[outer][1:])
            elif link.outer in taken or known[outer]:
                size = taken[link.outer] if link.outer in taken else known[outer][-1]
                self._shapes[link.inner] = (1, batch.sequences or 1, size)
                if link.outer not in taken:
                    self._as_fed.add(link.inner)
            self._shown[link.inner] = show(outer, known[outer])

    def run(self, values: Problems) -> None:
        for operator in self._operators:
            read = [self._shapes.get(blob) for blob in operator.input]
            if operator.type == "FC" and not is_on_onednn(operator):
                read[0] = self._multiply(operator, values)
            elif operator.type in UNITS:
                self._unit(operator, values)
            elif lengths_of_mask(operator) is not None:
                self._mask(operator)
            made = self._made(operator, read, values)
            self._follow_fed(operator)
            for position, blob in enumerate(operator.output):
                self._shapes.pop(blob, None)
                if position in made:
                    self._shapes[blob] = made[position].shape
                    self._shown[blob] = self._show(operator, blob)
        for blob in self._states:
            # Only now: it may have been written in another shape before.
            if blob in self._written and blob in self._shapes:
                self._say_made(blob)

    def _made(
        self, operator: caffe2_pb2.OperatorDef, shapes: List[Optional[Shape]], values: Problems
    ) -> Mapping[int, Tensor]:
        known = [shape for shape in shapes if shape is not None]
        # Without the number of sequences little is known of what is made of them.
        if self._batch.sequences is None:
            return {}
        if len(known) == len(shapes) and not is_on_onednn(operator) and not fits(operator, known):
            if operator.type in COMBINING and self._batch.agreed:
                why = " and ".join(map(str, known))
                add_misfit(operator, [self._shown[blob] for blob in operator.input], why, values, FED)
            return {}
        return infer(operator, [None if shape is None else Tensor(shape, FLOAT) for shape in shapes])

    def _follow_fed(self, operator: caffe2_pb2.OperatorDef) -> None:
        # A product has the columns of its weight.
        read = operator.input[1:] if operator.type == "FC" else operator.input
        if self._as_fed.isdisjoint(read):
            self._as_fed -= set(operator.output)
        else:
            self._as_fed |= set(operator.output)

    def _show(self, operator: caffe2_pb2.OperatorDef, blob: str) -> str:
        """A product is as large as its weight has it."""
        of = " of " + self._shown[operator.input[1]] if operator.type == "FC" else ""
        return "'{}'{}".format(blob, of)

    def _multiply(self, operator: caffe2_pb2.OperatorDef, values: Problems) -> Optional[Shape]:
        """The shape of its left factor; where that does not fit, one that does, for what is made of it."""
        check_bias(operator, self._shapes, self._shown, values)
        left, right = operator.input[:2]
        check_dimensions(operator, self._shapes, self._shapes, values, FED)
        columns, axis = columns_of(operator, self._shapes), integer(operator, "axis", 1)
        if columns is None:
            return self._shapes.get(left) or self._left_of(self._shapes.get(right, ()), axis)
        shape = self._shapes[left]
        by_element = axis in (-1, len(shape) - 1)
        if by_element and self._is_read_state(left):
            shown = self._shown[right]
            self._say(left, Size(columns[1], "as a step multiplies it by " + shown, shown), right)
        elif columns[0] != columns[1] and (by_element or self._batch.agreed):
            add_misfit(operator, [self._shown[left], self._shown[right]], say_columns(columns), values, FED)
        return shape if columns[0] == columns[1] else (*shape[:axis], columns[1])

    def _left_of(self, weight: Shape, axis: int) -> Optional[Shape]:
        """Rows, for what is made of the product; what they are made of is said where they are."""
        if axis not in (2, -1) or len(weight) != 2 or self._batch.sequences is None:
            return None
        return 1, self._batch.sequences, weight[1]

    def _unit(self, operator: caffe2_pb2.OperatorDef, values: Problems) -> None:
        unit = UNITS[operator.type]
        gates = operator.input[unit.gates]
        shape = self._shapes.get(gates, ())
        if len(shape) != 3:
            return
        if shape[-1] % unit.each:
            text = "{} has {} columns, of which {} reads {} for each element of a state; feed parameters of one size"
            values.add(text, self._shown[gates], shape[-1], operator.type, unit.each)
            return
        reason = "as {} reads it with '{}' of {} columns".format(operator.type, gates, shape[-1])
        for state in unit.states:
            blob = operator.input[state]
            if self._is_read_state(blob):
                self._say(blob, Size(shape[-1] // unit.each, reason, self._shown[gates]), gates)

    def _mask(self, operator: caffe2_pb2.OperatorDef) -> None:
        shape = self._shapes.get(operator.input[0])
        if shape is None or any(argument(operator, name) is not None for name in READING_OTHERWISE):
            return
        rows = Rows(
            int(np.prod(shape[: integer(operator, "axis", 1)])), "row of '{}' {}".format(operator.input[0], shape)
        )
        self.rows[operator.input[1]] = max(rows, self.rows.get(operator.input[1], rows))

    def _is_read_state(self, blob: str) -> bool:
        return blob in self._states and blob not in self._written

    def _say_made(self, blob: str) -> None:
        """Only the number of elements counts for what is linked, in whatever shape a step makes it."""
        shape, sequences = self._shapes[blob], self._batch.sequences
        is_plain = shape[:-1] in ((1, sequences), (sequences,))
        count = int(np.prod(shape))
        if sequences and (is_plain or (self._batch.agreed and count % sequences == 0)):
            size = Size(count // sequences, "as a step makes '{}' of it".format(blob), "'{}'".format(blob))
            self._say(blob, size, blob)

    def _say(self, state: str, size: Size, by: str) -> None:
        """What the blob `by` says of a state; as large as another one was fed, that is but a guess."""
        states = self._states[state]
        if by in self._as_fed:
            self.guessed.setdefault(states, size)
        else:
            self.said.setdefault(states, []).append(size)
