"""What is known of a blob's contents without running anything: shape and element type.

From Caffe2's own shape inference, and for operators of which it knows nothing from RULES. What neither of them knows
stays unknown.
"""

from typing import Callable, Dict, NamedTuple, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.loops.caffe2_inference import infer as infer_by_caffe2
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import integer, integers, string
from caffe2_recurrent.operators import LINK

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
# All outputs of an operator from its inputs.
Rule = Callable[[caffe2_pb2.OperatorDef, Tensors], Optional[Tensor]]


def kind_in_workspace(blob: str) -> np.dtype:
    """The element type of a blob; float32, as parameters are, where the workspace does not say."""
    found = workspace_blobs.kind(blob)
    return found if found is not None and found in CAFFE2_TYPES else FLOAT


def infer(operator: caffe2_pb2.OperatorDef, inputs: Tensors) -> Dict[int, Tensor]:
    """The outputs, by position, as far as they follow from the inputs."""
    if operator.type == "ATen" and string(operator, "operator", "") == "split_with_sizes":
        return _parts(operator, inputs[0])
    if operator.type == "ATen" and string(operator, "operator", "") == "view_as":
        return {} if inputs[1] is None else {0: inputs[1]}
    if operator.type == LINK:
        return _view(operator, inputs)
    rule = RULES.get(operator.type)
    if rule is not None:
        tensor = rule(operator, inputs)
        return {} if tensor is None else dict.fromkeys(range(len(operator.output)), tensor)
    known = [(tensor.shape, CAFFE2_TYPES[tensor.kind]) for tensor in inputs if tensor and tensor.kind is not None]
    if len(known) < len(inputs):
        # Caffe2 would have nothing to say but a warning.
        return {}
    shapes, kinds = infer_by_caffe2(operator, [shape for shape, _ in known], [kind for _, kind in known])
    return {
        position: Tensor(tuple(int(size) for size in shapes[blob]), NUMPY_TYPES.get(kinds[blob]))
        for position, blob in enumerate(operator.output)
        if blob in shapes
    }


def _view(operator: caffe2_pb2.OperatorDef, inputs: Tensors) -> Dict[int, Tensor]:
    """A view of slices of a blob, which is there as the second output."""
    whole = inputs[1]
    if whole is None or not whole.shape:
        return {}
    return {0: Tensor((integer(operator, "window", 1), *whole.shape[1:]), whole.kind), 1: whole}


def _like(position: int) -> Rule:
    return lambda operator, inputs: inputs[position]


def _broadcast(operator: caffe2_pb2.OperatorDef, inputs: Tensors) -> Optional[Tensor]:
    """ATen's operators on one element of each input; of its others nothing is known."""
    tensors = [tensor for tensor in inputs if tensor is not None]
    if len(tensors) != len(inputs) or (string(operator, "operator", ""), len(inputs)) not in ATEN_ELEMENTWISE:
        return None
    shape = _together([tensor.shape for tensor in tensors])
    return None if shape is None else Tensor(shape, tensors[0].kind)


def _parts(operator: caffe2_pb2.OperatorDef, whole: Optional[Tensor]) -> Dict[int, Tensor]:
    """ATen's views of parts, each with its share of one axis."""
    axis, sizes = integer(operator, "dim", 0), integers(operator, "split_sizes")
    if whole is None or len(sizes) != len(operator.output) or not 0 <= axis < len(whole.shape):
        return {}
    before, after = whole.shape[:axis], whole.shape[axis + 1 :]
    return {position: Tensor((*before, size, *after), whole.kind) for position, size in enumerate(sizes)}


def _product(operator: caffe2_pb2.OperatorDef, inputs: Tensors) -> Optional[Tensor]:
    """Of matrices, of which either input may have several for one of the other; Caffe2 itself forgets these."""
    left, right = inputs
    if left is None or right is None or min(len(left.shape), len(right.shape)) < 2:
        return None
    rows = left.shape[-1 if integer(operator, "trans_a", 0) else -2]
    columns = right.shape[-2 if integer(operator, "trans_b", 0) else -1]
    matrices = _together([tensor.shape[:-2] for tensor in (left, right)])
    return None if matrices is None else Tensor((*matrices, rows, columns), left.kind)


def _together(shapes: Sequence[Shape]) -> Optional[Shape]:
    """The shape that all of them become, axes of 1 as often as others say; None if they do not fit."""
    try:
        return np.broadcast_arrays(*(np.broadcast_to(0, shape) for shape in shapes))[0].shape
    except ValueError:
        return None


# The number of tensors that they take matters: `max` of one tensor is its largest element.
ATEN_ELEMENTWISE = frozenset(
    [(name, 1) for name in ("abs", "exp", "log", "neg", "relu", "sigmoid", "sqrt", "tanh")]
    + [(name, 2) for name in ("add", "div", "max", "min", "mul", "sub")]
    + [(name, 3) for name in ("addcdiv", "addcmul", "lerp")]
)
RULES: Dict[str, Rule] = {
    "ATen": _broadcast,
    "BatchMatMul": _product,
    "Ceil": _like(0),
    "CopyCPUToIDEEP": _like(0),
    "CopyIDEEPToCPU": _like(0),
    "ElementwiseLinear": _like(0),
    "Floor": _like(0),
    "GRUUnit": _like(0),
    # Both outputs have the shape of the cell state.
    "LSTMUnit": _like(1),
    "ResizeLike": _like(1),
    "ReversePackedSegs": _like(0),
    # Older Caffe2s say nothing of these.
    "SequenceMask": _like(0),
}
