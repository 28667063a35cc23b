"""The shapes and types of an operator's outputs: what Caffe2 infers, where it infers that right.

Of some operators it infers another shape than they make, or nothing: `known_shapes.py` has rules for these, or it is
asked for others in their place that make the same.

Source: caffe2/operators/filler_op.h, slice_op.h, gather_op.h, reduce_ops.h, conv_pool_op_base.h.
"""

from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.fitting_shapes import fit
from caffe2_recurrent.loops.known_shapes import Shape, shape_here
from caffe2_recurrent.operator_arguments import argument, integer, integers, remove_arguments, set_arguments
from caffe2_recurrent.operators import copied

Shapes = Sequence[Shape]
Operators = Sequence[caffe2_pb2.OperatorDef]
# An argument of fills: sizes behind those of the input.
EXTRA = "extra_shape"
# Another: whether the shape is what the input holds.
FROM_INPUT = "input_as_shape"
DILATIONS = ("dilation", "dilations", "dilation_h", "dilation_w")
REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
# By the position of the output, types that Caffe2 infers otherwise.
OTHER_TYPES = {"TopK": {1: caffe2_pb2.TensorProto.INT64, 2: caffe2_pb2.TensorProto.INT64}}
NOTHING: Operators = ()


def infer(
    operator: caffe2_pb2.OperatorDef, shapes: Mapping[str, Shape], types: Optional[Mapping[str, int]] = None
) -> Tuple[Mapping[str, Shape], Mapping[str, int]]:
    """What the outputs have, as far as it follows from what is known of the inputs. `types` are Caffe2's numbers."""
    outputs = shape_here(operator, shapes)
    if outputs is None:
        return _infer_by_caffe2(operator, shapes, types)
    made = {blob: output for blob, output in zip(operator.output, outputs) if output is not None}
    of = {blob: operator.input[output.typed_as] for blob, output in made.items()}
    kinds = {blob: types[read] for blob, read in of.items() if types is not None and read in types}
    return {blob: output.shape for blob, output in made.items()}, kinds


def _infer_by_caffe2(
    operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape], types: Optional[Mapping[str, int]]
) -> Tuple[Mapping[str, Shape], Mapping[str, int]]:
    # Where something is missing it says nothing but a warning, and of what does not fit an error.
    if not all(blob in known and (types is None or blob in types) for blob in operator.input):
        return {}, {}
    shapes = [known[blob] for blob in operator.input]
    if not fit(operator, shapes):
        return {}, {}
    net = caffe2_pb2.NetDef(op=_with_right_shapes(operator, shapes))
    dimensions = {blob: list(known[blob]) for blob in operator.input}
    try:
        found, kinds = workspace.InferShapesAndTypes([net], dimensions, nets_proto=True, blob_types=types)
    # The last two as the standard library of C++ has them, which Caffe2 lets through.
    except (RuntimeError, TypeError, ValueError, IndexError):
        return {}, {}
    others = OTHER_TYPES.get(operator.type, {})
    kinds.update((blob, others[at]) for at, blob in enumerate(operator.output) if at in others)
    return {blob: tuple(map(int, found[blob])) for blob in operator.output if blob in found}, kinds


def _with_right_shapes(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Operators in whose place Caffe2 infers what this one makes; none if there are no such."""
    if integer(operator, FROM_INPUT, 0):
        # It takes the input for the shape, and not what that holds.
        return NOTHING
    if operator.input and integers(operator, EXTRA):
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
    sizes = [_from_start(end, size) - _from_start(start, size) for start, end, size in zip(starts, ends, shapes[0])]
    # Otherwise a run fails.
    return _changed(operator, starts=starts, ends=ends) if min(sizes, default=0) >= 0 else NOTHING


def _from_start(at: int, size: int) -> int:
    return at if at >= 0 else size + 1 + at


def _gather(operator: caffe2_pb2.OperatorDef, shapes: Shapes) -> Operators:
    """Of an axis that counts from the end it wants room for as many indices as there is no memory for."""
    axis, axes = integer(operator, "axis", 0), len(shapes[0])
    if not -axes <= axis < axes:
        # It would end the process.
        return NOTHING
    return [operator] if axis >= 0 else _changed(operator, axis=axis + axes)


_IN_THEIR_PLACE: Dict[str, Callable[[caffe2_pb2.OperatorDef, Shapes], Operators]] = {
    **dict.fromkeys(REDUCTIONS, _reducing),
    "Gather": _gather,
    "GatherRanges": lambda operator, shapes: NOTHING,
    "Slice": _slice,
}
