"""How large the blobs of a step are, as far as it is known: `[1, N, k]` has width k."""

from functools import reduce
from operator import mul
from typing import Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.rewriting import dataflow
from caffe2_recurrent.rewriting.rows import BINARY, ELEMENTWISE, FEATURES
from caffe2_recurrent.sizes import Sizes


def width(loop: Loop, sizes: Sizes, blob: str, before: Optional[int] = None) -> Optional[int]:
    """The width of `blob` as the operator of the forward step at position `before` sees it; None if not known."""
    position = dataflow.writer(loop.operators, blob, before)
    if position is None:
        # A link leads to an outer blob, a reference is one.
        link = loop.link(blob)
        return sizes.state_size(loop, blob) or _last(sizes, blob if link is None else link.outer)
    operator = loop.operators[position]
    if operator.type in ("FC", "FCTransposed"):
        return _last(sizes, operator.input[2])
    widths = {width(loop, sizes, read, position) for read in operator.input}
    known = widths - {None}
    if len(known) != 1:
        return None
    if operator.type == "Split":
        return _share(operator, known.pop())
    if operator.type in BINARY:
        # The second may be broadcast: a width says something only if both are known.
        return None if None in widths else known.pop()
    return known.pop() if operator.type in ELEMENTWISE else None


def elements(loop: Loop, sizes: Sizes, blob: str, before: Optional[int] = None) -> Optional[int]:
    """At least how many elements `blob` has, as the operator at position `before` sees it; None if not known."""
    position = dataflow.writer(loop.operators, blob, before)
    shape = sizes.shape(blob) if position is None and loop.link(blob) is None else None
    if shape is not None:
        return reduce(mul, shape, 1)
    own, batch = width(loop, sizes, blob, before), sizes.batch(loop)
    bounds = [own * batch] if own is not None and batch is not None else []
    if position is not None and loop.operators[position].type in ELEMENTWISE | BINARY:
        # The result of a broadcast is at least as large as what goes in.
        found = [elements(loop, sizes, read, position) for read in loop.operators[position].input]
        bounds += [bound for bound in found if bound is not None]
    return max(bounds) if bounds else None


def _share(operator: caffe2_pb2.OperatorDef, whole: Optional[int]) -> Optional[int]:
    """The width of each output of a Split into equal parts."""
    equal = len(operator.input) == 1 and argument(operator, "split") is None
    if not equal or whole is None or integer(operator, "axis", 0) != FEATURES:
        return None
    return whole // len(operator.output)


def _last(sizes: Sizes, outer: str) -> Optional[int]:
    shape = sizes.shape(outer)
    return shape[-1] if shape else None
