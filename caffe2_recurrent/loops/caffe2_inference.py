"""What Caffe2 infers of the shapes and types of an operator's outputs, where it infers them right.

Of some operators it infers another shape than they make, and of some it says nothing, though it would of others that
make the same. It is asked for those in their place.

Source: caffe2/operators/filler_op.h, slice_op.h, gather_op.h, reduce_ops.h, conv_pool_op_base.h.
"""

from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.fitting_shapes import fit
from caffe2_recurrent.operator_arguments import argument, integer, integers, remove_arguments, set_arguments, string
from caffe2_recurrent.operators import TURNING, copied

Shape = Tuple[int, ...]
Shapes = Sequence[Shape]
Operators = Sequence[caffe2_pb2.OperatorDef]
# What they make is shaped like their first input, of which not every Caffe2 says something.
LIKE_THE_FIRST = frozenset([TURNING, "ElementwiseLinear", "SequenceMask", "SoftmaxGradient"])
# They repeat the smaller of their two inputs, as Add does.
REPEATING = ("SigmoidGradient", "TanhGradient")
# An argument of fills: sizes behind those of the input.
EXTRA = "extra_shape"
DILATIONS = ("dilation", "dilations", "dilation_h", "dilation_w")
REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
NOTHING: Operators = ()


def infer(
    operator: caffe2_pb2.OperatorDef, shapes: Shapes, types: Optional[Sequence[int]] = None
) -> Tuple[Mapping[str, Sequence[int]], Mapping[str, int]]:
    """The shapes and Caffe2's types of the outputs, as far as they are known, for inputs of such shapes and types."""
    net = caffe2_pb2.NetDef(op=_with_right_shapes(operator, shapes))
    dimensions = {blob: list(shape) for blob, shape in zip(operator.input, shapes)}
    given = None if types is None else dict(zip(operator.input, types))
    try:
        found, kinds = workspace.InferShapesAndTypes([net], dimensions, nets_proto=True, blob_types=given)
    # The last two as the standard library of C++ has them, which Caffe2 lets through.
    except (RuntimeError, TypeError, ValueError, IndexError):
        return {}, {}
    return {blob: found[blob] for blob in operator.output if blob in found}, kinds


def is_addcmul(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "ATen" and string(operator, "operator", "") == "addcmul"


def _with_right_shapes(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Operators in whose place Caffe2 infers what this one makes; none if there are no such."""
    if is_addcmul(operator):
        return _product_and_sum(operator)
    if operator.input and integers(operator, EXTRA) and not integer(operator, "input_as_shape", 0):
        return _filling(operator, shapes)
    if any(size != 1 for name in DILATIONS for size in _sizes(operator, name)):
        return NOTHING
    in_its_place = _IN_THEIR_PLACE.get(operator.type)
    return [operator] if in_its_place is None else in_its_place(operator, shapes)


def _sizes(operator: caffe2_pb2.OperatorDef, name: str) -> Sequence[int]:
    found = argument(operator, name)
    return [] if found is None else list(found.ints) or [found.i]


def _changed(operator: caffe2_pb2.OperatorDef, **arguments: Any) -> Operators:
    made = copied(operator)
    set_arguments(made, arguments)
    return [made]


def _copying(operator: caffe2_pb2.OperatorDef, position: int) -> Operators:
    return [caffe2_pb2.OperatorDef(type="Copy", input=[operator.input[position]], output=operator.output[:1])]


def _product_and_sum(operator: caffe2_pb2.OperatorDef) -> Operators:
    first, *factors = operator.input
    product = operator.output[0] + "_product"
    return [
        caffe2_pb2.OperatorDef(type="Mul", input=factors, output=[product]),
        caffe2_pb2.OperatorDef(type="Add", input=[first, product], output=operator.output),
    ]


def _adding(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    made = caffe2_pb2.OperatorDef(type="Add", input=operator.input, output=operator.output)
    return [made] if fit(made, shapes) else NOTHING


def _reducing(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Without axes it reduces all of them; a scalar, and what is made of no elements, is taken for something else."""
    if integers(operator, "axes"):
        return [operator]
    if not integer(operator, "keepdims", 1) or 0 in shapes[0]:
        return NOTHING
    return _changed(operator, axes=list(range(len(shapes[0]))))


def _filling(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Caffe2 leaves out what comes behind the sizes of the input."""
    (made,) = _changed(operator, shape=[*shapes[0], *integers(operator, EXTRA)])
    remove_arguments(made, [EXTRA])
    del made.input[:]
    return [made]


def _slice(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """In a run it ends where its input does, at the latest; Caffe2 goes by the argument."""
    if len(shapes) != 1:
        return [operator]
    starts, ends = (
        [min(at, size) for at, size in zip(integers(operator, name), shapes[0])] for name in ("starts", "ends")
    )
    return _changed(operator, starts=starts, ends=ends)


def _gather(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Of an axis that counts from the end it wants room for as many indices as there is no memory for."""
    axis, axes = integer(operator, "axis", 0), len(shapes[0])
    if not -axes <= axis < axes:
        # It would end the process.
        return NOTHING
    return [operator] if axis >= 0 else _changed(operator, axis=axis + axes)


def _product(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Matrices of which one is repeated: of what the result has in front of their axes it looks at one side alone."""
    if len(shapes[1]) == 1 and integer(operator, "trans_a", 0):
        return NOTHING
    are_repeated = min(map(len, shapes)) > 2 and len({shape[:-2] for shape in shapes}) > 1
    return NOTHING if are_repeated else [operator]


_IN_THEIR_PLACE: Dict[str, Callable[[caffe2_pb2.OperatorDef, Shapes], Operators]] = {
    **dict.fromkeys(LIKE_THE_FIRST, lambda operator, shapes: _copying(operator, 0)),
    **dict.fromkeys(REPEATING, _adding),
    **dict.fromkeys(REDUCTIONS, _reducing),
    "BatchMatMul": _product,
    "Gather": _gather,
    "GatherRanges": lambda operator, shapes: NOTHING,
    "Slice": _slice,
    "SumReduceLike": lambda operator, shapes: _copying(operator, 1),
}
