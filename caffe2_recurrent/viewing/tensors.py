"""What is known of a blob's contents without running anything: shape and element type."""

from typing import Dict, NamedTuple, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.loops.caffe2_inference import infer as infer_by_type
from caffe2_recurrent.loops.sizes import Shape

_TYPES = caffe2_pb2.TensorProto
NUMPY_TYPES: Dict[int, np.dtype] = {
    _TYPES.FLOAT: np.dtype(np.float32),
    _TYPES.DOUBLE: np.dtype(np.float64),
    _TYPES.FLOAT16: np.dtype(np.float16),
    _TYPES.INT8: np.dtype(np.int8),
    _TYPES.INT16: np.dtype(np.int16),
    _TYPES.INT32: np.dtype(np.int32),
    _TYPES.INT64: np.dtype(np.int64),
    _TYPES.UINT8: np.dtype(np.uint8),
    _TYPES.BYTE: np.dtype(np.uint8),
    _TYPES.UINT16: np.dtype(np.uint16),
    _TYPES.BOOL: np.dtype(np.bool_),
}
CAFFE2_TYPES = {kind: number for number, kind in NUMPY_TYPES.items() if number != _TYPES.BYTE}


class Tensor(NamedTuple):
    """What is known of a blob's contents; `kind` is None where the elements have no fixed size."""

    shape: Shape
    kind: Optional[np.dtype]

    @property
    def bytes(self) -> Optional[int]:
        return None if self.kind is None else int(np.prod(self.shape, dtype=np.int64)) * self.kind.itemsize


FLOAT = np.dtype(np.float32)
Tensors = Sequence[Optional[Tensor]]


def kind_in_workspace(blob: str) -> np.dtype:
    """The element type of a blob; float32, as parameters are, where the workspace does not say."""
    found = workspace_blobs.kind(blob)
    return found if found is not None and found in CAFFE2_TYPES else FLOAT


def infer(operator: caffe2_pb2.OperatorDef, inputs: Tensors) -> Dict[int, Tensor]:
    """The outputs, by position, as far as they follow from the inputs."""
    known = {blob: tensor for blob, tensor in zip(operator.input, inputs) if tensor is not None}
    shapes = {blob: tensor.shape for blob, tensor in known.items()}
    kinds = {blob: CAFFE2_TYPES[tensor.kind] for blob, tensor in known.items() if tensor.kind is not None}
    made, types = infer_by_type(operator, shapes, kinds)
    return {
        position: Tensor(made[blob], NUMPY_TYPES.get(types[blob]) if blob in types else None)
        for position, blob in enumerate(operator.output)
        if blob in made
    }
