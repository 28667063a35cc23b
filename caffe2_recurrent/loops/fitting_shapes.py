"""Whether the shapes of an operator's inputs fit each other, for those operators of which Caffe2 logs an error if not.

Shapes that do not fit are no mistake here: one that is 1 by chance is taken for larger (`Sizes.when_larger`), and a
slice has another one between two operators of which the first is oneDNN's.

Source: InferBlobShapesAndTypes in caffe2/core/operator.cc; caffe2/operators/concat_split_op.cc,
elementwise_ops_schema.cc, elementwise_ops_utils.cc, expand_squeeze_dims_op.h, fc_inference.cc.
"""

from itertools import zip_longest
from typing import Callable, Dict, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.known_shapes import Shape
from caffe2_recurrent.operator_arguments import integer, integers, joining_axis

Shapes = Sequence[Shape]

BY_ELEMENT = ("Add", "Sub", "Mul", "Div", "And", "Or", "Xor")
COMPARING = ("EQ", "NE", "LT", "LE", "GT", "GE")


def fit(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> bool:
    """Whether inputs of these shapes do; True of an operator of which nothing is known."""
    return operator.type not in _CHECKS or _CHECKS[operator.type](operator, shapes)


def _can_be_put_together(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> bool:
    first, *others = shapes
    added = integer(operator, "add_axis", 0)
    axis = joining_axis(operator)
    axis += len(first) + added if axis < 0 else 0
    if not 0 <= axis < len(first) + added:
        return False
    behind = axis if added else axis + 1
    return all(
        len(shape) == len(first) and shape[:axis] == first[:axis] and shape[behind:] == first[behind:]
        for shape in others
    )


def _can_be_repeated(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> bool:
    """As numpy repeats what is 1; `broadcast=1` is another way, in which the result is shaped like the first."""
    if integer(operator, "broadcast", 0):
        return True
    left, right = shapes
    return all(1 in (a, b) or a == b for a, b in zip_longest(reversed(left), reversed(right), fillvalue=1))


def _can_be_compared(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> bool:
    """A run would repeat these as well; Caffe2 infers nothing then."""
    left, right = shapes
    return bool(integer(operator, "broadcast", 0)) or left == right


def _can_be_squeezed(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> bool:
    (shape,) = shapes
    return all(shape[axis : axis + 1] == (1,) for axis in integers(operator, "dims"))


def _can_be_multiplied(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> bool:
    axes = (integer(operator, "axis", 1), integer(operator, "axis_w", 1))
    return all(-len(shape) <= axis < len(shape) for shape, axis in zip(shapes, axes))


_CHECKS: Dict[str, Callable[[caffe2_pb2.OperatorDef, Shapes], bool]] = {
    "Concat": _can_be_put_together,
    "FC": _can_be_multiplied,
    "Squeeze": _can_be_squeezed,
    **dict.fromkeys(BY_ELEMENT, _can_be_repeated),
    **dict.fromkeys(COMPARING, _can_be_compared),
}
