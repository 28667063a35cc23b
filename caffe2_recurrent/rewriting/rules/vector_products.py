"""Products of matrices with a vector each, the vector as a row; it is tried out."""

import functools
from typing import Dict, Iterable, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer, integers
from caffe2_recurrent.operators import is_on_onednn, new_operator
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products.step_products import AS_IT_IS, GAIN, MULTIPLICATION
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS
from caffe2_recurrent.rewriting.steps.step_shapes import MAY_BE_LARGER, shapes_before
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

# The matrices as they lie; or transposed, once before the loop.
AS_THEY_LIE, LAID_OUT = "as they lie", "laid out"
TRANSPOSED = "{}_transposed"


class Size(NamedTuple):
    """`matrices` of one `shape`, which the product transposes or not; whether they are the same in all steps."""

    shape: Shape
    transposes: bool
    are_fixed: bool


class VectorProducts(Rule):
    """step: y = BatchMatMul(A, b), with b `[N, K, 1]`    =>    y' = BatchMatMul(b', A'), with b' `[N, 1, K]`

    Libraries of products are faster at a row times a matrix than at a matrix times a column. Also in the backward step.
    A may be transposed (`trans_a`); where it is the same in all steps, and that is faster, it is laid out once before
    the loop. The attention of a decoder has such products with all outputs of its encoder.
    """

    name = "vector_products"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                if _is_one_by_one(operator) and not _is_in_rows(operators, position):
                    yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        operator = operators[position]
        matrices, vectors = operator.input
        if is_on_onednn(operator):
            return "it is oneDNN's"
        shapes = shapes_before(loop, sizes, operators, position)
        unknown = [blob for blob in operator.input if blob not in shapes]
        if unknown:
            return "the shape of '{}' is not known; give shapes".format(unknown[0])
        if {len(shapes[matrices]), len(shapes[vectors])} != {DIMENSIONS}:
            return "it is no product of matrices one by one: {} and {}".format(shapes[matrices], shapes[vectors])
        if shapes[vectors][2] != 1:
            return "'{}' has no columns of one number: {}".format(vectors, shapes[vectors])
        larger = shapes_before(loop, sizes.when_larger(), operators, position)
        if vectors not in larger or larger[vectors][2] != 1:
            return MAY_BE_LARGER.format(vectors, shapes[vectors])
        if 1 in shapes[matrices][1:]:
            return "'{}' holds vectors too: {}".format(matrices, shapes[matrices])
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        size = _size(loop, site, sizes)
        steps = sizes.steps(loop)
        if steps is None and size.are_fixed:
            return "the number of steps is not known, and laying out may cost more than it gains; give shapes"
        found = _tried(size, steps)
        if GAIN * _cost(found[_best(found, steps)], steps) > _cost(found[AS_IT_IS], steps):
            return "for matrices of {} it is not faster".format(size.shape)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        size, steps = _size(loop, site, sizes), sizes.steps(loop)
        matrices = operator.input[0]
        way = _best(_tried(size, steps), steps)
        if way == LAID_OUT:
            matrices = loop.add_before("Transpose", [matrices], TRANSPOSED.format(matrices), axes=[0, 2, 1])
            loop.add_reference(matrices)
        emitter = Emitter(loop, operator, operator.output[0])
        row = emitter.blob("row")
        emitter.operators += _in_rows(operator, matrices, row, size.transposes == (way == LAID_OUT))
        operators[position : position + 1] = emitter.operators


def _is_one_by_one(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is a product of matrices, one by one, with what is not transposed."""
    arguments = ("broadcast", "trans_b")
    return operator.type == MULTIPLICATION and not any(integer(operator, name, 0) for name in arguments)


def _is_in_rows(operators: List[caffe2_pb2.OperatorDef], position: int) -> bool:
    """Whether the rule has been here."""
    row = dataflow.writer(operators, operators[position].input[0], position)
    return row is not None and operators[row].type == "ExpandDims" and integers(operators[row], "dims") == [1]


def _size(loop: Loop, site: Site, sizes: Sizes) -> Size:
    operators, position = site.where
    operator = operators[position]
    matrices = operator.input[0]
    shape = shapes_before(loop, sizes, operators, position)[matrices]
    return Size(shape, bool(integer(operator, "trans_a", 0)), loop.is_reference(matrices))


def _in_rows(
    operator: caffe2_pb2.OperatorDef, matrices: str, row: str, transposes: bool
) -> List[caffe2_pb2.OperatorDef]:
    """What makes the result of the product, of matrices that the new product transposes or not."""
    (column,), (result,) = operator.input[1:], operator.output
    return [
        # Both are read as they were by others.
        new_operator("Squeeze", [column], [row], operator, dims=[2]),
        new_operator("ExpandDims", [row], [row], operator, dims=[1]),
        new_operator(MULTIPLICATION, [row, matrices], [result], operator, trans_b=int(transposes)),
        new_operator("Squeeze", [result], [result], operator, dims=[1]),
        new_operator("ExpandDims", [result], [result], operator, dims=[2]),
    ]


# -------------------------------------------------------------------------------------------------------------- trials


def _cost(found: Seconds, steps: Optional[int]) -> float:
    return found.step if steps is None else found.of_step(steps)


def _best(found: Dict[str, Seconds], steps: Optional[int]) -> str:
    """Of the ways to have it in rows."""
    return min((way for way in found if way != AS_IT_IS), key=lambda way: _cost(found[way], steps))


@trial.remembered
def _tried(size: Size, steps: Optional[int]) -> Dict[str, Seconds]:
    ways = [AS_IT_IS, AS_THEY_LIE] + ([LAID_OUT] if size.are_fixed else [])
    return trial.in_turn({way: functools.partial(_subject, size, way) for way in ways}, steps)


def _subject(size: Size, way: str) -> Subject:
    batch, rows, columns = size.shape
    shapes = {"matrices": size.shape, "column": (batch, rows if size.transposes else columns, 1)}
    product = caffe2_pb2.OperatorDef(type=MULTIPLICATION, input=["matrices", "column"], output=["result"])
    if size.transposes:
        product.arg.add(name="trans_a", i=1)
    if way == AS_IT_IS:
        return Subject([product], shapes)
    if way == AS_THEY_LIE:
        return Subject(_in_rows(product, "matrices", "row", not size.transposes), shapes)
    laid_out = TRANSPOSED.format("matrices")
    once = new_operator("Transpose", ["matrices"], [laid_out], product, axes=[0, 2, 1])
    return Subject(_in_rows(product, laid_out, "row", size.transposes), shapes, [once])
