"""The sizes of outer blobs, as far as they are known when a net is optimised.

They come from the caller, from blobs that are in the workspace, and from shape inference over the operators before the
loop.
"""

import itertools
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.loops.loop import Loop, laid_out_when_changed, stands_for_loop
from caffe2_recurrent.loops.shape_inference import Inference, Shape
from caffe2_recurrent.operator_arguments import INITIAL, STATES, integers, net_to_read, strings
from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR, is_on_onednn, read_before_written

# In place of one: a prime, so that it is not taken for another size, or for a product of some.
SEVERAL = 1009


class Sizes:
    """Shapes of outer blobs by name; None where one is not known. Those of `parameters` never change."""

    def __init__(self, shapes: Mapping[str, Shape], parameters: Iterable[str] = ()) -> None:
        self._shapes, self._parameters = dict(shapes), frozenset(parameters)

    def shape(self, outer: str) -> Optional[Shape]:
        return self._shapes.get(outer)

    def known(self, outer: str) -> Shape:
        """The shape of a blob that has been found to have one."""
        return self._shapes[outer]

    def is_parameter(self, outer: str) -> bool:
        """Whether it is one of those that `init_net` makes."""
        return outer in self._parameters

    def add(self, outer: str, like: str) -> None:
        """A blob that a rule adds has the shape of another one, if that is known."""
        if like in self._shapes:
            self._shapes[outer] = self._shapes[like]

    def set(self, outer: str, shape: Shape) -> None:
        """A blob that a rule adds has this shape."""
        self._shapes[outer] = shape

    def when_larger(self) -> "Sizes":
        """The same, but for what is one now: in a later run it may be several, unless it is of a parameter.

        So one sequence is told from a blob that has but one row whatever the net is fed.
        """
        several = {
            blob: shape if blob in self._parameters else tuple(SEVERAL if size == 1 else size for size in shape)
            for blob, shape in self._shapes.items()
        }
        return Sizes(several, self._parameters)

    def made_by(self, operators: Sequence[caffe2_pb2.OperatorDef]) -> Dict[str, Shape]:
        """The shapes of what operators compute that a rule has put in front of a loop."""
        return self.behind(operators).shapes

    def behind(self, operators: Sequence[caffe2_pb2.OperatorDef]) -> Inference:
        """What is known once they have run."""
        inference = Inference(self._shapes)
        inference.follow(itertools.chain.from_iterable(map(_as_before, operators)))
        return inference

    def steps(self, loop: Loop) -> Optional[int]:
        """T, if it is known. One of no steps says nothing of how many there will be."""
        sequence = self.shape(loop.inputs[0])
        return (sequence[0] or None) if sequence else None

    def batch(self, loop: Loop) -> Optional[int]:
        """N, if it is known from the sequence or from an initial state. No sequences say nothing either."""
        shapes = [self.shape(loop.inputs[0]), *(self.shape(state.outer_initial) for state in loop.states)]
        axes = [-2] * len(shapes)
        axes[0] = 1
        return next((shape[axis] for shape, axis in zip(shapes, axes) if shape and len(shape) > 1), None) or None

    def state_size(self, loop: Loop, inner: str) -> Optional[int]:
        """D of the state that the step-net blob `inner` is linked to, if it is known."""
        link = loop.link(inner)
        initial = next(
            (state.outer_initial for state in loop.states if link and state.outer_states == link.outer), None
        )
        shape = self.shape(initial) if initial is not None else None
        return shape[-1] if shape else None


def find_sizes(
    net: caffe2_pb2.NetDef, init_net: Optional[caffe2_pb2.NetDef], given_shapes: Mapping[str, Shape]
) -> Sizes:
    """What is known about the blobs of `net`: what was given, what the workspace holds, and what follows from both.

    `init_net` makes the parameters, which need not have happened yet.
    """
    parameters = made_by_init_net(init_net)
    known = shapes_of_inputs(net, parameters, given_shapes)
    replaced = _replaced(net).difference(given_shapes)
    lasting = {blob: shape for blob, shape in known.items() if blob not in replaced}
    return Sizes(_through_loops(net, Inference(lasting, known)), parameters)


def _replaced(net: caffe2_pb2.NetDef) -> Set[str]:
    """What operators read and others have written anew in front of them."""
    anew: Set[str] = set()
    found: Set[str] = set()
    for operator in net.op:
        found |= anew.intersection(operator.input)
        anew.update(set(operator.output).difference(operator.input))
    return found


def made_by_init_net(init_net: Optional[caffe2_pb2.NetDef]) -> Dict[str, Shape]:
    inference = Inference({})
    inference.follow([] if init_net is None else init_net.op)
    return inference.shapes


def shapes_of_inputs(
    net: caffe2_pb2.NetDef, parameters: Mapping[str, Shape], given_shapes: Mapping[str, Shape]
) -> Dict[str, Shape]:
    """Those of what the net reads from outside: as they were given, or are in the workspace, or will be."""
    # What the net makes may still be there from a run with other sizes. What it updates, it reads first.
    inputs = read_before_written(net.op)
    shapes = {blob: workspace_blobs.shape(blob) for blob in inputs if blob not in given_shapes}
    known = {blob: shape for blob, shape in shapes.items() if shape is not None}
    return {**parameters, **known, **given_shapes}


def _through_loops(net: caffe2_pb2.NetDef, inference: Inference) -> Dict[str, Shape]:
    """Caffe2 infers nothing about the outputs of loops, and so of what stands behind one; each is done in turn."""
    before: List[caffe2_pb2.OperatorDef] = []
    for operator in itertools.chain.from_iterable(map(_as_before, net.op)):
        if operator.type == OPERATOR:
            inference.follow(before)
            inference.shapes.update(loop_outputs(operator, inference.shapes))
            before.clear()
        elif not operator.is_gradient_op and operator.type != GRADIENT_OPERATOR:
            before.append(operator)
    return inference.shapes


def _as_before(operator: caffe2_pb2.OperatorDef) -> Iterable[caffe2_pb2.OperatorDef]:
    """What a product by oneDNN stands for, or steps that are written out: the other branch of their `If`; and the
    operators that lay out weights."""
    if operator.type != "If":
        return [operator]
    laid_out = laid_out_when_changed(operator)
    if laid_out:
        return itertools.chain.from_iterable(map(_as_before, laid_out))
    is_product = any(map(is_on_onednn, net_to_read(operator, "then_net").op))
    return net_to_read(operator, "else_net").op if is_product or stands_for_loop(operator) else [operator]


def loop_outputs(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape]) -> Dict[str, Shape]:
    """`[T, N, D]` and `[1, N, D]` for the outputs of a loop, as far as sequence and initial values are known.

    There is a slice more for each that an initial value `[S, N, D]` has beyond one.
    """
    found: Dict[str, Shape] = {}
    states = loop_states(operator, known)
    aliases = zip(*(strings(operator, "alias_" + end) for end in ("src", "dst")), integers(operator, "alias_offset"))
    for state, output, offset in aliases:
        if state in states:
            slices, *of_slice = states[state]
            found[output] = (slices - offset if offset >= 0 else -offset, *of_slice)
    return found


def loop_states(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape]) -> Dict[str, Shape]:
    """All values of the states of a loop, `[S + T, N, D]`, as far as sequence and initial values `[S, N, D]` are known.

    Source: initializeRecurrentInput and applyOffsetAlias in caffe2/operators/rnn/recurrent_network_op.h.
    """
    sequence = known.get(operator.input[0])
    found: Dict[str, Shape] = {}
    if sequence is None or len(sequence) < 2:
        return found
    for state, position in zip(strings(operator, STATES), integers(operator, INITIAL)):
        initial = known.get(operator.input[position])
        if initial:
            before = initial[0] if len(initial) == 3 else 1
            found[state] = (before + sequence[0], sequence[1], initial[-1])
    return found
