"""Operators that may write to what they read, to which the engine agrees."""

from typing import Dict, Tuple

from caffe2.proto import caffe2_pb2

# The positions of the inputs in whose place the first output may be, of operators that take each element from those in
# its place. Source: AllowInplace in caffe2/operators/elementwise_ops_schema.cc and utility_ops.cc.
POSITIONS: Dict[str, Tuple[int, ...]] = {"Add": (0, 1), "Mul": (0, 1), "Sub": (0, 1), "Sum": (0,)}


def may_be(operator: caffe2_pb2.OperatorDef, read: str, written: str) -> bool:
    """Whether `operator` may have one blob for `read` and `written`, if it has both."""
    at = [position for position, blob in enumerate(operator.input) if blob == read]
    return list(operator.output) == [written] and set(at) <= set(POSITIONS.get(operator.type, ()))
