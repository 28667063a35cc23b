"""The loops of a net, however they were built: operators -> Loop."""

import itertools
from typing import Dict, List, Optional, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import DEFAULT_TIMESTEP
from caffe2_recurrent.backward.gradient_maker import POSITIONS
from caffe2_recurrent.blob_names import Names, names_of
from caffe2_recurrent.loops.chained import read_chained, unchained
from caffe2_recurrent.loops.loop import Gradient, Loop
from caffe2_recurrent.loops.parts import Original, Parameter, State
from caffe2_recurrent.loops.surroundings import add_surroundings
from caffe2_recurrent.operator_arguments import (
    BACKWARD_STEP_NET,
    INITIAL,
    PARAMETER_GRADIENTS,
    PARAMETERS,
    RECOMPUTED,
    RENAMED,
    STATES,
    STEP_NET,
    TIMESTEP,
    integers,
    string,
    strings,
)
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR, copied, gradient_name
from caffe2_recurrent.wiring import Alias, Link


def read_loops(net: caffe2_pb2.NetDef) -> Dict[int, Loop]:
    """The loops of a net by the position of their forward operator."""
    mentioned = [frozenset(names_of(operator)) for operator in net.op]
    names = Names(itertools.chain(net.external_input, net.external_output, *mentioned))
    gradients = {workspaces_of(operator): operator for operator in net.op if operator.type == GRADIENT_OPERATOR}
    loops = {
        position: _read(operator, gradients.get(workspaces_of(operator)), names)
        for position, operator in enumerate(net.op)
        if operator.type == OPERATOR
    }
    add_surroundings(net, loops, mentioned)
    return loops


def _read(operator: caffe2_pb2.OperatorDef, gradient_operator: Optional[caffe2_pb2.OperatorDef], names: Names) -> Loop:
    forward = copied(operator)
    net = net_argument(forward, STEP_NET)
    states = [
        State(outer, operator.input[position])
        for outer, position in zip(strings(forward, STATES), integers(forward, INITIAL))
    ]
    outputs = list(operator.output)
    aliases = [
        Alias(*parts)
        for parts in zip(
            strings(forward, "alias_src"),
            strings(forward, "alias_dst"),
            integers(forward, "alias_offset"),
        )
    ]
    timestep = string(forward, TIMESTEP, DEFAULT_TIMESTEP)
    links, operators = unchained(net.op, timestep)
    loop = Loop(
        name=outputs[0],
        forward=forward,
        net=net,
        operators=operators,
        inputs=list(operator.input),
        outputs=outputs,
        states=states,
        links=read_links(forward, "link") + links,
        aliases=aliases,
        timestep=timestep,
        shared=strings(forward, RECOMPUTED),
        gradient=None if gradient_operator is None else _read_gradient(operator, gradient_operator),
        names=names,
        chained=read_chained(net),
    )
    loop.original = Original(tuple(loop.shared), frozenset(link.inner for link in loop.all_links))
    return loop


def _read_gradient(forward: caffe2_pb2.OperatorDef, original: caffe2_pb2.OperatorDef) -> Gradient:
    operator = copied(original)
    renamed = read_renames(operator)

    def current(link: Link) -> Link:
        return Link(renamed.get(link.inner, link.inner), renamed.get(link.outer, link.outer), link.offset)

    net = net_argument(operator, BACKWARD_STEP_NET)
    positions = integers(operator, PARAMETERS)
    # The engine counts the outputs: one sequence, the parameters, the states.
    outputs = list(operator.output)
    states = len(integers(operator, INITIAL))
    of_parameters = outputs[1 : 1 + len(positions)]
    # Without the argument the step calls a gradient as the outer net does.
    inner = strings(operator, PARAMETER_GRADIENTS) or of_parameters
    parameters = [
        Parameter(forward.input[position], renamed.get(inner_gradient, inner_gradient), outer_gradient)
        for position, inner_gradient, outer_gradient in zip(positions, inner, of_parameters)
    ]
    return Gradient(
        operator=operator,
        net=net,
        operators=[copied(step_operator) for step_operator in net.op],
        incoming=list(operator.input[: len(integers(operator, POSITIONS))]),
        like=operator.input[len(integers(operator, POSITIONS))],
        sequence=outputs[0],
        parameters=parameters,
        initial=outputs[1 + len(positions) : 1 + len(positions) + states],
        others=outputs[1 + len(positions) + states :],
        links=[current(link) for link in read_links(operator, "link")],
        backward_links=[current(link) for link in read_links(operator, "backward_link")],
    )


def read_renames(operator: caffe2_pb2.OperatorDef) -> Dict[str, str]:
    """The blobs that a gradient operator calls by other names than the forward operator says."""
    return {given.name[: -len(RENAMED)]: given.s.decode() for given in operator.arg if given.name.endswith(RENAMED)}


def read_links(operator: caffe2_pb2.OperatorDef, prefix: str) -> List[Link]:
    """The links in the arguments `<prefix>_internal`, `_external` and `_offset`."""
    parts = (strings(operator, prefix + ending) for ending in ("_internal", "_external"))
    return [Link(*values) for values in zip(*parts, integers(operator, prefix + "_offset"))]


def workspaces_of(operator: caffe2_pb2.OperatorDef) -> str:
    """The blob that holds the step workspaces of a loop or gradient operator."""
    return str(operator.output[-1] if operator.type == OPERATOR else operator.input[-1])


def outer_blobs(operator: caffe2_pb2.OperatorDef) -> Set[str]:
    """All blobs of the outer net that a loop or gradient operator itself reads, writes, makes or has its steps see by
    other names. What steps know by the same name need not be among them.
    """
    links = [*read_links(operator, "link"), *read_links(operator, "backward_link")]
    renamed = read_renames(operator)
    named = [*(link.outer for link in links), *strings(operator, "alias_src"), *strings(operator, "alias_dst")]
    found = {*operator.input, *operator.output, *strings(operator, STATES), *made_in_a_run(operator)}
    return found.union(renamed.get(blob, blob) for blob in named) - {""}


def made_in_a_run(operator: caffe2_pb2.OperatorDef) -> List[str]:
    """The blobs that a gradient operator makes in the workspace of the net as it first runs: gradients of states. Other
    operators do not.
    """
    if operator.type != GRADIENT_OPERATOR:
        return []
    renamed = read_renames(operator)
    return [renamed.get(blob, blob) for blob in map(gradient_name, strings(operator, STATES))]
