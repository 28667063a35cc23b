"""What a loop consists of, as a plain value read from its operators.

    Loop (loop.py) -> Structure -> text, graph

`inner_X` is a name in the step nets, `outer_X` one in the net around them.
"""

from dataclasses import dataclass
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.gradient_maker import GRADIENT_OPERATOR, POSITIONS, PYTHON_POSITIONS
from caffe2_recurrent.loop import Loop, read_links, read_renames
from caffe2_recurrent.operator_arguments import integer, integers, string, strings
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import gradient_name
from caffe2_recurrent.wiring import Alias, own_prefix

Operators = Sequence[caffe2_pb2.OperatorDef]


class View(NamedTuple):
    """A step-net blob that is a view: slices `[t + offset, t + offset + window)` of an outer blob."""

    inner: str
    outer: str
    offset: int
    window: int

    @property
    def places(self) -> str:
        """`[t]`, `[t + 1]`; with a window of 3, `[t:t + 3]`."""
        start, end = ("t + {}".format(step) if step else "t" for step in (self.offset, self.offset + self.window))
        return "[{}]".format(start if self.window == 1 else "{}:{}".format(start, end))


class SequenceInput(NamedTuple):
    """A sequence `[T, N, ...]` of which the step sees a slice; `outer_gradient` is None if it gets none."""

    view: View
    outer_gradient: Optional[str]


class State(NamedTuple):
    """`outer_states` `[T + 1, N, D]`, of which the step reads `before` and writes `after`.

    The engine fills its first slice with `outer_initial`, whose gradient is `outer_gradient`, None if it gets none.
    `outer_states_gradient` holds the gradients of all values, as the backward step reads and writes them.
    """

    outer_states: str
    outer_initial: str
    before: Tuple[View, ...]
    after: Tuple[View, ...]
    outer_gradient: Optional[str]
    outer_states_gradient: Optional[str]


class Reference(NamedTuple):
    """An outer blob that every step reads by its name, and its gradient, None if it gets none.

    `inner_gradient` is what one step adds to it.
    """

    outer: str
    inner_gradient: Optional[str]
    outer_gradient: Optional[str]


class Output(NamedTuple):
    """An output of the loop, a view of all states from `offset` on; a negative offset counts from the end.

    `receives`: whether the backward pass takes a gradient from it, None where that shows with the gradient operator
    only. `outer_gradient` is the name of that gradient, where it is known.
    """

    outer: str
    outer_states: str
    offset: int
    receives: Optional[bool]
    outer_gradient: Optional[str]

    @property
    def places(self) -> str:
        """`[1:]`, `[-1:]`."""
        return "[{}:]".format(self.offset)


class Executor(NamedTuple):
    """The settings of the RNN executor; None for the engine's own numbers."""

    enabled: bool
    threads: Optional[int]
    streams: Optional[int]


@dataclass(frozen=True)
class Backward:
    """The backward step: its operators, and the views that are made anew for it.

    `forward_views` are those of the forward step again, `views` the gradients that it reads and writes.
    `in_net` says whether the net has the gradient operator, or only the forward operator the means for one.
    """

    name: str
    operators: Tuple[caffe2_pb2.OperatorDef, ...]
    forward_views: Tuple[View, ...]
    views: Tuple[View, ...]
    executor: Executor
    in_net: bool


@dataclass(frozen=True)
class Structure:
    """One loop.

    `buffers` are blobs that the step writes to slices of an outer blob without being a state. `shared` are blobs of
    the step that lie in the workspace that all steps have in common. `outer_inputs` and `outer_outputs` are those of
    the forward operator; the last output holds the steps' workspaces. `scope` is what the loop's own outer blobs begin
    with.
    """

    name: str
    step_name: str
    operators: Tuple[caffe2_pb2.OperatorDef, ...]
    sequences: Tuple[SequenceInput, ...]
    states: Tuple[State, ...]
    buffers: Tuple[View, ...]
    references: Tuple[Reference, ...]
    outputs: Tuple[Output, ...]
    timestep: str
    shared: Tuple[str, ...]
    scope: str
    executor: Executor
    device: caffe2_pb2.DeviceOption
    outer_inputs: Tuple[str, ...]
    outer_outputs: Tuple[str, ...]
    backward: Optional[Backward]

    @property
    def views(self) -> List[View]:
        """All views of the forward step."""
        of_states = [view for state in self.states for view in (*state.before, *state.after)]
        return [sequence.view for sequence in self.sequences] + of_states + list(self.buffers)

    @property
    def computed(self) -> List[str]:
        """What the step computes, in the order in which it does."""
        return list(dict.fromkeys(blob for operator in self.operators for blob in operator.output))

    @property
    def computed_again(self) -> List[str]:
        """What the backward step computes again, in the order in which it does."""
        if self.backward is None:
            return []
        forward = set(self.computed)
        again = (blob for operator in self.backward.operators for blob in operator.output)
        return list(dict.fromkeys(blob for blob in again if blob in forward))

    @property
    def read_back(self) -> List[str]:
        """What the backward step reads of that which the forward step has computed."""
        if self.backward is None:
            return []
        needed = read_before_written(self.backward.operators)
        return [blob for blob in self.computed if blob in needed]


def read_structure(loop: Loop) -> Structure:
    backward = _backward(loop)
    views = _views(loop.forward, "link")
    sequences, states, buffers = _roles(loop, views)
    return Structure(
        name=loop.name,
        step_name=loop.net.name,
        operators=tuple(loop.operators),
        sequences=tuple(SequenceInput(view, _gradient_of_sequence(loop, view, backward)) for view in sequences),
        states=states,
        buffers=buffers,
        references=tuple(_references(loop, backward)),
        outputs=tuple(_outputs(loop)),
        timestep=loop.timestep,
        shared=tuple(loop.shared),
        scope=own_prefix(loop.forward),
        executor=_executor(loop.forward),
        device=loop.forward.device_option,
        outer_inputs=tuple(loop.inputs),
        outer_outputs=tuple(loop.outputs),
        backward=backward,
    )


def read_before_written(operators: Operators) -> List[str]:
    """The blobs that operators need from elsewhere, in the order in which they do."""
    needed: Dict[str, None] = {}
    written = set()
    for operator in operators:
        needed.update(dict.fromkeys(blob for blob in operator.input if blob not in written))
        written.update(operator.output)
    return list(needed)


def _views(operator: caffe2_pb2.OperatorDef, prefix: str) -> Tuple[View, ...]:
    links = read_links(operator, prefix)
    windows = integers(operator, prefix + "_window") or [1] * len(links)
    return tuple(View(*link, window) for link, window in zip(links, windows))


def _roles(loop: Loop, views: Iterable[View]) -> Tuple[Tuple[View, ...], Tuple[State, ...], Tuple[View, ...]]:
    """Views of sequences, states, and views that are buffers."""
    written = {blob for operator in loop.operators for blob in operator.output}
    computed = written.difference(read_before_written(loop.operators))
    gradients = _gradients_of_initial(loop)
    of_state = {
        state.outer_states: [view for view in views if view.outer == state.outer_states] for state in loop.states
    }
    states: List[State] = []
    buffers: List[View] = []
    for position, (outer, initial) in enumerate(loop.states):
        before = tuple(view for view in of_state[outer] if view.inner not in computed)
        after = tuple(view for view in of_state[outer] if view.inner in computed)
        if before:
            of_all = _gradient_name(loop, outer) if position in gradients else None
            states.append(State(outer, initial, before, after, gradients.get(position), of_all))
        else:
            buffers += after
    others = [view for view in views if view.outer not in of_state]
    buffers += [view for view in others if view.inner in computed]
    sequences = tuple(view for view in others if view.inner not in computed)
    return sequences, tuple(states), tuple(buffers)


def _gradients_of_initial(loop: Loop) -> Dict[int, str]:
    """The gradients of the initial values, by the position of the state."""
    if loop.gradient is not None:
        return dict(enumerate(loop.gradient.initial))
    if not loop.has_backward_step:
        return {}
    return {position: gradient_name(state.outer_initial) for position, state in enumerate(loop.states)}


def _backward(loop: Loop) -> Optional[Backward]:
    gradient = loop.gradient
    if gradient is not None:
        operator, net, operators = gradient.operator, gradient.net, gradient.operators
        renamed = read_renames(operator)
    elif loop.has_backward_step:
        operator, net = loop.forward, net_argument(loop.forward, "backward_step_net")
        operators, renamed = list(net.op), {}
    else:
        return None

    def current(view: View) -> View:
        return view._replace(inner=renamed.get(view.inner, view.inner), outer=renamed.get(view.outer, view.outer))

    return Backward(
        name=net.name,
        operators=tuple(operators),
        forward_views=tuple(map(current, _views(operator, "link"))),
        views=tuple(map(current, _views(operator, "backward_link"))),
        executor=_executor(operator),
        in_net=operator.type == GRADIENT_OPERATOR,
    )


def _gradient_of_sequence(loop: Loop, sequence: View, backward: Optional[Backward]) -> Optional[str]:
    if backward is None:
        return None
    outer = _gradient_name(loop, sequence.outer)
    inner = [view.inner for view in backward.views if view.outer == outer]
    writing = [operator.type for operator in backward.operators if not set(inner).isdisjoint(operator.output)]
    # A sequence without a gradient gets one of zeros, since the engine wants one.
    return None if not inner or writing[-1:] == ["ConstantFill"] else outer


def _gradient_name(loop: Loop, outer: str) -> str:
    """The blob in which the engine looks for the gradient of an outer blob."""
    name = gradient_name(outer)
    return name if loop.gradient is None else string(loop.gradient.operator, name + ".rename", name)


def _references(loop: Loop, backward: Optional[Backward]) -> Iterable[Reference]:
    step = list(loop.operators)
    linked = {view.inner for view in _views(loop.forward, "link")}
    if backward is not None:
        step += backward.operators
        linked.update(view.inner for view in backward.views)
    written = {blob for operator in step for blob in operator.output}
    read = dict.fromkeys(blob for operator in step for blob in operator.input)
    own = written | linked | {loop.timestep}
    # As the operator lists them, then what it fails to list.
    references = [blob for blob in dict.fromkeys([*loop.inputs, *read]) if blob in read and blob not in own]
    gradients = {parameter.outer: parameter for parameter in _parameters(loop, backward)}
    for blob in references:
        yield gradients.get(blob, Reference(blob, None, None))


def _parameters(loop: Loop, backward: Optional[Backward]) -> List[Reference]:
    if loop.gradient is not None:
        return [
            Reference(parameter.outer, parameter.inner_gradient, parameter.outer_gradient)
            for parameter in loop.gradient.parameters
        ]
    if backward is None:
        return []
    blobs = [loop.inputs[position] for position in integers(loop.forward, "param")]
    return [
        Reference(blob, inner, gradient_name(blob)) for blob, inner in zip(blobs, strings(loop.forward, "param_grads"))
    ]


def _outputs(loop: Loop) -> Iterable[Output]:
    gradients: Dict[int, str] = {}
    receiving: Optional[List[int]] = []
    if loop.gradient is not None:
        receiving = integers(loop.gradient.operator, POSITIONS)
        gradients = dict(zip(receiving, loop.gradient.incoming))
    elif loop.has_backward_step:
        receiving = _wanted(loop.forward)
    aliases: Dict[str, Alias] = {alias.outer_output: alias for alias in loop.aliases}
    for position, outer in enumerate(loop.outputs):
        if outer in aliases:
            receives = None if receiving is None else position in receiving
            yield Output(outer, aliases[outer].outer_states, aliases[outer].offset, receives, gradients.get(position))


def _wanted(forward: caffe2_pb2.OperatorDef) -> Optional[List[int]]:
    """The positions of outputs that will receive a gradient; None for 'auto'."""
    if string(forward, PYTHON_POSITIONS, ""):
        return None
    return integers(forward, PYTHON_POSITIONS) or integers(forward, POSITIONS)


def _executor(operator: caffe2_pb2.OperatorDef) -> Executor:
    return Executor(
        enabled=bool(integer(operator, ENABLE, 0)),
        # The engine takes 0 for no setting.
        threads=integer(operator, "rnn_executor.num_threads", 0) or None,
        streams=integer(operator, "rnn_executor.max_cuda_streams", 0) or None,
    )
