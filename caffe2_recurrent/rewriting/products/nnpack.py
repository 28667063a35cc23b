"""Products by NNPACK, an engine of Caffe2's convolution for the CPU.

MKL does not use AVX2 on processors of other makers. NNPACK does wherever it is there, by one thread; and its kernel for
convolutions of 1 x 1 takes tensors as they lie, so that in a step nothing is laid out and nothing copied back. The
image is the weights, the filters are the rows:

    Y[n, m] = sum over k of X[n, k] W[k, m]     image [1, K, 1, M],  filters [N, K, 1, 1],  result [1, N, 1, M]

Several matrices are as many images. A product over all steps, outside of the loop, is had likewise, of all rows.

Source: caffe2/contrib/nnpack/nnpack_ops.cc, caffe2/operators/conv_op_shared.cc; src/x86_64-fma/blas/conv1x1.py of
NNPACK.
"""

import functools

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.engine_blobs import CONVOLUTION_BUFFERS
from caffe2_recurrent.rewriting.products.convolved import add_bias, like_filters, result_of_convolution
from caffe2_recurrent.rewriting.products.onednn_copies import shape_of_result
from caffe2_recurrent.rewriting.products.product import LAST_TWO, Product
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.scratch_workspace import scratch_workspace

ENGINE = "NNPACK"
WORKSPACE = "caffe2_recurrent_nnpack"


@functools.lru_cache(maxsize=None)
def is_missing() -> bool:
    """Whether this Caffe2 was built without NNPACK, or cannot convolve with another number of filters later."""
    if not core.IsOperatorWithEngine("Conv", ENGINE):
        return True
    beside = caffe2_pb2.OperatorDef()
    net = caffe2_pb2.NetDef(name="convolution", external_input=["image", "filters"])
    net.op.extend([_by_nnpack(new_operator("Conv", ["image", "filters"], ["result"], beside, kernel=1))])
    with scratch_workspace(WORKSPACE):
        try:
            workspace.FeedBlob("image", np.ones((2, 4, 1, 5), dtype=np.float32))
            workspace.FeedBlob("filters", np.ones((2, 4, 1, 1), dtype=np.float32))
            workspace.CreateNet(net)
            workspace.RunNet(net.name)
            workspace.FeedBlob("filters", np.ones((3, 4, 1, 1), dtype=np.float32))
            workspace.RunNet(net.name)
        except RuntimeError:
            return True
        return bool((workspace.FetchBlob("result") != np.full((2, 3, 1, 5), 4.0)).any())


def is_by_nnpack(operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == "Conv" and operator.engine == ENGINE


def emit(emitter: Emitter, loop: Loop, product: Product) -> None:
    """The operators of the step in place of the product, and those before the loop that shape its weights.

    What convolutions need for themselves the steps share. Otherwise there would be one for each step, with a lock that
    the engine cannot show (`retrieve_step_blobs`); in the outer net it would be one for all loops, which wait for each
    other where a net runs them at once.
    """
    image, like = _image(loop, product), like_filters(loop, product)
    for outer in (image, like):
        loop.add_reference(outer)
    emitter.made += CONVOLUTION_BUFFERS
    filters = emitter.new("ResizeLike", [product.input, like], "filters")
    result = result_of_convolution(emitter, loop, product)
    emitter.add("Conv", [image, filters], result, kernel=1)
    _by_nnpack(emitter.operators[-1])
    emitter.add("Squeeze", [result], result, dims=[FEATURES])
    add_bias(emitter, product, result)


def lay_out(emitter: Emitter, weights: str) -> str:
    """W `[M, K]` as an image, in the outer net."""
    return emitter.new("ExpandDims", [emitter.new("Transpose", [weights], "columns")], "image", dims=[0, 2])


def emit_over_steps(emitter: Emitter, operator: caffe2_pb2.OperatorDef, image: str, inner: int, outer: int) -> None:
    """In place of an FC with weights `[outer, inner]` over some rows."""
    rows, _, bias = operator.input
    shape = shape_of_result(emitter, operator, outer)
    filters = emitter.reshaped(rows, "filters", [-1, inner, 1, 1])
    result = emitter.add("Conv", [image, filters], operator.output[0], kernel=1)
    _by_nnpack(emitter.operators[-1])
    emitter.reshape_in_place_like(result, shape)
    emitter.add("Add", [result, bias], result, broadcast=1)


def _by_nnpack(operator: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    operator.engine = ENGINE
    return operator


def _image(loop: Loop, product: Product) -> str:
    """W as an image."""
    columns = product.columns
    if columns is None:
        assert product.rows is not None
        axes = {"axes": LAST_TWO} if product.parts > 1 else {}
        columns = loop.add_before("Transpose", [product.rows], product.rows + "_transposed", **axes)
    return loop.add_before("ExpandDims", [columns], columns + "_image", dims=[2] if product.parts > 1 else [0, 2])
