"""FC and FCGradient over all steps as convolutions with kernels of 1 x 1, by oneDNN.

Where its inner products are slow its convolutions need not be: without AVX-512 some gradients of weights take less than
half the time. R rows of a product are filters, or the channels of an image (`IN_BLOCKS`):

    Y = [X, 1] [W, b]'      image [W, b]' as [1, K + 1, 1, M],  filters [X, 1] as [R, K + 1, 1, 1],  result [1, R, 1, M]
    [dW, db]' = [X, 1]' dY  image dY as [1, R, 1, M],  filters [X, 1]' as [K + 1, R, 1, 1],  result [1, K + 1, 1, M]
    dX = dY W               image W as [1, M, 1, K],  filters dY as [R, M, 1, 1],  result [1, R, 1, K]

A gradient of weights may be a transposed convolution too, whose filters say by the first of their dimensions what they
read, and by the second what they make: of dY (`TRANSPOSED`), so that nothing has to be transposed, or of the rows
(`ROWS_TRANSPOSED`), so that these need not be.

    [dW, db] = dY' [X, 1]   image [X, 1] as [1, R, 1, K + 1],  filters dY as [R, M, 1, 1],  result [1, M, 1, K + 1]
    [dW, db]' = [X, 1]' dY  image dY as [1, R, 1, M],  filters [X, 1] as [R, K + 1, 1, 1],  result [1, K + 1, 1, M]

Or they are an image whose channels come last, which is how they lie (`IN_ROWS`), and so is the result:

    Y = X W' + b            image [1, K, 1, R],  filters W as [M, K, 1, 1],  bias b,  result [1, M, 1, R]

No operator says of rows that they are such an image. So one is made, of rows that hold nothing, by a convolution of one
channel, and then gets the memory of an operator's result that ran for the CPU: a copy of X.

On processors with AVX-512 the order of filters of products in rows depends on the number of OpenMP's threads, and
oneDNN takes a plan for another number than it lays them out for, as `kept_filters.py` says. So there they need the
caller's promise that the number stays, but for what `thread_numbers.py` is about; and so do transposed convolutions, of
which nothing is known there.

Source: caffe2/ideep/operators/conv_op.cc, conv_transpose_op.cc, order_switch_ops.cc, operator_fallback_ideep.h; for a
source whose channels come last, convolution_forward in ideep's operators/conv.hpp asks for such a result, too.
"""

import contextlib
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.engine_blobs import ON_CPU
from caffe2_recurrent.rewriting.products import onednn, thread_numbers
from caffe2_recurrent.rewriting.products.gradient import Gradient, Rows
from caffe2_recurrent.rewriting.products.onednn_copies import (
    as_rows,
    copy_back,
    copy_there,
    reshape_there,
    shape_of_result,
)
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.scratch_workspace import scratch_workspace

IN_BLOCKS, IN_ROWS = "in blocks", "in rows"
TRANSPOSED, ROWS_TRANSPOSED = "transposed", "rows transposed"
WORKSPACE = "caffe2_recurrent_onednn_convolutions"
# Numbers of rows: as many as fill the blocks of kernels, and not.
ROWS = (1, 2, 17, 400)


def keeps_plans(loop: Loop) -> bool:
    """Whether products around the loop may depend on the number of threads, which stays."""
    return Keeping.PLANS in loop.may_keep


@trial.known
def rows_stay_where_they_lie(inner: int, outer: int) -> bool:
    """Whether this Caffe2 has a product `IN_ROWS` with weights `[outer, inner]`, right for any number of rows."""
    operator = caffe2_pb2.OperatorDef(type="FC", input=["x", "w", "b"], output=["y"])
    emitter = Emitter(trial.lone_loop([*operator.input, *operator.output]), operator, "y")
    emit_product_in_rows(emitter, operator, inner, outer, "results")
    shapes = {"x": (None, inner), "w": (outer, inner), "b": (outer,)}
    return _are_right(emitter.operators, shapes, lambda x, w, b: {"y": x @ w.T + b})


@trial.known
def transposed_are_right() -> bool:
    """Whether this Caffe2 has gradients by transposed convolutions, right for any number of rows."""
    inner, outer = 5, 19
    operator = caffe2_pb2.OperatorDef(type="FCGradient", input=["x", "w", "dy"], output=["dw", "db", "dx"])
    shapes = {"x": (None, inner), "w": (outer, inner), "dy": (None, outer)}
    for emit in (emit_gradient_transposed, emit_gradient_of_filters):
        emitter = Emitter(trial.lone_loop([*operator.input, *operator.output]), operator, "dw")
        emit(emitter, Gradient.of(operator, inner, outer), copy_there(emitter, "dy", emitter.blob("results")))
        if not _are_right(
            emitter.operators, shapes, lambda x, w, dy: {"dw": dy.T @ x, "db": dy.sum(axis=0), "dx": dy @ w}
        ):
            return False
    return True


def _are_right(
    operators: List[caffe2_pb2.OperatorDef],
    shapes: Mapping[str, Tuple[Optional[int], ...]],
    expected: Callable[..., Dict[str, np.ndarray]],
) -> bool:
    """Whether operators make what is expected of such blobs; None is a number of rows, another one in each run."""
    net = caffe2_pb2.NetDef(name="tried", op=operators)
    random = np.random.default_rng(0)
    with scratch_workspace(WORKSPACE), contextlib.suppress(RuntimeError):
        for run, rows in enumerate(ROWS):
            sizes = [tuple(rows if size is None else size for size in shape) for shape in shapes.values()]
            # Of whole numbers, so that products are exact whatever is added up first.
            values = [random.integers(-8, 9, shape).astype(np.float32) for shape in sizes]
            for blob, value in zip(shapes, values):
                workspace.FeedBlob(blob, value)
            if run == 0:
                workspace.CreateNet(net)
            workspace.RunNet(net.name)
            results = expected(*values)
            if not all(np.array_equal(workspace.FetchBlob(blob), results[blob]) for blob in results):
                return False
        return True
    return False


def emit_product(emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int, results: str) -> None:
    """In place of an FC with weights `[outer, inner]`; oneDNN has its result in the blob `results`."""
    rows, weights, bias = operator.input
    shape = shape_of_result(emitter, operator, outer)
    with_ones = _with_ones(emitter, [Rows(rows, inner)])
    filters = copy_there(emitter, with_ones, emitter.blob("filters"), [-1, inner + 1, 1, 1])
    column = emitter.new("ExpandDims", [bias], "bias_column", dims=[1])
    image = _transposed(emitter, emitter.concat([weights, column], "weights_and_bias", 1))
    reshape_there(emitter, image, [1, inner + 1, 1, outer])
    _convolve(emitter, image, filters, results)
    copy_back(emitter, results, operator.output[0], shape)


def emit_product_in_rows(
    emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int, results: str
) -> None:
    """The same, over rows where they lie."""
    rows, weights, bias = operator.input
    emitter.operators += thread_numbers.set_at_once(emitter.blob("number"))
    shape = shape_of_result(emitter, operator, outer)
    filters = copy_there(emitter, weights, emitter.blob("filters"), [outer, inner, 1, 1])
    bias_there = copy_there(emitter, bias, emitter.blob("bias"))
    image = _image_of_rows(emitter, as_rows(emitter, rows, inner), inner)
    onednn.add(emitter, "Conv", [image, filters, bias_there], [results], kernel=1, training_mode=1)
    # They are in order as they lie.
    copy_back(emitter, results, operator.output[0], shape)


def _image_of_rows(emitter: Emitter, rows: str, width: int) -> str:
    """`rows` `[R, width]`, copied, as an image `[1, width, 1, R]` whose channels come last."""
    leading = emitter.new("GivenTensorInt64Fill", [], "one_channel", shape=[3], values=[1, 1, 1])
    shape = emitter.concat([leading, emitter.new("Shape", [rows], "number_of_rows", axes=[0])], "shape_of_channel", 0)
    channel = emitter.new("ConstantFill", [shape], "channel", input_as_shape=1, value=0.0)
    first = copy_there(emitter, channel, emitter.blob("channel_first"))
    last = onednn.add(emitter, onednn.CHANNELS_LAST, [first], [emitter.blob("channel_last")])
    wide = emitter.new("ConstantFill", [], "width", shape=[width, 1, 1, 1], value=0.0)
    image = _convolve(emitter, last, copy_there(emitter, wide, emitter.blob("width_there")), emitter.blob("image"))
    emitter.reshape_in_place(rows, [1, width, 1, -1])
    # Its memory has an operator that others see, so that it is freed.
    emitter.add("ConstantFill", [], ON_CPU.format(image, "ResizeLike"), shape=[1], value=0.0)
    return onednn.add(emitter, "ResizeLike", [rows, rows], [image])


def emit_gradient(emitter: Emitter, gradient: Gradient, of_result: str) -> None:
    """In place of an FCGradient; `of_result` is oneDNN's blob of dY `[R, outer]`, and stays as it is."""
    filters = _transposed(emitter, _with_ones(emitter, gradient.rows))
    reshape_there(emitter, filters, [gradient.inner + 1, -1, 1, 1])
    _emit_gradient_of_image("Conv", emitter, gradient, filters, of_result)


def emit_gradient_of_filters(emitter: Emitter, gradient: Gradient, of_result: str) -> None:
    """The same with `ROWS_TRANSPOSED`."""
    emitter.operators += thread_numbers.set_at_once(emitter.blob("number"))
    rows = _with_ones(emitter, gradient.rows)
    filters = copy_there(emitter, rows, emitter.blob("filters"), [-1, gradient.inner + 1, 1, 1])
    _emit_gradient_of_image("ConvTranspose", emitter, gradient, filters, of_result)


def _emit_gradient_of_image(kind: str, emitter: Emitter, gradient: Gradient, filters: str, of_result: str) -> None:
    reshape_there(emitter, of_result, [1, -1, 1, gradient.outer])
    sums = _convolve(emitter, of_result, filters, emitter.blob("sums"), kind)
    transposed = onednn.add(emitter, "Transpose", [sums], [emitter.blob("sums_transposed")], axes=[0, 3, 2, 1])
    _take_apart(emitter, transposed, gradient)
    emit_gradient_of_rows(emitter, gradient, of_result)


def emit_gradient_transposed(emitter: Emitter, gradient: Gradient, of_result: str) -> None:
    """The same where it is `TRANSPOSED`."""
    emitter.operators += thread_numbers.set_at_once(emitter.blob("number"))
    rows = _with_ones(emitter, gradient.rows)
    image = copy_there(emitter, rows, emitter.blob("image"), [1, -1, 1, gradient.inner + 1])
    reshape_there(emitter, of_result, [-1, gradient.outer, 1, 1])
    sums = _convolve(emitter, image, of_result, emitter.blob("sums"), "ConvTranspose")
    _take_apart(emitter, sums, gradient)
    emit_gradient_of_rows(emitter, gradient, of_result)


def _take_apart(emitter: Emitter, sums: str, gradient: Gradient) -> None:
    """The gradients of the weights and of the bias from oneDNN's `[dW, db]`."""
    copied = onednn.add(emitter, onednn.FROM, [sums], [emitter.blob("copied")])
    emitter.reshape_in_place(copied, [gradient.outer, gradient.inner + 1])
    column = emitter.blob("bias_column")
    emitter.split_into(copied, [*gradient.of_weights, column], axis=1, split=[*gradient.widths, 1])
    emitter.add("Squeeze", [column], gradient.of_bias, dims=[1])


def emit_gradient_of_rows(emitter: Emitter, gradient: Gradient, of_result: str) -> None:
    """dX, if it is asked for; `of_result`, oneDNN's blob of dY, is rows again then."""
    if gradient.of_rows is not None:
        ((rows, width),) = gradient.rows
        assert gradient.weights is not None
        shape = emitter.new("Shape", [rows], "shape_of_rows")
        reshape_there(emitter, of_result, [-1, gradient.outer, 1, 1])
        image = copy_there(emitter, gradient.weights, emitter.blob("weights"), [1, gradient.outer, 1, width])
        copy_back(emitter, _convolve(emitter, image, of_result, emitter.blob("of_rows")), gradient.of_rows, shape)
    reshape_there(emitter, of_result, [-1, gradient.outer])


def _convolve(emitter: Emitter, image: str, filters: str, result: str, kind: str = "Conv") -> str:
    return onednn.add(emitter, kind, [image, filters], [result], kernel=1, training_mode=1)


def _transposed(emitter: Emitter, matrix: str) -> str:
    """In oneDNN's memory."""
    return onednn.transposed(emitter, copy_there(emitter, matrix, emitter.blob("plain")))


def _with_ones(emitter: Emitter, rows: Sequence[Rows]) -> str:
    """Rows beside each other, and a 1 behind each."""
    beside = [as_rows(emitter, blob, width) for blob, width in rows]
    return emitter.concat([*beside, emitter.column_of_ones(beside[0], 1)], "with_ones", 1)
