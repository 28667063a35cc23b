"""FCGradient over all steps in parts, each a product of its own, and how long each way takes at a size.

    dW, db, dX = FCGradient(X, W, dY)

    dW = dY' X, or the transpose of X' dY, which is faster where X has few columns
    db = 1' dY; or that of another gradient with the same dY, copied
    dX = dY W

Source: caffe2/operators/fully_connected_op.h, which has dY' X for dW, and adds up db for each gradient anew.
"""

import functools
from typing import Dict, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting import trial
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.net_products import GRADIENT
from caffe2_recurrent.rewriting.subjects import Seconds, Subject
from caffe2_recurrent.sizes import Shape


class Apart(NamedTuple):
    """A gradient in parts; `is_transposed`: whether that of the weights is had from its transpose."""

    is_transposed: bool


# Columns of X up to which the transpose was faster where it was measured.
FEW_COLUMNS = 128
# Multiplications in a trial.
ENOUGH = 2e9


class Size(NamedTuple):
    """`rows` rows of `inner` elements, with weights `[outer, inner]`, and `results` gradients.

    `has_bias`: whether that of the bias is there, to be copied.
    """

    rows: int
    inner: int
    outer: int
    results: int
    has_bias: bool


def emit(emitter: Emitter, operator: caffe2_pb2.OperatorDef, way: Apart, bias: Optional[str] = None) -> str:
    """The products in place of `operator`; gives the blob with the bias's gradient, `bias` if it is there."""
    rows, weights, of_result = operator.input
    of_weights, of_bias, *of_rows = operator.output
    axis = integer(operator, "axis", 1)
    first, second = (rows, of_result) if way.is_transposed else (of_result, rows)
    product = emitter.blob("transposed") if way.is_transposed else of_weights
    emitter.add("MatMul", [first, second], product, trans_a=1, axis_a=axis, axis_b=axis)
    if way.is_transposed:
        emitter.add("Transpose", [product], of_weights)
    if bias is None:
        bias = sums_of_columns(emitter, of_result, axis, emitter.blob("sums"))
    emitter.add("Copy", [bias], of_bias)
    for blob in of_rows:
        shape = emitter.new("Shape", [rows], "shape_of_rows")
        emitter.add("MatMul", [of_result, weights], blob, axis_a=axis)
        emitter.reshape_in_place_like(blob, shape)
    return bias


def sums_of_columns(emitter: Emitter, of_result: str, axis: int, sums: str) -> str:
    """sums = 1' dY, where rows of dY start at `axis`."""
    ones = emitter.column_of_ones(of_result, axis)
    emitter.add("MatMul", [ones, of_result], sums, trans_a=1, axis_a=axis, axis_b=axis)
    return emitter.add("Squeeze", [sums], sums, dims=[0])


# ---------------------------------------------------------------------------------------------------------- the trial


def ways(size: Size) -> List[Optional[Apart]]:
    """The ways to have a gradient; None for FCGradient as it is."""
    return [None, Apart(False), *([Apart(True)] if size.inner <= FEW_COLUMNS else [])]


def fastest(size: Size) -> Optional[Apart]:
    found = seconds(size)
    return min(found, key=lambda way: found[way])


def seconds(size: Size) -> Dict[Optional[Apart], float]:
    """By the way; in proportion where there are more rows than a trial needs."""
    rows = trial.rows_to_try(size.rows, size.inner, size.outer, ENOUGH)
    found: Dict[Optional[Apart], Seconds] = _tried(size._replace(rows=rows))
    return {way: tried.step * size.rows / rows for way, tried in found.items()}


def operators(size: Size, way: Optional[Apart]) -> List[caffe2_pb2.OperatorDef]:
    """A gradient by itself, of blobs of `shapes`."""
    outputs = ["dw", "db", "dx"][: size.results]
    operator = caffe2_pb2.OperatorDef(type=GRADIENT, input=list(shapes(size)), output=outputs)
    if way is None:
        return [operator]
    emitter = Emitter(trial.lone_loop([*operator.input, *outputs, "bias"]), operator, "dw")
    emit(emitter, operator, way, "bias" if size.has_bias else None)
    return emitter.operators


def shapes(size: Size) -> Dict[str, Shape]:
    return {"x": (size.rows, size.inner), "w": (size.outer, size.inner), "dy": (size.rows, size.outer)}


@trial.remembered
def _tried(size: Size) -> Dict[Optional[Apart], Seconds]:
    return trial.in_turn({way: functools.partial(subject, size, way) for way in ways(size)})


def subject(size: Size, way: Optional[Apart]) -> Subject:
    return Subject(operators(size, way), {**shapes(size), "bias": (size.outer,)})
