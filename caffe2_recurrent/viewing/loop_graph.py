"""Loops -> Graph.

    outer net     sequences, states with all their values, references, outputs; the operators next to a loop
      step        operators and blobs of one step
      backward    those of the backward step; what it reads of the forward pass is there again, in its colour

A blob that is written several times is a node each time, since the operators between see different values.
"""

from typing import Dict, Optional, Sequence, Tuple

from caffe2_recurrent.operators import GRADIENT_OPERATOR, LINK, OPERATOR, is_gradient_name
from caffe2_recurrent.viewing.graph import Graph, Kind, Role
from caffe2_recurrent.viewing.graph_parts import Parts
from caffe2_recurrent.viewing.kept import Place, StepBlob
from caffe2_recurrent.viewing.neighbours import add_neighbours
from caffe2_recurrent.viewing.short_names import common_scope
from caffe2_recurrent.viewing.source import SeenLoop, Source
from caffe2_recurrent.viewing.structure import Backward, Operators, State, View
from caffe2_recurrent.viewing.tensors import Tensor

OVER_STEPS = "sum over t"


def loop_graph(source: Source, loops: Sequence[SeenLoop], backward: bool = True) -> Graph:
    """The graph of some loops of a net, with or without their backward steps."""
    parts = Parts(source.name)
    for number, loop in enumerate(loops):
        forward = _Forward(parts, loop, "step {}".format(number))
        if backward and loop.structure.backward is not None:
            _Backward(parts, loop, "backward {}".format(number), loop.structure.backward, forward)
    add_neighbours(parts, source.net)
    return parts.graph()


class _Step:
    """The operators of a step in a cluster; subclasses say what the blobs at its borders are."""

    kind = Kind.FLOW

    def __init__(self, parts: Parts, loop: SeenLoop, key: str) -> None:
        self.parts, self.loop, self.key = parts, loop, key
        self.slices: Dict[str, View] = {}
        self.sources: Dict[str, str] = {}
        self.values: Dict[str, str] = {}

    def read(self, blob: str) -> str:
        """The node of a blob that the step reads and has not written."""
        return self.own(blob, Role.VALUE, "t" if blob == self.loop.structure.timestep else "")

    def written(self, blob: str, last: bool) -> Role:
        """The role of a blob that the step has just written, for the last time or not."""
        return Role.VALUE

    def source(self, blob: str) -> str:
        """The node of a blob as the step finds it."""
        if blob not in self.sources:
            self.sources[blob] = self.read(blob)
        return self.sources[blob]

    def value(self, blob: str) -> str:
        """The node of a blob as the step has left it so far."""
        return self.values[blob] if blob in self.values else self.source(blob)

    def own(self, blob: str, role: Role, small: str = "", version: str = "given") -> str:
        return self.parts.blob("{} blob {} {}".format(self.key, version, blob), self.key, role, blob, small)

    def add_operators(self, operators: Operators) -> None:
        last = {blob: position for position, operator in enumerate(operators) for blob in operator.output}
        for position, operator in enumerate(operators):
            if operator.type == LINK:
                # Drawn as the links of the engine are, which no operator stands for.
                continue
            node = self.parts.operator("{} operator {}".format(self.key, position), self.key, operator)
            for blob in operator.input:
                self.parts.edge(self.value(blob), node, self.kind)
            for blob in operator.output:
                self.values[blob] = self.write(blob, position, last[blob] == position)
                self.parts.edge(node, self.values[blob], self.kind)

    def write(self, blob: str, position: int, last: bool) -> str:
        """The node of a blob that operator `position` writes."""
        return self.own(blob, self.written(blob, last), self.small(blob) if last else "", str(position))

    def small(self, blob: str) -> str:
        """What is said of a blob of the step: which slice of an outer blob it is."""
        return self.slices[blob].places if blob in self.slices else ""

    def shape(self, blob: str) -> str:
        return shape_text(self.loop.sizes.outer.get(blob))

    def initial(self, state: State) -> str:
        """Which slices the initial value is."""
        tensor = self.loop.sizes.outer.get(state.outer_initial)
        several = tensor is not None and len(tensor.shape) == 3 and tensor.shape[0] > 1
        return "[:{}]".format(tensor.shape[0]) if tensor is not None and several else "[0]"


class _Forward(_Step):
    """The forward step, and the blobs of the outer net that it is linked to."""

    def __init__(self, parts: Parts, loop: SeenLoop, key: str) -> None:
        super().__init__(parts, loop, key)
        structure = loop.structure
        which = "step" if structure.backward_pass_of is None else "step of the backward pass"
        parts.cluster(key, "{}\n{}, {}".format(_title(OPERATOR, loop), which, _steps(loop, 1)), _scopes(loop))
        self.before = {view.inner: view for state in structure.states for view in state.before}
        self.after = {view.inner: view for state in structure.states for view in state.after}
        self.sequences = {sequence.view.inner: sequence.view for sequence in structure.sequences}
        self.buffers = {view.inner: view for view in structure.buffers}
        self.shown = {view.inner: view for view in structure.shown}
        self.slices = {view.inner: view for view in (*structure.views, *structure.shown)}
        self.blobs: Dict[str, StepBlob] = {blob.inner: blob for blob in loop.memory.blobs}
        self.add_operators(structure.operators)
        self.add_links()

    def read(self, blob: str) -> str:
        if blob in self.sequences:
            return self.own(blob, Role.SEQUENCE, super().small(blob))
        if blob in self.before or blob in self.shown:
            return self.own(blob, self.role(blob), self.small(blob))
        if any(blob == reference.outer for reference in self.loop.structure.references):
            return self.parts.outer(blob, Role.REFERENCE, self.shape(blob))
        return super().read(blob)

    def written(self, blob: str, last: bool) -> Role:
        return self.role(blob) if last else super().written(blob, last)

    def role(self, blob: str) -> Role:
        """What a blob of the step is at its end."""
        if blob in self.before or blob in self.after:
            return Role.STATE
        if blob in self.shown:
            return _role_of_shown(self.shown[blob])
        found, is_sequence = self.blobs.get(blob), blob in self.sequences
        if self.loop.structure.backward is None or found is None:
            return Role.SEQUENCE if is_sequence else Role.VALUE
        if found.computed_again:
            return Role.COMPUTED_AGAIN
        kept = found.read_back and (found.place is Place.OWN or is_sequence)
        if kept or blob in self.buffers:
            return Role.KEPT
        return Role.SEQUENCE if is_sequence else Role.VALUE

    def small(self, blob: str) -> str:
        found = self.blobs.get(blob)
        if found is None or found.bytes is None or self.role(blob) is not Role.KEPT:
            return super().small(blob)
        return small_print(super().small(blob), "{:,} bytes".format(found.bytes))

    def add_links(self) -> None:
        parts, structure = self.parts, self.loop.structure
        for view in self.sequences.values():
            outer = parts.outer(view.outer, Role.SEQUENCE, self.shape(view.outer))
            parts.edge(outer, self.source(view.inner), Kind.FLOW)
        for state in structure.states:
            of_all = parts.outer(state.outer_states, Role.STATE, self.shape(state.outer_states))
            small = small_print(self.initial(state), self.shape(state.outer_initial))
            parts.edge(parts.outer(state.outer_initial, Role.STATE, small), of_all, Kind.FLOW)
            for view in state.before:
                parts.edge(of_all, self.source(view.inner), Kind.TIME)
            for view in state.after:
                parts.edge(self.value(view.inner), of_all, Kind.TIME)
        gradients = {sequence.outer_gradient for sequence in structure.sequences}
        if structure.backward is not None:
            gradients.update(view.outer for view in structure.backward.views)
        for view in self.buffers.values():
            role = Role.GRADIENT if view.outer in gradients else Role.KEPT
            outer = parts.outer(view.outer, role, self.shape(view.outer))
            parts.edge(self.value(view.inner), outer, Kind.FLOW)
        for view in structure.shown:
            outer = parts.outer(view.outer, _role_of_shown(view), self.shape(view.outer))
            if view.inner in self.sources:
                parts.edge(outer, self.source(view.inner), Kind.FLOW)
            if view.inner in self.values:
                parts.edge(self.value(view.inner), outer, Kind.FLOW)
        states = {state.outer_states for state in structure.states}
        for output in structure.outputs:
            small = small_print(output.places, self.shape(output.outer))
            # What a backward pass of its own reads or writes is kept as a state is, and is none.
            role = Role.STATE if output.outer_states in states else Role.VALUE
            of_all = parts.outer(output.outer_states, role)
            parts.edge(of_all, parts.outer(output.outer, role, small), Kind.FLOW)


class _Backward(_Step):
    """The backward step, and the gradients of the outer net that it is linked to."""

    kind = Kind.BACK

    def __init__(self, parts: Parts, loop: SeenLoop, key: str, backward: Backward, forward: _Forward) -> None:
        super().__init__(parts, loop, key)
        self.backward, self.forward = backward, forward
        title = _title(GRADIENT_OPERATOR, loop) if backward.in_net else _title(OPERATOR, loop)
        parts.cluster(key, "{}\nbackward step, {}".format(title, _steps(loop, -1)), _scopes(loop))
        self.slices = {view.inner: view for view in backward.views}
        self.references = {reference.outer for reference in loop.structure.references}
        self.sums = [
            (reference.inner_gradient, reference.outer_gradient)
            for reference in loop.structure.references
            if reference.inner_gradient is not None and reference.outer_gradient is not None
        ]
        self.needed = {blob for operator in backward.operators for blob in operator.input}
        self.again = set(loop.structure.computed_again)
        self.add_operators(backward.operators)
        self.add_links()

    def read(self, blob: str) -> str:
        if blob in self.slices:
            return self.own(blob, Role.GRADIENT, self.small(blob))
        if blob in self.forward.slices:
            return self.again_here(blob, self.forward.slices[blob].places)
        if blob in self.references:
            return self.own(blob, Role.REFERENCE)
        if blob in self.forward.blobs:
            return self.again_here(blob)
        return super().read(blob)

    def again_here(self, blob: str, small: str = "") -> str:
        """A blob of the forward step, shown a second time; kept ones are joined to where they were computed."""
        role = self.forward.role(blob)
        node = self.own(blob, role, small)
        if role is Role.KEPT:
            self.parts.edge(self.forward.value(blob), node, Kind.KEPT)
        return node

    def written(self, blob: str, last: bool) -> Role:
        return Role.COMPUTED_AGAIN if blob in self.again else Role.GRADIENT

    def write(self, blob: str, position: int, last: bool) -> str:
        if last and blob not in self.needed and (blob, blob) in self.sums:
            # The step's part and the sum have one name, and nothing comes between them.
            return self.parts.outer(blob, Role.GRADIENT, OVER_STEPS)
        return super().write(blob, position, last)

    def add_links(self) -> None:
        parts, structure = self.parts, self.loop.structure
        gradients = {state.outer_states: state.outer_states_gradient for state in structure.states}
        for view in self.slices.values():
            outer = parts.outer(view.outer, Role.GRADIENT, self.shape(view.outer))
            kind = Kind.TIME_BACK if view.outer in gradients.values() else Kind.BACK
            if view.inner in self.values and view.inner not in self.sources:
                parts.edge(self.value(view.inner), outer, kind)
            else:
                parts.edge(outer, self.source(view.inner), kind)
        for inner, summed in self.sums:
            into = parts.outer(summed, Role.GRADIENT, OVER_STEPS)
            if self.value(inner) != into:
                parts.edge(self.value(inner), into, Kind.BACK)
        for state in structure.states:
            if state.outer_states_gradient is not None and state.outer_gradient is not None:
                of_all = parts.outer(state.outer_states_gradient, Role.GRADIENT)
                parts.edge(of_all, parts.outer(state.outer_gradient, Role.GRADIENT, self.initial(state)), Kind.BACK)
        for output in structure.outputs:
            states_gradient = gradients.get(output.outer_states)
            if output.outer_gradient is not None and states_gradient is not None:
                incoming = parts.outer(output.outer_gradient, Role.GRADIENT, output.places)
                parts.edge(incoming, parts.outer(states_gradient, Role.GRADIENT), Kind.BACK)


def _role_of_shown(view: View) -> Role:
    return Role.GRADIENT if is_gradient_name(view.outer) else Role.KEPT


def shape_text(tensor: Optional[Tensor]) -> str:
    """Not as a list, which stands for slices."""
    return "" if tensor is None else " x ".join(map(str, tensor.shape))


def small_print(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _scopes(loop: SeenLoop) -> Tuple[str, ...]:
    """What the loop's own blobs begin with in the outer net, and in its steps."""
    return (loop.structure.scope, common_scope(loop.structure.computed))


def _title(operator: str, loop: SeenLoop) -> str:
    return "{} {}".format(operator, loop.structure.scope.rstrip("/")).rstrip()


def _steps(loop: SeenLoop, direction: int) -> str:
    """`t = 0, 1, ..., 19`, or backwards."""
    steps = loop.sizes.steps
    numbers = ["0", "1", "...", "T - 1" if steps is None else str(steps - 1)]
    if steps is not None and steps <= len(numbers):
        numbers = [str(number) for number in range(steps)]
    return "t = " + ", ".join(numbers[::direction])
