"""What the steps of a loop say of the sizes of its states, and whether they can multiply what they read."""

from typing import Dict, Mapping, NamedTuple, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.shape_checks import FED, add_misfit, columns_of
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.tensors import FLOAT, Tensor, infer


class Unit(NamedTuple):
    """The positions of the states and the gates that it reads, and how many gates an element of a state has."""

    states: Tuple[int, ...]
    gates: int
    each: int


UNITS = {"LSTMUnit": Unit((0, 1), 2, 4), "GRUUnit": Unit((0,), 1, 3)}


class Size(NamedTuple):
    """How many elements a state must have, and why, in the caller's words."""

    elements: int
    reason: str


def sizes_of_states(loop: Loop, known: Mapping[str, Shape], values: Problems) -> Dict[str, Size]:
    """What the steps say, by the outer blob of the states, as far as the outer shapes `known` tell.

    Notes factors that do not fit and are no states.
    """
    found: Dict[str, Size] = {}
    # What is said late in a step, as by its unit, may be what an early operator needs to know.
    for _ in loop.states:
        before = len(found)
        _Step(loop, known, found).run(Problems(""))
        if len(found) == before:
            break
    _Step(loop, known, found).run(values)
    return found


class _Step:
    """One step with the shapes of what it reads and makes; `found` are the sizes of states, and gets more of them."""

    def __init__(self, loop: Loop, known: Mapping[str, Shape], found: Dict[str, Size]) -> None:
        self._found = found
        self._batch = [1, *known.get(loop.inputs[0], ())[1:2]][-1]
        initial = {state.outer_states: state.outer_initial for state in loop.states}
        self._states = {link.inner: link.outer for link in loop.links if link.outer in initial}
        self._operators, self._written = loop.operators, loop.written
        self._tensors: Dict[str, Tensor] = {blob: Tensor(known[blob], FLOAT) for blob in loop.references & set(known)}
        self._shown = {blob: "'{}' {}".format(blob, known[blob]) for blob in self._tensors}
        for link in loop.links:
            outer = initial.get(link.outer, link.outer)
            if outer not in known or link.inner in self._written:
                continue
            if link.outer not in initial:
                self._tensors[link.inner] = Tensor((1, self._batch, *known[outer][2:]), FLOAT)
            elif link.outer in found or known[outer]:
                size = found[link.outer].elements if link.outer in found else known[outer][-1]
                self._tensors[link.inner] = Tensor((1, self._batch, size), FLOAT)
            self._shown[link.inner] = "'{}' {}".format(outer, known[outer])

    def run(self, values: Problems) -> None:
        for operator in self._operators:
            if operator.type == "FC" and not is_on_onednn(operator):
                self._multiply(operator, values)
            elif operator.type in UNITS:
                self._unit(operator)
            made = infer(operator, [self._tensors.get(blob) for blob in operator.input])
            for position, blob in enumerate(operator.output):
                self._tensors.pop(blob, None)
                if position in made:
                    self._tensors[blob] = made[position]
                    self._shown[blob] = "'{}'".format(blob)
        for blob in self._states:
            # Only now: it may have been written in another shape before.
            if blob in self._written and blob in self._tensors and self._tensors[blob].shape:
                self._say(blob, self._tensors[blob].shape[-1], "as a step makes '{}' of it", blob)

    def _multiply(self, operator: caffe2_pb2.OperatorDef, values: Problems) -> None:
        left, right = operator.input[:2]
        columns = columns_of(operator, {blob: tensor.shape for blob, tensor in self._tensors.items()})
        if columns is None or columns[0] == columns[1]:
            return
        if left in self._states and left not in self._written:
            self._say(left, columns[1], "as a step multiplies it by {}", self._shown[right])
        else:
            add_misfit(operator, [self._shown[left], self._shown[right]], columns, values, FED)
        # What follows is looked at as if it did fit.
        shape = self._tensors[left].shape
        self._tensors[left] = Tensor((*shape[: integer(operator, "axis", 1)], columns[1]), FLOAT)

    def _unit(self, operator: caffe2_pb2.OperatorDef) -> None:
        unit = UNITS[operator.type]
        gates = operator.input[unit.gates]
        if gates not in self._tensors:
            return
        columns = self._tensors[gates].shape[-1]
        for state in unit.states:
            blob = operator.input[state]
            if blob in self._states and columns % unit.each == 0:
                self._say(
                    blob, columns // unit.each, "as {} reads it with '{}' of {} columns", operator.type, gates, columns
                )

    def _say(self, inner: str, elements: int, reason: str, *shown: object) -> None:
        tensor = self._tensors.get(inner)
        outer = self._states[inner]
        if outer not in self._found:
            self._found[outer] = Size(elements, reason.format(*shown))
        if inner not in self._written and tensor is not None:
            self._tensors[inner] = Tensor((1, self._batch, elements), FLOAT)
