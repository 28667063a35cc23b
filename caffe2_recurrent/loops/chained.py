"""Steps whose operators are in nets that operators of the step run, see `rewriting/chains.py`: what these are.

If(always): a net of A, If(always): a net of B, C    =>    A, B, C
"""

import dataclasses
from typing import Iterable, List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import net
from caffe2_recurrent.operators import copied

# How such a net is called.
CHAINED = "chained_operators"


def is_chain(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "If" and net(operator, "then_net").name == CHAINED


def unchained(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[caffe2_pb2.OperatorDef]:
    """The operators of a step in the order in which they run."""
    found = []
    for operator in operators:
        if is_chain(operator):
            for inside in unchained(net(operator, "then_net").op):
                inside = copied(inside)
                # It waited for the one before it.
                del inside.control_input[:]
                found.append(inside)
        else:
            found.append(operator)
    return found


def unchained_loop(loop: Loop) -> Loop:
    """The loop with the operators of its steps, to be looked at."""
    gradient = loop.gradient
    if gradient is not None:
        gradient = dataclasses.replace(gradient, operators=unchained(gradient.operators))
    return dataclasses.replace(loop, operators=unchained(loop.operators), gradient=gradient)
