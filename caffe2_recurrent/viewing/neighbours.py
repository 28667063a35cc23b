"""The operators of the outer net next to a loop: those before its sequences and behind its outputs.

Their gradient operators likewise. What computes references is left out, and so is what trains them.
"""

from typing import Collection, List, NamedTuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operators import LOOPS, is_gradient_name
from caffe2_recurrent.viewing.graph import Kind, Role
from caffe2_recurrent.viewing.graph_parts import OUTER, Parts, outer_key


class _Neighbour(NamedTuple):
    """An operator, with those of its inputs that belong to its pass."""

    key: str
    operator: caffe2_pb2.OperatorDef
    inputs: List[str]
    kind: Kind


def add_neighbours(parts: Parts, net: caffe2_pb2.NetDef) -> None:
    roles = parts.outer_roles()
    forward = {blob for blob, role in roles.items() if role in (Role.SEQUENCE, Role.STATE)}
    gradients = {blob for blob, role in roles.items() if role is Role.GRADIENT}
    of_forward_pass = set()
    added: List[_Neighbour] = []
    differentiated = False
    for position, operator in enumerate(net.op):
        key = "{} operator {}".format(OUTER, position)
        differentiated = differentiated or _is_gradient(operator)
        if not differentiated:
            of_forward_pass.update([*operator.input, *operator.output])
        if operator.type in LOOPS:
            continue
        if _is_gradient(operator):
            inputs = [blob for blob in operator.input if blob not in of_forward_pass]
            neighbour = _Neighbour(key, operator, inputs, Kind.BACK)
            if _add(parts, neighbour, gradients, Role.GRADIENT):
                added.append(neighbour)
        elif not differentiated:
            neighbour = _Neighbour(key, operator, list(operator.input), Kind.FLOW)
            if _add(parts, neighbour, forward, Role.VALUE):
                added.append(neighbour)
    # Drawn when all are there: one may read what another one has brought in.
    drawn = parts.outer_roles()
    for neighbour in added:
        for blob in filter(drawn.__contains__, neighbour.inputs):
            parts.edge(outer_key(blob), neighbour.key, neighbour.kind)
        for blob in filter(drawn.__contains__, neighbour.operator.output):
            parts.edge(neighbour.key, outer_key(blob), neighbour.kind)


def _is_gradient(operator: caffe2_pb2.OperatorDef) -> bool:
    """Caffe2 does not mark what fills, adds up and renames gradients, but it does call them so."""
    return operator.is_gradient_op or (bool(operator.output) and all(map(is_gradient_name, operator.output)))


def _add(parts: Parts, neighbour: _Neighbour, drawn: Collection[str], role: Role) -> bool:
    """The operator, if it reads or writes something drawn, and all that it writes or, if it comes before, reads."""
    is_before, is_behind = (
        any(map(drawn.__contains__, blobs)) for blobs in (neighbour.operator.output, neighbour.inputs)
    )
    if not is_before and not is_behind:
        return False
    parts.operator(neighbour.key, OUTER, neighbour.operator)
    for blob in [*(neighbour.inputs if is_before else []), *(neighbour.operator.output if is_behind else [])]:
        parts.outer(blob, role)
    return True
