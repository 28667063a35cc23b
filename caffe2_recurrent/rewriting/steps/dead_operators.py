"""Operators of a step whose results are overwritten before anything reads them: there is no need to run them.

Rules make some, by taking away who has read. The RNN executor keeps who writes in order with who reads, but not with
who writes next, which might then be first. What was so before is left as it is.
"""

from typing import FrozenSet, List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import string
from caffe2_recurrent.operators import as_bytes, is_written_next
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.rewriting.steps.repeatable import REPEATABLE
from caffe2_recurrent.step_net import REPLACING

# ATen's that rules put in the place of Caffe2's, before anything is known to be overwritten.
REPEATABLE_OF_ATEN = frozenset(["add", "mul", "sigmoid", "tanh"])


def found(loop: Loop) -> FrozenSet[bytes]:
    """Those that a loop has."""
    return frozenset(_as_it_is(operators[position]) for operators in loop.steps for position in _positions(operators))


def remove(loop: Loop, but: FrozenSet[bytes]) -> bool:
    """Whether there were any, other than those that are to stay."""
    is_changed = False
    for operators in loop.steps:
        # What one of them alone has read is read by nobody once it is gone.
        for position in _positions(operators):
            if _as_it_is(operators[position]) not in but:
                del operators[position]
                is_changed = True
    return is_changed


def _positions(operators: List[caffe2_pb2.OperatorDef]) -> List[int]:
    """From the last one to the first."""
    # Their memory may be read by another name.
    shown = {blob for operator in operators if operator.type in REPLACING for blob in operator.input}
    return [
        position
        for position in reversed(range(len(operators)))
        if _is_repeatable(operators[position])
        and operators[position].output
        and shown.isdisjoint(operators[position].output)
        and all(is_written_next(operators[position + 1 :], blob) for blob in operators[position].output)
    ]


def _is_repeatable(operator: caffe2_pb2.OperatorDef) -> bool:
    if operator.type == ATEN:
        return string(operator, "operator", "") in REPEATABLE_OF_ATEN
    return operator.type in REPEATABLE


def _as_it_is(operator: caffe2_pb2.OperatorDef) -> bytes:
    return as_bytes(operator, operator.input, operator.output)
