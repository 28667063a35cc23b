"""Steps whose operators are in nets that operators of the step run, see `rewriting/chains.py`: what these are.

    If(always): a net of A, If(always): a net of B, C    =>    A, B, C

A `Loop` has the operators themselves, and `chained` says that there are such nets.
"""

from typing import Dict, Iterable, List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import STEP_NET, net
from caffe2_recurrent.operators import copied

# How such a net is called.
CHAINED = "chained_operators"


def read_chained(step_net: caffe2_pb2.NetDef) -> Dict[str, str]:
    """The blob that is true, by the argument with the net of the step; nothing if it is no chain."""
    true = [operator.input[0] for operator in step_net.op if _is_chain(operator)]
    return {STEP_NET: true[0]} if true else {}


def unchained(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[caffe2_pb2.OperatorDef]:
    """Copies of the operators of a step, in the order in which they run."""
    found = []
    for operator in operators:
        if _is_chain(operator):
            inside = unchained(net(operator, "then_net").op)
            for waiting in inside:
                # For the one before it.
                del waiting.control_input[:]
            found += inside
        else:
            found.append(copied(operator))
    return found


def _is_chain(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "If" and net(operator, "then_net").name == CHAINED
