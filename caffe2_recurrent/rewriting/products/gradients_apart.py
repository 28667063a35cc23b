"""FCGradient over all steps in parts, each a product of its own, and how long each way takes at a size.

    dW, db, dX = FCGradient(X, W, dY)

    dW = dY' X, or the transpose of X' dY, which is faster where X has few columns
    db = 1' dY; or that of another gradient with the same dY, copied
    dX = dY W

Where dY is small, dW and dX may be weighted sums of rows, see `weighted_sums.py`.

Source: caffe2/operators/fully_connected_op.h, which has dY' X for dW, and adds up db for each gradient anew.
"""

import functools
import itertools
from typing import Dict, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import weighted_sums
from caffe2_recurrent.rewriting.products.net_products import GRADIENT
from caffe2_recurrent.rewriting.products.weighted_sums import Sums
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

# How the gradient of the weights, or that of the rows, is computed.
PRODUCT, TRANSPOSED, SUMS = "product", "transposed product", "weighted sums"


class Apart(NamedTuple):
    """A gradient in parts: the ways of its weights and, if there is one, of its rows."""

    weights: str = PRODUCT
    rows: str = PRODUCT


# Columns of X up to which the transpose was faster where it was measured.
FEW_COLUMNS = 128
# Elements of dY up to which its columns are laid out. ATen does that in new memory each time, and from 128 KiB on that
# may come from the system (M_MMAP_THRESHOLD of glibc's mallopt); for 200 KB it took longer than sums saved.
FEW_ELEMENTS = (1 << 17) // 4
# Multiplications in a trial.
ENOUGH = 2e9


class Weights(NamedTuple):
    """The shape of W."""

    outer: int
    inner: int


class Size(NamedTuple):
    """`rows` rows, with weights of this shape, and `results` gradients.

    `has_bias` and `has_columns`: which of `Shared` are there.
    """

    rows: int
    weights: Weights
    results: int
    has_bias: bool = False
    has_columns: bool = False


class Shared(NamedTuple):
    """What gradients with the same dY have in common, so far as it is there: that of the bias, and dY's columns."""

    bias: Optional[str] = None
    columns: Optional[Sums] = None


def emit(emitter: Emitter, operator: caffe2_pb2.OperatorDef, way: Apart, weights: Weights, there: Shared) -> Shared:
    """The operators in place of `operator`; gives what others can share from then on."""
    rows, blob, of_result = operator.input
    of_weights, of_bias, *of_rows = operator.output
    axis = integer(operator, "axis", 1)
    bias, columns = there
    if way.weights == SUMS:
        columns = columns or weighted_sums.by_columns(emitter, of_result, axis, weights.outer)
        weighted_sums.emit(emitter, columns, emitter.reshaped(rows, "rows", [-1, weights.inner]), of_weights)
    elif way.weights == TRANSPOSED:
        product = emitter.new("MatMul", [rows, of_result], "transposed", trans_a=1, axis_a=axis, axis_b=axis)
        emitter.add("Transpose", [product], of_weights)
    else:
        emitter.add("MatMul", [of_result, rows], of_weights, trans_a=1, axis_a=axis, axis_b=axis)
    if bias is None:
        bias = sums_of_columns(emitter, of_result, axis, emitter.blob("sums"))
    emitter.add("Copy", [bias], of_bias)
    for made in of_rows:
        shape = emitter.new("Shape", [rows], "shape_of_rows")
        if way.rows == SUMS:
            weighted_sums.emit(emitter, weighted_sums.by_rows(emitter, of_result, axis, weights.outer), blob, made)
        else:
            emitter.add("MatMul", [of_result, blob], made, axis_a=axis)
        emitter.reshape_in_place_like(made, shape)
    return Shared(bias, columns)


def sums_of_columns(emitter: Emitter, of_result: str, axis: int, sums: str) -> str:
    """sums = 1' dY, where rows of dY start at `axis`."""
    ones = emitter.column_of_ones(of_result, axis)
    emitter.add("MatMul", [ones, of_result], sums, trans_a=1, axis_a=axis, axis_b=axis)
    return emitter.add("Squeeze", [sums], sums, dims=[0])


# ---------------------------------------------------------------------------------------------------------- the trial


def ways(size: Size) -> List[Optional[Apart]]:
    """The ways to have a gradient; None for FCGradient as it is."""
    by_sums = [SUMS] if may_be_sums(size) else []
    of_weights = [PRODUCT, *([TRANSPOSED] if size.weights.inner <= FEW_COLUMNS else []), *by_sums]
    of_rows = [PRODUCT, *(by_sums if size.results > 2 else [])]
    return [None, *itertools.starmap(Apart, itertools.product(of_weights, of_rows))]


def may_be_sums(size: Size) -> bool:
    return not weighted_sums.are_missing() and size.rows * size.weights.outer <= FEW_ELEMENTS


def fastest(size: Size) -> Optional[Apart]:
    found = seconds(size)
    return min(found, key=lambda way: found[way])


def seconds(size: Size) -> Dict[Optional[Apart], float]:
    """By the way; in proportion where there are more rows than a trial needs."""
    rows = trial.rows_to_try(size.rows, size.weights.inner, size.weights.outer, ENOUGH)
    found: Dict[Optional[Apart], Seconds] = _tried(size._replace(rows=rows))
    return {way: tried.step * size.rows / rows for way, tried in found.items()}


def subject(size: Size, way: Optional[Apart]) -> Subject:
    """A gradient by itself; what others have left there is made once."""
    shapes, outputs = _shapes(size), ["dw", "db", "dx"][: size.results]
    operator = caffe2_pb2.OperatorDef(type=GRADIENT, input=list(shapes), output=outputs)
    if way is None:
        return Subject([operator], shapes)
    loop = trial.lone_loop([*shapes, *outputs, "bias"])
    before, emitter = Emitter(loop, operator, "there"), Emitter(loop, operator, "dw")
    columns = weighted_sums.by_columns(before, "dy", 1, size.weights.outer) if size.has_columns else None
    emit(emitter, operator, way, size.weights, Shared("bias" if size.has_bias else None, columns))
    return Subject(emitter.operators, {**shapes, "bias": (size.weights.outer,)}, before.operators)


def _shapes(size: Size) -> Dict[str, Shape]:
    outer, inner = size.weights
    return {"x": (size.rows, inner), "w": (outer, inner), "dy": (size.rows, outer)}


@trial.remembered
def _tried(size: Size) -> Dict[Optional[Apart], Seconds]:
    return trial.in_turn({way: functools.partial(subject, size, way) for way in ways(size)})
