"""FC and FCGradient over all steps as convolutions with kernels of 1 x 1, by oneDNN.

Where its inner products are slow its convolutions need not be: without AVX-512 some gradients of weights take less than
half the time. R rows of a product are filters, or the channels of an image:

    Y = [X, 1] [W, b]'      image [W, b]' as [1, K + 1, 1, M],  filters [X, 1] as [R, K + 1, 1, 1],  result [1, R, 1, M]
    [dW, db]' = [X, 1]' dY  image dY as [1, R, 1, M],  filters [X, 1]' as [K + 1, R, 1, 1],  result [1, K + 1, 1, M]
    dX = dY W               image W as [1, M, 1, K],  filters dY as [R, M, 1, 1],  result [1, R, 1, K]

Source: caffe2/ideep/operators/conv_op.cc.
"""

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn
from caffe2_recurrent.rewriting.products.onednn_copies import (
    as_rows,
    copy_back,
    copy_there,
    reshape_there,
    shape_of_result,
)


def emit_product(emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int, results: str) -> None:
    """In place of an FC with weights `[outer, inner]`; oneDNN has its result in the blob `results`."""
    rows, weights, bias = operator.input
    shape = shape_of_result(emitter, operator, outer)
    filters = copy_there(emitter, _with_ones(emitter, rows, inner), emitter.blob("filters"), [-1, inner + 1, 1, 1])
    column = emitter.new("ExpandDims", [bias], "bias_column", dims=[1])
    image = _transposed(emitter, emitter.concat([weights, column], "weights_and_bias", 1))
    reshape_there(emitter, image, [1, inner + 1, 1, outer])
    _convolve(emitter, image, filters, results)
    copy_back(emitter, results, operator.output[0], shape)


def emit_gradient(emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int, of_result: str) -> None:
    """In place of an FCGradient; `of_result` is oneDNN's blob of dY `[R, outer]`, and stays as it is."""
    rows, weights, _ = operator.input
    of_weights, of_bias, *of_rows = operator.output
    shape = emitter.new("Shape", [rows], "shape_of_rows") if of_rows else None
    filters = _transposed(emitter, _with_ones(emitter, rows, inner))
    reshape_there(emitter, filters, [inner + 1, -1, 1, 1])
    reshape_there(emitter, of_result, [1, -1, 1, outer])
    sums = _convolve(emitter, of_result, filters, emitter.blob("sums"))
    transposed = onednn.add(emitter, "Transpose", [sums], [emitter.blob("sums_transposed")], axes=[0, 3, 2, 1])
    copied = onednn.add(emitter, onednn.FROM, [transposed], [emitter.blob("copied")])
    emitter.reshape_in_place(copied, [outer, inner + 1])
    column = emitter.blob("bias_column")
    emitter.split_into(copied, [of_weights, column], axis=1, split=[inner, 1])
    emitter.add("Squeeze", [column], of_bias, dims=[1])
    for blob in of_rows:
        assert shape is not None
        reshape_there(emitter, of_result, [-1, outer, 1, 1])
        image = copy_there(emitter, weights, emitter.blob("weights"), [1, outer, 1, inner])
        copy_back(emitter, _convolve(emitter, image, of_result, emitter.blob("of_rows")), blob, shape)
    reshape_there(emitter, of_result, [-1, outer])


def _convolve(emitter: Emitter, image: str, filters: str, result: str) -> str:
    return onednn.add(emitter, "Conv", [image, filters], [result], kernel=1, training_mode=1)


def _transposed(emitter: Emitter, matrix: str) -> str:
    """In oneDNN's memory."""
    return onednn.transposed(emitter, copy_there(emitter, matrix, emitter.blob("plain")))


def _with_ones(emitter: Emitter, blob: str, width: int) -> str:
    """`blob` as rows of `width` elements, and a 1 behind each."""
    rows = as_rows(emitter, blob, width)
    return emitter.concat([rows, emitter.column_of_ones(rows, 1)], "with_ones", 1)
