"""The shapes of what operators make of which Caffe2 infers nothing, or infers another, by a rule for each.

Source: caffe2/operators/lstm_unit_op.h, gru_unit_op.h, batch_matmul_op.h, elementwise_ops.h, reduce_ops.h;
caffe2/operators/rnn/recurrent_network_op.h for links.
"""

from typing import Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import integer, integers, string
from caffe2_recurrent.operators import LINK, TURNING

Shape = Tuple[int, ...]


class Made(NamedTuple):
    """An output: its shape, and the position of the input that has its type."""

    shape: Shape
    typed_as: int


# All outputs from the shapes of the inputs, None for those that are not known.
Inputs = Sequence[Optional[Shape]]
Outputs = Sequence[Optional[Made]]
Rule = Callable[[caffe2_pb2.OperatorDef, Inputs], Optional[Outputs]]


def shape_here(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape]) -> Optional[Outputs]:
    """The outputs, as far as they follow from the inputs that are known; None where Caffe2 is to be asked."""
    rule = _RULES.get(operator.type)
    return None if rule is None else rule(operator, [known.get(blob) for blob in operator.input])


def repeated(shapes: Sequence[Shape]) -> Optional[Shape]:
    """The shape that all of them become, axes of 1 as often as others say; None if they do not fit."""
    try:
        return tuple(np.broadcast(*(np.broadcast_to(0, shape) for shape in shapes)).shape)
    except ValueError:
        return None


def _like(*positions: int) -> Rule:
    """Shaped like these inputs, in their order, whatever else is read."""

    def rule(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Outputs:
        return [_made(inputs[position], position) for position in positions if position < len(inputs)]

    return rule


def _first_like_second(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Outputs:
    return [_made(inputs[1], 0)]


def _made(shape: Optional[Shape], typed_as: int) -> Optional[Made]:
    return None if shape is None else Made(shape, typed_as)


def _by_element(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Outputs:
    """Of which one repeats what is smaller."""
    shapes = [shape for shape in inputs if shape is not None]
    return [_made(repeated(shapes) if len(shapes) == len(inputs) else None, 0)]


def _by_aten(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Outputs:
    """Caffe2 takes it that what ATen gives has no dimensions."""
    name = string(operator, "operator", "")
    if name == "split_with_sizes":
        return _parts(operator, inputs)
    if name == "view_as":
        return _first_like_second(operator, inputs)
    return _by_element(operator, inputs) if (name, len(inputs)) in _ATEN_BY_ELEMENT else []


def _parts(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Outputs:
    """Views of parts, each with its share of one axis."""
    (whole,) = inputs
    axis, sizes = integer(operator, "dim", 0), integers(operator, "split_sizes")
    if whole is None or len(sizes) != len(operator.output) or not 0 <= axis < len(whole):
        return []
    return [Made((*whole[:axis], size, *whole[axis + 1 :]), 0) for size in sizes]


def _view(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Outputs:
    """Of steps of a blob, which is there as the second output."""
    whole = inputs[1]
    return [Made((integer(operator, "window", 1), *whole[1:]), 1), Made(whole, 1)] if whole else []


def _product(operator: caffe2_pb2.OperatorDef, inputs: Inputs) -> Optional[Outputs]:
    """Of matrices, of which either input may have several for one of the other: Caffe2 looks at one side alone."""
    left, right = inputs
    if left is None or right is None:
        return []
    if min(len(left), len(right)) < 2:
        # The vector would be turned, and is not.
        return [] if len(right) < 2 and integer(operator, "trans_a", 0) else None
    rows = left[-1 if integer(operator, "trans_a", 0) else -2]
    columns = right[-2 if integer(operator, "trans_b", 0) else -1]
    matrices = repeated([left[:-2], right[:-2]])
    return [] if matrices is None else [Made((*matrices, rows, columns), 0)]


# With how many tensors: `max` of one is its largest element, and the sum of one is that with a number.
_ATEN_BY_ELEMENT = frozenset(
    [(name, 1) for name in ("abs", "add", "exp", "log", "mul", "neg", "relu", "sigmoid", "sqrt", "sub", "tanh")]
    + [(name, 2) for name in ("add", "div", "max", "min", "mul", "sub", "tanh_backward")]
    + [(name, 3) for name in ("addcdiv", "addcmul", "lerp")]
)
# Of these Caffe2 infers that the gradient is shaped like what it is given, or like what was computed.
_WITH_GRADIENT_BY_ELEMENT = (
    *("Abs", "Acos", "Asin", "Atan", "Cbrt", "Cos", "Cosh", "Cube", "Gelu", "HardSigmoid", "Log1p", "Reciprocal"),
    *("Relu", "Rsqrt", "Sigmoid", "Sin", "Sinh", "Softsign", "Tan", "Tanh"),
)
_LIKE_THE_FIRST = ("Ceil", "CopyCPUToIDEEP", "CopyIDEEPToCPU", "ElementwiseLinear", "Floor", "GRUUnit", TURNING)
_RULES: Dict[str, Rule] = {
    **dict.fromkeys((*_LIKE_THE_FIRST, "SequenceMask", "SoftmaxGradient"), _like(0)),
    **dict.fromkeys(("ResizeLike", "SumReduceLike"), _first_like_second),
    **dict.fromkeys((kind + "Gradient" for kind in _WITH_GRADIENT_BY_ELEMENT), _by_element),
    "ATen": _by_aten,
    "BatchMatMul": _product,
    "GRUUnitGradient": _like(0, 1),
    "LeakyReluGradient": _like(0),
    LINK: _view,
    "LSTMUnit": _like(0, 1),
    "LSTMUnitGradient": _like(0, 1, 2),
}
