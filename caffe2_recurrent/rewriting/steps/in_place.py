"""Operators that may write to what they read, to which the engine agrees."""

from typing import Dict, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

# The positions of the inputs in whose place the first output may be, of operators that take each element from those in
# its place. Source: AllowInplace in caffe2/operators/elementwise_ops_schema.cc and utility_ops.cc.
POSITIONS: Dict[str, Tuple[int, ...]] = {"Add": (0, 1), "Mul": (0, 1), "Sub": (0, 1), "Sum": (0,)}


def may_be(operator: caffe2_pb2.OperatorDef, read: str, written: str) -> bool:
    """Whether `operator` may have one blob for `read` and `written`, if it has both."""
    at = [position for position, blob in enumerate(operator.input) if blob == read]
    return list(operator.output) == [written] and set(at) <= set(POSITIONS.get(operator.type, ()))


def why_not_one_blob(operators: Sequence[caffe2_pb2.OperatorDef], read: str, written: str) -> Optional[str]:
    """Why `read`, which is there from the start, and `written` cannot be one blob of a step; None if they can."""
    first = next((index for index, operator in enumerate(operators) if written in operator.output), None)
    if first is None:
        return "no operator writes '{}'".format(written)
    writing, later = operators[first], operators[first + 1 :]
    if any(written in operator.input for operator in operators[: first + 1]):
        return "'{}' is read before it is written".format(written)
    if read in writing.output or any(read in (*operator.input, *operator.output) for operator in later):
        return "'{}' is still needed when '{}' is there".format(read, written)
    if read in writing.input and not may_be(writing, read, written):
        return "{} does not write '{}' in the place of '{}'".format(writing.type, written, read)
    return None
