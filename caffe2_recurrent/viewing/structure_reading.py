"""The structure of a loop, read from its operators."""

from typing import Dict, Iterable, List, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.backward.gradient_maker import POSITIONS, PYTHON_POSITIONS
from caffe2_recurrent.executor import ENABLE, STREAMS, THREADS
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.reading import read_links, read_renames
from caffe2_recurrent.operator_arguments import (
    BACKWARD_STEP_NET,
    PARAMETER_GRADIENTS,
    PARAMETERS,
    RENAMED,
    integer,
    integers,
    string,
    strings,
)
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import BACKWARD_PASS_OF, GRADIENT_OPERATOR, LINK, gradient_name, read_before_written
from caffe2_recurrent.step_workspaces import workspaces_in_turn
from caffe2_recurrent.viewing.structure import (
    Backward,
    Executor,
    Output,
    Reference,
    SequenceInput,
    State,
    Structure,
    View,
)
from caffe2_recurrent.wiring import Alias, Link, prefix_of


def read_structure(loop: Loop) -> Structure:
    backward = _backward(loop)
    views = _views(loop)
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
        scope=_scope(loop),
        executor=_executor(loop.forward),
        workspaces_in_turn=workspaces_in_turn(loop.forward),
        device=loop.forward.device_option,
        outer_inputs=tuple(loop.inputs),
        outer_outputs=tuple(loop.outputs),
        backward=backward,
        shown=tuple(_shown(loop)),
        backward_pass_of=string(loop.forward, BACKWARD_PASS_OF, "") or None,
        chained=bool(loop.chained),
    )


def _scope(loop: Loop) -> str:
    """A backward pass has that of the loop which it belongs to."""
    return prefix_of(string(loop.forward, BACKWARD_PASS_OF, loop.workspaces))


def _shown(loop: Loop) -> Iterable[View]:
    for operator in loop.operators:
        if operator.type == LINK:
            number = "t" if operator.input[0] == loop.timestep else operator.input[0].split("/")[-1]
            offset, window = integer(operator, "offset", 0), integer(operator, "window", 1)
            yield View(operator.output[0], operator.input[1], offset, window, number)


def _views(loop: Loop) -> Tuple[View, ...]:
    """Of the forward step."""
    return _with_windows(loop.links, loop.forward, "link")


def _views_of(operator: caffe2_pb2.OperatorDef, prefix: str) -> Tuple[View, ...]:
    return _with_windows(read_links(operator, prefix), operator, prefix)


def _with_windows(links: List[Link], operator: caffe2_pb2.OperatorDef, prefix: str) -> Tuple[View, ...]:
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
        operator, net = loop.forward, net_argument(loop.forward, BACKWARD_STEP_NET)
        operators, renamed = list(net.op), {}
    else:
        return None

    def current(view: View) -> View:
        return view._replace(inner=renamed.get(view.inner, view.inner), outer=renamed.get(view.outer, view.outer))

    return Backward(
        name=net.name,
        operators=tuple(operators),
        forward_views=tuple(map(current, _views_of(operator, "link"))),
        views=tuple(map(current, _views_of(operator, "backward_link"))),
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
    return name if loop.gradient is None else string(loop.gradient.operator, name + RENAMED, name)


def _references(loop: Loop, backward: Optional[Backward]) -> Iterable[Reference]:
    step = list(loop.operators)
    linked = {view.inner for view in _views(loop)}
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
    blobs = [loop.inputs[position] for position in integers(loop.forward, PARAMETERS)]
    gradients = strings(loop.forward, PARAMETER_GRADIENTS)
    return [Reference(blob, inner, gradient_name(blob)) for blob, inner in zip(blobs, gradients)]


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
        threads=integer(operator, THREADS, 0) or None,
        streams=integer(operator, STREAMS, 0) or None,
    )
