"""The matrix products of an LSTM's pass and nothing else, each in the layout that is fastest: the limit.

A product C = A B can be had in many ways. A and B may be stored as they are or transposed, C may come out transposed
(C' = B' A'), and MatMul, FC and BatchMatMul do not lead to the same kernel. Where Caffe2 was built with oneDNN, which
it calls IDEEP, FC, FCGradient and Conv lead to others yet: as a convolution with kernels of 1 x 1, a product has one
operand for its image `[1, inner, 1, columns]`, laid out in blocks or with its channels last, and the other for its
filters `[rows, inner, 1, 1]`. NNPACK, an engine of the CPU's convolution, takes both as they lie.

An operand that a pass has in another layout than the fastest one counts as if it had it, and so does a result: there is
no time here for transposing, nor for copying to oneDNN's memory and back.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core

from layers import TRAINING, Shape, drawn
from timed_operators import FastestWays, Step, Task, Way, copied, has_onednn

WORKSPACE = "benchmark_products"
GATES = 4
NNPACK = "NNPACK"


class Product(NamedTuple):
    """`times` times, one after the other: [rows, inner] times [inner, columns]."""

    name: str
    times: int
    rows: int
    inner: int
    columns: int


# How operands may be stored; in 4: one matrix for each gate. FCGradient reads no more than the size of its weights.
STORED: Dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "A": lambda a, b: a,
    "A'": lambda a, b: a.T,
    "B": lambda a, b: b,
    "B'": lambda a, b: b.T,
    "B in 4": lambda a, b: _in_gates(b),
    "B' in 4": lambda a, b: _in_gates(b).transpose(0, 2, 1),
    "bias": lambda a, b: np.zeros(b.shape[1], np.float32),
    "bias for C'": lambda a, b: np.zeros(a.shape[0], np.float32),
    "weights": lambda a, b: np.zeros((a.shape[0], b.shape[1]), np.float32),
    "weights for C'": lambda a, b: np.zeros((b.shape[1], a.shape[0]), np.float32),
    "A as filters": lambda a, b: a[:, :, None, None],
    "B' as filters": lambda a, b: b.T[:, :, None, None],
    "A' as image": lambda a, b: a.T[None, :, None, :],
    "B as image": lambda a, b: b[None, :, None, :],
    "ones as filters": lambda a, b: np.ones((b.shape[0], 1, 1, 1), np.float32),
}


def _in_gates(b: np.ndarray) -> np.ndarray:
    inner, columns = b.shape
    return b.reshape(inner, GATES, columns // GATES).transpose(1, 0, 2)


def products(shape: Shape, pass_: str) -> List[Product]:
    """Of forward, and for training of backward to all parameters and the input."""
    steps, batch, dim_in, dim = shape
    gates, rows = GATES * dim, steps * batch
    forward = [
        Product("input", 1, rows, dim_in, gates),
        Product("recurrent", steps, batch, dim, gates),
    ]
    backward = [
        Product("gradient of the state", steps, batch, gates, dim),
        Product("gradient of the recurrent weights", 1, gates, rows, dim),
        Product("gradient of the input weights", 1, gates, rows, dim_in),
        Product("gradient of the input", 1, rows, gates, dim_in),
    ]
    return forward + (backward if pass_ == TRAINING else [])


def layouts(product: Product) -> List[Way]:
    found = [
        _plain("FC(A, B')", "FC", ("A", "B'", "bias")),
        _plain("FCTransposed(A, B)", "FCTransposed", ("A", "B", "bias")),
    ]
    for a, a_transposed in (("A", 0), ("A'", 1)):
        for b, b_transposed in (("B", 0), ("B'", 1)):
            found += [
                _plain(
                    "MatMul({}, {})".format(a, b),
                    "MatMul",
                    (a, b),
                    trans_a=a_transposed,
                    trans_b=b_transposed,
                ),
                _plain(
                    "MatMul({}, {}) for C'".format(b, a),
                    "MatMul",
                    (b, a),
                    trans_a=1 - b_transposed,
                    trans_b=1 - a_transposed,
                ),
            ]
    if product.columns % GATES == 0:
        found += [
            _plain("BatchMatMul(A, B in 4)", "BatchMatMul", ("A", "B in 4"), broadcast=1),
            _plain("BatchMatMul(A, B' in 4)", "BatchMatMul", ("A", "B' in 4"), broadcast=1, trans_b=1),
        ]
    if core.IsOperatorWithEngine("Conv", NNPACK):
        found += [
            _by_nnpack("Conv(B as image, A as filters)", ("B as image", "A as filters")),
            _by_nnpack("Conv(A' as image, B' as filters) for C'", ("A' as image", "B' as filters")),
        ]
    if has_onednn():
        found += _layouts_of_onednn(product)
    return found


def _plain(name: str, operator: str, operands: Tuple[str, ...], **arguments: int) -> Way:
    return Way(name, Step(operator, operands, ("C",), arguments))


def _by_nnpack(name: str, operands: Tuple[str, ...]) -> Way:
    return Way(NNPACK + " " + name, Step("Conv", operands, ("C as image",), {"kernel": 1}, engine=NNPACK))


def _layouts_of_onednn(product: Product) -> List[Way]:
    """As in training, where FC and Conv keep nothing of their weights from one run to the next, and kept."""
    return [
        _on_onednn("FC(A, kept B')", "FC", ("A", "B'", "bias")),
        _on_onednn("FC(B', kept A) for C'", "FC", ("B'", "A", "bias for C'")),
        _on_onednn("FC(A, B')", "FC", ("A", "B'", "bias"), training_mode=1),
        _on_onednn("FC(B', A) for C'", "FC", ("B'", "A", "bias for C'"), training_mode=1),
        # C as the gradient of weights: of dY and X it is dY' X. That of the bias comes with it.
        _on_onednn("FCGradient(B, A')", "FCGradient", ("B", "weights", "A'")),
        _on_onednn("FCGradient(A', B) for C'", "FCGradient", ("A'", "weights for C'", "B")),
        _as_convolution("Conv(B as image in blocks, A as filters)", product, "B as image", "A as filters"),
        _as_convolution("Conv(A' as image in blocks, B' as filters) for C'", product, "A' as image", "B' as filters"),
        _over_rows("Conv(A in rows, kept B' as filters)", "A' as image", "B' as filters"),
        _over_rows("Conv(B' in rows, kept A as filters) for C'", "B as image", "A as filters"),
    ]


def _on_onednn(name: str, operator: str, operands: Tuple[str, ...], **arguments: int) -> Way:
    """Over operands as they are copied to oneDNN's memory."""
    copies = tuple(copied(operand) for operand in operands)
    return _timed_on_onednn(name, operator, copies, copies, arguments)


def _as_convolution(name: str, product: Product, image: str, filters: str) -> Way:
    """A convolution of each channel with a 1 leaves the image as it is, but in blocks."""
    copies = tuple(copied(operand) for operand in (image, "ones as filters", filters))
    arguments = {"kernel": 1, "training_mode": 1}
    operands = copies[0].results + copies[1].results
    in_blocks = Step("Conv", operands, (image + " in blocks",), dict(arguments, group=product.inner), caffe2_pb2.IDEEP)
    return _timed_on_onednn(name, "Conv", (*copies, in_blocks), (in_blocks, copies[2]), arguments)


def _over_rows(name: str, image: str, filters: str) -> Way:
    """A convolution over an image whose channels come last, which is the rows as they lie; so is its result."""
    copies = tuple(copied(operand) for operand in (image, filters))
    in_rows = Step("NCHW2NHWC", copies[0].results, (image + " in rows",), {}, caffe2_pb2.IDEEP)
    return _timed_on_onednn(name, "Conv", (*copies, in_rows), (in_rows, copies[1]), {"kernel": 1})


def _timed_on_onednn(
    name: str, operator: str, prepared: Tuple[Step, ...], operands: Tuple[Step, ...], arguments: Dict[str, Any]
) -> Way:
    """Over the results of `operands`. C has a blob of its own: another layout's may be laid out in another way."""
    made = tuple(step.results[0] for step in operands)
    results = tuple(role + " of " + name for role in ("C", "gradient of the bias"))
    timed = Step(operator, made, results if operator == "FCGradient" else results[:1], arguments, caffe2_pb2.IDEEP)
    return Way("oneDNN " + name, timed, prepared)


def _task(product: Product) -> Task:
    a = drawn("a", (product.rows, product.inner), 1.0)
    b = drawn("b", (product.inner, product.columns), 1.0)
    return Task(product.name, product.times, layouts(product), lambda operand: STORED[operand](a, b))


class Products:
    """The products of a pass, until `close`; `run` is the sum of the fastest of each."""

    def __init__(self, shape: Shape, pass_: str) -> None:
        self._ways = FastestWays(WORKSPACE, [_task(product) for product in products(shape, pass_)])

    def run(self, repeats: int) -> float:
        return sum(self._ways.time(repeats).values())

    def best(self) -> Dict[str, Tuple[str, float]]:
        """For each product its fastest layout, and the seconds of all its repetitions in a pass."""
        return self._ways.best()

    def close(self) -> None:
        self._ways.close()
