"""Whether oneDNN or NNPACK keeps a product's rows apart: where one holds no number, the others are as they would be.

Sequences that have ended may hold anything. Some kernels read on behind the end of a row and multiply what is there
by 0: the inner products of Caffe2 in torch 1.7 do with few features, a convolution of one channel does in 1.10.
"""

from typing import Callable, List

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import set_arguments
from caffe2_recurrent.rewriting.products import kept_filters, onednn_over_steps, product_ways
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import results

# As many as fill the blocks of kernels, and do not.
ROWS = (2, 3, 17, 33)

Operators = List[caffe2_pb2.OperatorDef]


@trial.known
def in_steps(way: str, inner: int, outer: int, parts: int = 1) -> bool:
    """In a product of a step, `[1, N, inner]` times weights of `outer` columns, in a way of `product_ways`.

    With `parts`, times as many matrices.
    """

    def operators(loop: Loop, operator: caffe2_pb2.OperatorDef, rows: int) -> Operators:
        bias = "b" if parts == 1 else None
        product = Product("x", None, "w", bias, "y", rows, inner, outer, parts=parts)
        step = product_ways.emit(way, loop, product, operator).operators
        return [*loop.before, *kept_filters.in_place(loop, step, ["y"])]

    return _stay_apart(operators, (outer, inner) if parts == 1 else (parts, outer, inner))


@trial.known
def over_steps(layout: Layout) -> bool:
    """In a product over all steps."""

    def operators(loop: Loop, operator: caffe2_pb2.OperatorDef, rows: int) -> Operators:
        return onednn_over_steps.in_a_net(loop, operator, layout, layout)

    return _stay_apart(operators, (layout.outer, layout.inner))


def why_not(inner: int, outer: int) -> str:
    """The reason of a rule that refuses."""
    return "in oneDNN's products with [{}, {}] what is no number would spread to other rows".format(inner, outer)


def _stay_apart(operators: Callable[[Loop, caffe2_pb2.OperatorDef, int], Operators], weights: Shape) -> bool:
    operator = caffe2_pb2.OperatorDef(type="FC", input=["x", "w", "b"], output=["y"])
    set_arguments(operator, {"axis": FEATURES})
    *_, outer, inner = weights
    given = {"w": np.ones(weights, np.float32), "b": np.zeros(outer, np.float32)}
    for rows in ROWS:
        made = operators(trial.lone_loop([*operator.input, *operator.output]), operator, rows)
        # Every other row.
        x = np.ones((2, 1, rows, inner), np.float32)
        x[0, :, 0::2] = x[1, :, 1::2] = np.nan
        found = results(made, [{"x": of_run, **given} for of_run in x], "y")
        if not all(np.isfinite(found[first][:, 1 - first :: 2]).all() for first in (0, 1)):
            return False
    return True
