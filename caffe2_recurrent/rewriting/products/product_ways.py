"""Ways to have a product of a step other than MKL's: three of oneDNN (`onednn.py`, `kept_filters.py`), and NNPACK
(`nnpack.py`)."""

from typing import List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import kept_filters, nnpack, onednn
from caffe2_recurrent.rewriting.products.product import Product

NNPACK = nnpack.ENGINE
KEPT_FILTERS = kept_filters.KEPT_FILTERS


def ways_of(parts: int, may_keep: bool = False) -> List[str]:
    """Those that this Caffe2 has for a product with so many matrices. `may_keep`: operators of steps may, filters."""
    found = onednn.ways_of(parts) if onednn.why_not() is None else []
    if found and may_keep and parts == 1:
        found.append(KEPT_FILTERS)
    return found + ([] if nnpack.is_missing() else [NNPACK])


def why_none() -> str:
    """Why there is no way for any product."""
    if onednn.is_missing():
        return "this Caffe2 has neither oneDNN nor NNPACK"
    return "this Caffe2 has no NNPACK, and {}".format(onednn.why_not())


def is_by_onednn(way: str) -> bool:
    return way in (*onednn.WAYS, KEPT_FILTERS)


def lays_out_bias(way: str) -> bool:
    """Whether it does so before the loop, and so cannot do with a bias that the step computes."""
    return way in (onednn.INNER_PRODUCT, KEPT_FILTERS)


def emit(way: str, loop: Loop, product: Product, beside: caffe2_pb2.OperatorDef) -> Emitter:
    """The operators of the step in place of the product, and those before the loop that lay out its weights."""
    emitter = Emitter(loop, beside, product.output)
    if way == NNPACK:
        nnpack.emit(emitter, loop, product)
    elif way == KEPT_FILTERS:
        kept_filters.emit(emitter, loop, product)
    else:
        onednn.emit(way, emitter, loop, product)
    return emitter
