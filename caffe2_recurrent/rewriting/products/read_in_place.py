"""Products over all steps by oneDNN that read dY where it lies, in place of a copy that the first of them makes.

    If: dY as rows;  their copy;  products of the copy;  Free(the copy and others)
    If: products of the copy

    =>  the same of oneDNN's own dY, which stays

`onednn_over_steps.copy_gradient_there` has made what copies.
"""

from typing import Container, Iterable, List, NamedTuple, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import integers, net, net_to_read, set_arguments
from caffe2_recurrent.operators import copied, is_on_onednn, renamed
from caffe2_recurrent.rewriting.products import onednn
from caffe2_recurrent.rewriting.products.net_products import GRADIENT

BRANCH, OTHERWISE = "then_net", "else_net"

Operators = List[caffe2_pb2.OperatorDef]


class Copy(NamedTuple):
    """oneDNN's `blob` with a copy of dY `[.., width]`."""

    blob: str
    width: int


def gradients_read(operators: Iterable[caffe2_pb2.OperatorDef]) -> Set[str]:
    """What these call dY, of all products among operators of the outer net."""
    instead = [other for operator in operators for other in net_to_read(operator, OTHERWISE).op]
    return {other.input[2] for other in instead if other.type == GRADIENT}


def copies(operators: Iterable[caffe2_pb2.OperatorDef], names: Container[str]) -> List[Copy]:
    """The copies of dY, as it is, that operators of the outer net make, by whichever of its names."""
    found = []
    for operator in operators:
        inside = list(net_to_read(operator, BRANCH).op)
        for copying in filter(_copies, inside):
            as_rows = _making(inside, copying)
            if [made.type for made in as_rows] == ["Alias", "Reshape"] and as_rows[0].input[0] in names:
                found.append(Copy(copying.output[0], integers(as_rows[1], "shape")[-1]))
    return found


def read(operators: Operators, names: Container[str], shared: Set[str], there: str) -> None:
    """Have operators of the outer net read `there` where they copy dY, or read a copy among `shared`."""
    for position, operator in enumerate(operators):
        own = {copy.blob for copy in copies([operator], names)}
        read_only = shared.intersection(operator.input)
        if own or read_only:
            operators[position] = _reading(operator, own | read_only, there)


def _reading(operator: caffe2_pb2.OperatorDef, copy_blobs: Set[str], there: str) -> caffe2_pb2.OperatorDef:
    made = renamed(operator, dict.fromkeys(copy_blobs, there))
    branch = net(made, BRANCH)
    inside = [copied(other) for other in branch.op]
    not_freed = {there}
    for copying in [other for other in inside if _copies(other) and other.output[0] == there]:
        alias, as_rows = _making(inside, copying)
        not_freed.update(alias.output)
        inside = [other for other in inside if other is not alias and other is not copying]
        # The last product may have left it in another shape.
        onednn.on_onednn(as_rows)
        as_rows.input[0] = as_rows.output[0] = there
    for freeing in [other for other in inside if other.type == onednn.FREE]:
        for blobs in (freeing.input, freeing.output):
            blobs[:] = [blob for blob in blobs if blob not in not_freed]
    inside = [other for other in inside if other.type != onednn.FREE or other.input]
    del branch.op[:]
    branch.op.extend(inside)
    for blobs in (made.input, made.output, branch.external_input, branch.external_output):
        # It is changed in shape: no two may do that at once.
        blobs[:] = [*(blob for blob in dict.fromkeys(blobs) if blob != there), there]
    set_arguments(made, {BRANCH: branch})
    return made


def _copies(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == onednn.TO and is_on_onednn(operator)


def _making(operators: Sequence[caffe2_pb2.OperatorDef], copying: caffe2_pb2.OperatorDef) -> Operators:
    """What makes that which `copying` reads."""
    return [other for other in operators if copying.input[0] in other.output and other.type != onednn.FREE]
