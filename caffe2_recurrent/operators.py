"""Operators put in beside those of a step, and what Caffe2 calls gradients."""

from typing import Any, Sequence

from caffe2.proto import caffe2_pb2
from caffe2.python import core, scope

GRADIENT_SUFFIX = "_grad"


def gradient_name(blob: str) -> str:
    return blob + GRADIENT_SUFFIX


def copy_operator(source: str, target: str, beside: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    """`target = Copy(source)`, on the device of the operator `beside`."""
    # There may be one for each operator of the step, and `CreateOperator` takes several times as long.
    copy = caffe2_pb2.OperatorDef(name="", type="Copy", input=[source], output=[target])
    device = beside.device_option if beside.HasField("device_option") else scope.CurrentDeviceScope()
    if device is not None:
        copy.device_option.CopyFrom(device)
    return copy


def operator_beside(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], beside: caffe2_pb2.OperatorDef, **arguments: Any
) -> caffe2_pb2.OperatorDef:
    """An operator between blobs of the given (full) names, on the device of the operator `beside`."""
    device = beside.device_option if beside.HasField("device_option") else None
    return core.CreateOperator(
        kind,
        [core.BlobReference(blob) for blob in inputs],
        [core.BlobReference(blob) for blob in outputs],
        device_option=device,
        **arguments,
    )
