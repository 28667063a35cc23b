"""The backward pass as a loop of its own, which goes through the steps from the last one to the first.

    RecurrentNetworkGradient    =>    RecurrentNetwork with, in each step
                                      back = T - 1 - t;  links of what belongs to step `back`;  the gradients from
                                      outside added to those of the states;  the operators of the backward step

The gradient of a state is a state of this loop: at first that of the last value, then what the step before has made of
it. Where it is carried it is an outer blob that steps change. All else lies in outer blobs in the order of the forward
pass.

Source: RecurrentNetworkGradientOp in caffe2/operators/rnn/recurrent_network_op.h.
"""

from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.backward.gradient_maker import POSITIONS
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Carried, State, StateGradient
from caffe2_recurrent.operator_arguments import (
    BACKWARD_STEP_NET,
    STATES,
    TIMESTEP,
    WORKSPACES,
    argument,
    integers,
    strings,
)
from caffe2_recurrent.operators import BACKWARD_PASS_OF, OPERATOR, copied, gradient_name, new_operator, outputs_of
from caffe2_recurrent.rewriting import chains
from caffe2_recurrent.rewriting.emit import ATEN, aten_is_missing
from caffe2_recurrent.rewriting.engine_blobs import is_of_engine
from caffe2_recurrent.rewriting.products import kept_filters
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.wiring import STEP_WORKSPACES, Alias, Link


def state_gradients(loop: Loop) -> Dict[str, StateGradient]:
    """By the state; without those that the backward step does not both read and write, each by one name."""
    gradient = loop.gradient
    assert gradient is not None
    from_outside = dict(zip(integers(gradient.operator, POSITIONS), gradient.incoming))
    of_initial = dict(zip(strings(gradient.operator, STATES), gradient.initial))
    found = {}
    for state in loop.states:
        outer = gradient_name(state.outer_states)
        links = [link for link in gradient.backward_links if link.outer == outer]
        inner = {link.offset: link.inner for link in links}
        if state.outer_states in of_initial and len(links) == len(inner) == 2:
            of = {
                alias.offset: from_outside[position]
                for position, alias in enumerate(loop.aliases)
                if alias.outer_states == state.outer_states and position in from_outside
            }
            found[state.outer_states] = StateGradient(
                outer, of_initial[state.outer_states], inner[1], inner[0], of.get(1), of.get(-1)
            )
    return found


def links(loop: Loop) -> List[Link]:
    """What a backward step has to see of the step that it belongs to, but for the gradients of states."""
    gradient = loop.gradient
    assert gradient is not None
    of_states = {state.outer for state in state_gradients(loop).values()}
    own = [link for link in [*gradient.links, *gradient.backward_links] if link.outer not in of_states]
    known = {link.inner for link in [*gradient.links, *gradient.backward_links]}
    read = {blob for operator in gradient.operators for blob in operator.input}
    return own + [link for link in loop.links if link.inner in read and link.inner not in known]


def operators(loop: Loop) -> List[caffe2_pb2.OperatorDef]:
    """What takes the place of the gradient operator of a loop whose gradient is `turned`."""
    assert loop.gradient is not None and loop.gradient.turned is not None
    carried = loop.gradient.turned.carried
    of_states = {**state_gradients(loop), **{outer: found.of for outer, found in carried.items()}}
    seen = {outer: loop.new_blob(of.outer + "_seen") for outer, of in of_states.items() if of.of_all}
    made = [_like_states(loop, of_states[outer].of_all, outer, target) for outer, target in seen.items()]
    shown, added = _shown(loop, of_states, seen)
    step = _step(loop, shown, added)
    # By the state, the blob that has its gradient before the first step in the end.
    last = {}
    for outer, of in of_states.items():
        if outer in carried:
            last[outer] = kept_filters.result_itself(step, of.incoming) or of.incoming
            made += _start(loop, carried[outer], last[outer])
        else:
            last[outer] = loop.new_blob(of.outer + "_last")
    if loop.gradient.turned.shown is not None:
        made.append(new_operator("Alias", [loop.gradient.turned.shown], [loop.gradient.sequence], loop.forward))
    backward = _backward(loop, of_states, last, shown, step)
    made += backward.around_forward()
    initial = {state.outer_states: state.outer_initial for state in loop.states}
    for outer, of in of_states.items():
        ending = of_initial_value(loop, of, last[outer], initial[outer])
        if outer in carried:
            # The loop does not say that it writes to the blob.
            ending[0].control_input.append(backward.outputs[0])
        made += ending
    return made + loop.after_gradient


def _start(loop: Loop, carried: Carried, blob: str) -> List[caffe2_pb2.OperatorDef]:
    """What is in `blob` before the last step: zeros, or the gradient of the last value."""
    made = [new_operator("ConstantFill", [carried.shape], [blob], loop.forward, input_as_shape=1, value=0.0)]
    if carried.of.of_last is not None:
        made.append(new_operator("Add", [blob, carried.of.of_last], [blob], loop.forward, broadcast=1))
    return made


def of_initial_value(loop: Loop, of: StateGradient, of_first: str, initial: str) -> List[caffe2_pb2.OperatorDef]:
    """The gradient of the outer blob `initial`, if `of_first` is that of the state `[1, N, D]` before the first step.

    That of one value for all sequences is the sum over these. Where the engine's gradient operator has run in this
    workspace before, the blob shows memory of its own, which may have been freed since. So nothing is written to it:
    another tensor takes its place.
    """
    own = loop.new_blob(of.of_initial + "_own")
    made = [
        new_operator("SumReduceLike", [of_first, initial], [own], loop.forward),
        new_operator("Alias", [own], [of.of_initial], loop.forward),
    ]
    for operator in made:
        # What they read may be a blob of which the loop does not say that it writes it.
        operator.is_gradient_op = True
    return made


def _like_states(loop: Loop, of_all: Optional[str], outer: str, target: str) -> caffe2_pb2.OperatorDef:
    """A gradient from outside as `[T, N, D]`: to the engine's operator only its number of elements matters."""
    assert of_all is not None
    shown = next(alias for alias in loop.aliases if alias.outer_states == outer and alias.offset == 1)
    inputs = [of_all, shown.outer_output]
    if aten_is_missing():
        return new_operator("ResizeLike", inputs, [target], loop.forward)
    return new_operator(ATEN, inputs, [target], loop.forward, operator="view_as")


def _shown(loop: Loop, of_states: Dict[str, StateGradient], seen: Dict[str, str]) -> Tuple[List[Link], Dict[str, Link]]:
    """The links that are operators of a step, and those of them to gradients from outside, `seen` by the state, by what
    they are added to.
    """
    added = {of_states[outer].incoming: Link(loop.new_blob(blob + "_t"), blob, 0) for outer, blob in seen.items()}
    return links(loop) + list(added.values()), added


def _backward(
    loop: Loop,
    of_states: Dict[str, StateGradient],
    last: Dict[str, str],
    shown: List[Link],
    step: List[caffe2_pb2.OperatorDef],
) -> Loop:
    """The loop over `step`; `last` are what its last step passes on, by the state."""
    gradient = loop.gradient
    assert gradient is not None and gradient.turned is not None
    turned = gradient.turned
    linked = {outer: of for outer, of in of_states.items() if outer not in turned.carried}
    states = [State(of.outer, of.of_last or turned.zeros[outer]) for outer, of in linked.items()]
    aliases = [Alias(of.outer, last[outer], -1) for outer, of in linked.items()]
    if turned.memory is not None:
        states.append(turned.memory)
        aliases.append(Alias(turned.memory.outer_states, gradient.sequence, 1))
    state_links = [
        link for of in linked.values() for link in (Link(of.incoming, of.outer, 0), Link(of.outgoing, of.outer, 1))
    ]
    operators = kept_filters.in_place(loop, step, {link.inner for link in [*shown, *state_links]})
    made = Loop(
        name=gradient.sequence,
        forward=_operator(loop),
        net=_step_net(gradient.net, shown),
        operators=chains.chained(loop, BACKWARD_STEP_NET, operators),
        inputs=[loop.inputs[0]],
        outputs=list(dict.fromkeys([gradient.sequence, *(alias.outer_output for alias in aliases), *gradient.others])),
        states=states,
        links=state_links,
        aliases=aliases,
        timestep=loop.timestep,
        shared=_shared(loop),
        gradient=None,
        names=loop.names,
    )
    read = _read_from_outside(loop, of_states, made, {link.outer for link in shown}, outputs_of(operators))
    for blob in [*read, *(last[outer] for outer in turned.carried)]:
        made.add_reference(blob)
    if BACKWARD_STEP_NET in loop.chained:
        made.add_reference(loop.chained[BACKWARD_STEP_NET])
    made.outputs.append(kept_filters.backward_workspaces(loop) or loop.new_blob("gradient_" + STEP_WORKSPACES))
    return made


def _operator(loop: Loop) -> caffe2_pb2.OperatorDef:
    # Without `enable_rnn_executor`: who turns it on for all loops that have it leaves this one alone, of whose links it
    # does not know.
    arguments: Dict[str, Any] = {TIMESTEP: loop.timestep, BACKWARD_PASS_OF: loop.workspaces}
    workspaces = argument(loop.forward, WORKSPACES)
    if workspaces is not None:
        arguments[WORKSPACES] = workspaces.i
    made = new_operator(OPERATOR, [], [], loop.forward, **arguments)
    made.is_gradient_op = True
    return made


def _step_net(backward: caffe2_pb2.NetDef, shown: List[Link]) -> caffe2_pb2.NetDef:
    net = caffe2_pb2.NetDef()
    net.CopyFrom(backward)
    net.external_input.extend(sorted({link.outer for link in shown} - set(net.external_input)))
    return net


def _read_from_outside(
    loop: Loop, of_states: Dict[str, StateGradient], made: Loop, shown: Set[str], written: List[str]
) -> Iterator[str]:
    """What the loop that is `made` has among its inputs, for those who go by these. Its steps link to what is `shown`;
    what they have `written` is by its operators."""
    yield from (state.outer_initial for state in made.states)
    own = {state.outer_states for state in made.states}
    # The engine takes no operator that reads a blob and writes it too; what is written has been made before.
    yield from sorted((shown - own | made.references) - set(made.outputs))
    # It has been made before: a net that frees what nothing reads any more has to know.
    yield from (blob for blob in loop.inputs if blob in written)
    # It is read as a view; who writes to its memory by its own name has to wait.
    yield from (of.of_all for of in of_states.values() if of.of_all is not None)


def _shared(loop: Loop) -> List[str]:
    """What backward steps share, as they do in a RecurrentNetworkGradient: all that they write, unless it is linked."""
    assert loop.gradient is not None and loop.gradient.turned is not None
    turned = loop.gradient.turned
    written = dict.fromkeys(blob for operator in loop.gradient.operators for blob in operator.output)
    linked = {link.inner for link in loop.all_links}
    carried = {found.of.incoming for found in turned.carried.values()}
    own = [blob for blob in written if blob not in linked | carried and blob not in loop.inputs]
    return own + list(filter(is_of_engine, loop.shared))


def _step(loop: Loop, shown: List[Link], added: Dict[str, Link]) -> List[caffe2_pb2.OperatorDef]:
    """The operators of a step; slices in `added` are added to the gradients of states by whose name they are there."""
    gradient = loop.gradient
    assert gradient is not None and gradient.turned is not None
    back = loop.new_blob("step_of_forward")
    made = [new_operator("Sub", [gradient.turned.last_step, loop.timestep], [back], loop.forward)]
    made += chains.linking(shown, back, loop)
    for incoming, link in added.items():
        made.append(new_operator("Sum", [incoming, link.inner], [incoming], loop.forward))
    for operator in map(copied, gradient.operators):
        dataflow.rename(operator, loop.timestep, back)
        made.append(operator)
    return made
