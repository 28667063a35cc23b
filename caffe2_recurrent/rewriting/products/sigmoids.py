"""Sigmoids of products that oneDNN makes, taken while the product is there; whether that is faster is tried out."""

import functools
from typing import Dict, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import as_bytes, is_on_onednn
from caffe2_recurrent.rewriting.emit import is_aten
from caffe2_recurrent.rewriting.products import onednn, product_ways
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.products.step_subject import subject_of
from caffe2_recurrent.rewriting.steps.sole_readers import Operators, drop_reader, sole_reader
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

SIGMOID = "Sigmoid"
# Columns of the rows in a trial: few, so that it is not the product that is timed.
INNER = 16


def with_sigmoid(way: str, loop: Loop, operators: Operators, position: int, product: Product) -> Product:
    """The product at `position`, that the step gets in one of these ways, with its sigmoid if that pays.

    The operator that takes it so far is gone then.
    """
    found = sigmoid_of(loop, operators, position) if product_ways.is_by_onednn(way) else None
    if found is None or product.batch is None or (way == onednn.CONVOLUTION and product.bias is not None):
        return product
    if not _is_faster_there(way, operators[found], product.batch, product.outer, product.parts):
        return product
    (sigmoid,) = drop_reader(loop, operators, position, found).output
    return product._replace(sigmoid=sigmoid)


def sigmoid_of(loop: Loop, operators: Operators, position: int) -> Optional[int]:
    """Where the sigmoid of the result at `position` is taken, if that is all that happens to it."""
    found = sole_reader(loop, operators, position)
    if found is None or is_on_onednn(operators[found]):
        return None
    is_sigmoid = operators[found].type == SIGMOID or is_aten(operators[found], "sigmoid")
    return found if is_sigmoid else None


def _is_faster_there(way: str, operator: caffe2_pb2.OperatorDef, rows: int, columns: int, parts: int) -> bool:
    found: Dict[bool, Seconds] = _tried(way, as_bytes(operator, ["y"], ["s"]), rows, columns, parts)
    return found[True].step < found[False].step


@trial.remembered
def _tried(way: str, operator: bytes, rows: int, columns: int, parts: int) -> Dict[bool, Seconds]:
    subject = functools.partial(_subject, way, operator, rows, columns, parts)
    return trial.in_turn({there: functools.partial(subject, there) for there in (False, True)})


def _subject(way: str, operator: bytes, rows: int, columns: int, parts: int, there: bool) -> Subject:
    """A small product with its sigmoid, taken by `operator` or by oneDNN."""
    taking = caffe2_pb2.OperatorDef.FromString(operator)
    product = Product("x", "w", None, None, "y", rows, INNER, columns, "s" if there else None, parts=parts)
    loop = trial.lone_loop(["x", "w", "y", "s"])
    step = product_ways.emit(way, loop, product, loop.forward).operators + ([] if there else [taking])
    weights = (INNER, columns) if parts == 1 else (parts, INNER, columns)
    return subject_of(loop, step, {"x": (1, rows, INNER), "w": weights})
