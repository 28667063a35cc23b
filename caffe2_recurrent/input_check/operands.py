"""Whether what an operator reads fits together, by the rules of a run: Caffe2's inference of shapes is less strict.

Source: utility_ops.h, elementwise_ops_utils.cc, elementwise_linear_op.h, concat_split_op.h and fully_connected_op.h in
caffe2/operators.
"""

from typing import Mapping, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.fitting_shapes import BY_ELEMENT, fit
from caffe2_recurrent.loops.shape_checks import FED, add_misfit, least_dimensions
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.operators import SUM
from caffe2_recurrent.problems import Problems

# A run fails where `fits` says no; others may be left out of the inference alone.
COMBINING = frozenset([SUM, "Concat", "ElementwiseLinear", *BY_ELEMENT])


def fits(operator: caffe2_pb2.OperatorDef, shapes: Sequence[Shape]) -> bool:
    """Whether inputs of these shapes do; True of an operator of which nothing is known."""
    if operator.type == SUM:
        return len(set(shapes)) == 1
    if operator.type in BY_ELEMENT and integer(operator, "broadcast", 0):
        return _can_be_laid_along(operator, *shapes)
    if operator.type == "ElementwiseLinear":
        return set(shapes[1:]) == {(int(np.prod(shapes[0][integer(operator, "axis", 1) :])),)}
    return fit(operator, shapes)


def check_bias(
    operator: caffe2_pb2.OperatorDef, shapes: Mapping[str, Shape], shown: Mapping[str, str], values: Problems
) -> None:
    """Note that the bias of an FC is none for its weight, as they are `shown`."""
    weight, bias = operator.input[1:3]
    axis = integer(operator, "axis_w", 1)
    if not {weight, bias} <= shapes.keys() or len(shapes[weight]) < least_dimensions(axis):
        return
    rows = int(np.prod(shapes[weight][:axis]))
    if shapes[bias] != (rows,):
        why = "a bias for {0} rows must be [{0}]".format(rows)
        add_misfit(operator, [shown[weight], shown[bias]], why, values, FED)


def _can_be_laid_along(operator: caffe2_pb2.OperatorDef, whole: Shape, part: Shape) -> bool:
    """As `broadcast=1` has it: axes of the second are some of the first, one behind the other; 1 at its ends is any."""
    if np.prod(part) == 1 or argument(operator, "axis_str") is not None:
        return True
    left_out = len(whole) - len(part)
    start = integer(operator, "axis", -1)
    start = left_out if start == -1 else start
    if not 0 <= start <= left_out:
        return False
    large = [axis for axis, size in enumerate(part) if size != 1]
    middle = slice(large[0], large[-1] + 1)
    return whole[start:][middle] == part[middle]
