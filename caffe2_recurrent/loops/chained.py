"""Steps whose operators are in nets that operators of the step run, see `rewriting/chains.py`: what these are.

    If(always): a net of what makes links, A, If(always): a net of B, C    =>    links;  A, B, C

A `Loop` has the operators themselves, and `chained` says that there are such nets. A backward pass that is a loop of
its own goes by another number than that of its step, and so what makes its links stays among the operators.
"""

from typing import Dict, Iterable, List, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import STEP_NET, integer, net, net_to_read
from caffe2_recurrent.operators import LINK, copied
from caffe2_recurrent.wiring import Link

# How such a net is called.
CHAINED = "chained_operators"


def read_chained(step_net: caffe2_pb2.NetDef) -> Dict[str, str]:
    """The blob that is true, by the argument with the net of the step; nothing if it is no chain."""
    true = [operator.input[0] for operator in step_net.op if _is_chain(operator)]
    return {STEP_NET: true[0]} if true else {}


def unchained(
    operators: Iterable[caffe2_pb2.OperatorDef], timestep: str
) -> Tuple[List[Link], List[caffe2_pb2.OperatorDef]]:
    """The links that operators of a step make, and copies of the others, in the order in which they run."""
    links, others = [], []
    for operator in _opened(operators):
        if operator.type == LINK and operator.input[0] == timestep:
            links.append(Link(operator.output[0], operator.input[1], integer(operator, "offset", 0)))
        else:
            others.append(operator)
    return links, others


def _opened(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[caffe2_pb2.OperatorDef]:
    found = []
    for operator in operators:
        if _is_chain(operator):
            inside = _opened(net(operator, "then_net").op)
            for waiting in inside:
                # For the one before it.
                del waiting.control_input[:]
            found += inside
        else:
            found.append(copied(operator))
    return found


def _is_chain(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "If" and net_to_read(operator, "then_net").name == CHAINED
