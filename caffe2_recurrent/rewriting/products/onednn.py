"""Products by oneDNN, which Caffe2 calls IDEEP: a device whose tensors lie in memory as oneDNN likes them.

MKL lays out the weights anew for each product, and on processors of other makers takes slower products at that.
oneDNN takes weights as they come (`INNER_PRODUCT`), or blocked, once for all steps (`CONVOLUTION`). For the second the
product is written as a convolution with kernels of 1 x 1 whose image is the weights and whose filters are the rows:

    Y[n, m] = sum over k of X[n, k] W[k, m]     image [1, K, 1, M],  filters [N, K, 1, 1],  result [1, N, 1, M]

Several matrices are as many images. A convolution of each channel with a 1 leaves an image as it is, but blocked.

Source: caffe2/ideep/operators/fully_connected_op.cc, conv_op.cc, utility_ops.cc. Both operators keep what they made of
their weights in the first run unless told that this is training, and would not see that an optimizer changed them.
"""

import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent import openmp_settings
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import new_operator, read_before_written
from caffe2_recurrent.rewriting.elementwise import only_floats
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.engine_blobs import ON_CPU
from caffe2_recurrent.rewriting.products.convolved import add_bias, like_filters, result_of_convolution
from caffe2_recurrent.rewriting.products.product import LAST_TWO, Product
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import threads
from caffe2_recurrent.scratch_workspace import scratch_workspace

INNER_PRODUCT, CONVOLUTION = "inner product", "convolution"
WAYS = (INNER_PRODUCT, CONVOLUTION)
TO, FROM = "CopyCPUToIDEEP", "CopyIDEEPToCPU"
CHANNELS_LAST = "NCHW2NHWC"
FREE = "Free"
WORKSPACE = "caffe2_recurrent_onednn"


def why_not() -> Optional[str]:
    """Why nothing may be had by oneDNN here; None if it may."""
    if is_missing():
        return "this Caffe2 has no oneDNN"
    withholding = openmp_settings.that_withhold_threads(told=threads.of_openmp())
    return None if withholding is None else "oneDNN would plan for threads that it does not get: " + withholding


@functools.lru_cache(maxsize=None)
def is_missing() -> bool:
    """Whether this Caffe2 was built without oneDNN."""
    if not getattr(workspace.C, "use_mkldnn", False):
        return True
    with scratch_workspace(WORKSPACE):
        try:
            workspace.FeedBlob("blob", np.zeros(1, dtype=np.float32))
            workspace.RunOperatorOnce(on_onednn(caffe2_pb2.OperatorDef(type=TO, input=["blob"], output=["laid out"])))
        except RuntimeError:
            return True
    return False


@functools.lru_cache(maxsize=None)
def ways() -> Tuple[str, ...]:
    """The ways that this Caffe2 can go: those before torch 1.7 cannot convolve with another number of filters later."""
    net = caffe2_pb2.NetDef(name="convolution", external_input=["image", "filters"])
    for kind, inputs, output, arguments in (
        (TO, ["filters"], "filters laid out", {}),
        (TO, ["image"], "image laid out", {}),
        ("Conv", ["image laid out", "filters laid out"], "convolved", {"kernel": 1, "training_mode": 1}),
        (FROM, ["convolved"], "result", {}),
    ):
        net.op.extend([on_onednn(new_operator(kind, inputs, [output], caffe2_pb2.OperatorDef(), **arguments))])
    with scratch_workspace(WORKSPACE):
        workspace.FeedBlob("image", np.ones((1, 4, 1, 5), dtype=np.float32))
        workspace.FeedBlob("filters", np.ones((2, 4, 1, 1), dtype=np.float32))
        workspace.CreateNet(net)
        try:
            workspace.RunNet(net.name)
            workspace.FeedBlob("filters", np.ones((3, 4, 1, 1), dtype=np.float32))
            workspace.RunNet(net.name)
        except RuntimeError:
            return (INNER_PRODUCT,)
    return WAYS


def ways_of(parts: int) -> List[str]:
    """Those to have a product with so many matrices."""
    return [way for way in ways() if parts == 1 or way == CONVOLUTION]


def adds(way: str) -> bool:
    """Whether products of this way can be added to something where they are, with a result for the CPU."""
    return way == INNER_PRODUCT and _adds()


@functools.lru_cache(maxsize=None)
def _adds() -> bool:
    net = caffe2_pb2.NetDef(name="sum", external_input=["addend", "row"])
    net.op.extend(
        [
            on_onednn(new_operator(TO, ["row"], ["product"], caffe2_pb2.OperatorDef())),
            on_onednn(new_operator("Add", ["addend", "product"], ["sum"], caffe2_pb2.OperatorDef())),
            # Of the CPU.
            new_operator("Copy", ["sum"], ["result"], caffe2_pb2.OperatorDef()),
        ]
    )
    with scratch_workspace(WORKSPACE):
        workspace.FeedBlob("addend", np.ones((1, 2, 3), dtype=np.float32))
        workspace.FeedBlob("row", np.ones((2, 3), dtype=np.float32))
        try:
            workspace.CreateNet(net)
            workspace.RunNet(net.name)
        except RuntimeError:
            return False
        return workspace.FetchBlob("result").shape == (1, 2, 3)


def on_onednn(operator: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    """The operator, as one of oneDNN."""
    operator.device_option.device_type = caffe2_pb2.IDEEP
    return operator


def in_a_net(
    operators: Sequence[caffe2_pb2.OperatorDef],
    results: Sequence[str],
    loop: Loop,
    kept: Sequence[str] = (),
    spent: Sequence[str] = (),
    otherwise: Sequence[caffe2_pb2.OperatorDef] = (),
    called: str = "onednn",
) -> List[caffe2_pb2.OperatorDef]:
    """Operators for the outer net that run `operators` in a net inside of an If, `called` so.

    What is neither a result nor to be kept is freed again, and so are the inputs that are `spent` then. Where the first
    input of the first of `otherwise` is empty, as it is without steps, these operators run instead.

    As they are, a net of type async_scheduling crashes: it has no threads for operators of this device.
    """
    read = dict.fromkeys(read_before_written(operators))
    written = dict.fromkeys(blob for operator in operators for blob in operator.output)
    scratch = list(dict.fromkeys([*spent, *(blob for blob in written if blob not in results and blob not in kept)]))
    freeing = [new_operator(FREE, scratch, scratch, loop.forward)] if scratch else []
    inner = caffe2_pb2.NetDef(name=called, type="simple", op=[*operators, *freeing], external_output=results)
    inner.external_input.extend(read)
    nets = {"then_net": inner}
    if not otherwise:
        condition = loop.new_blob(called + "_always")
        before = [_filled(condition, loop, core.DataType.BOOL, True, [1])]
    else:
        condition, elements, none = (loop.new_blob(called + name) for name in ("_has_rows", "_elements", "_none"))
        before = [
            new_operator("Size", otherwise[0].input[:1], [elements], loop.forward),
            # Without dimensions, as what Size makes.
            _filled(none, loop, core.DataType.INT64, 0, []),
            new_operator("GT", [elements, none], [condition], loop.forward),
        ]
        read_instead = dict.fromkeys(blob for operator in otherwise for blob in operator.input)
        read.update(read_instead)
        nets["else_net"] = caffe2_pb2.NetDef(name="without_rows", type="simple", op=otherwise)
        nets["else_net"].external_input.extend(read_instead)
        nets["else_net"].external_output.extend(blob for operator in otherwise for blob in operator.output)
    return [*before, new_operator("If", [condition, *read], results, loop.forward, **nets)]


def _filled(blob: str, loop: Loop, kind: int, value: Any, shape: List[int]) -> caffe2_pb2.OperatorDef:
    return new_operator("ConstantFill", [], [blob], loop.forward, shape=shape, dtype=kind, value=value)


def emit(way: str, emitter: Emitter, loop: Loop, product: Product) -> None:
    """The operators of the step in place of the product, and those before the loop that lay out its weights."""
    (_emit_convolution if way == CONVOLUTION else _emit_inner_product)(emitter, loop, product)


def _emit_convolution(emitter: Emitter, loop: Loop, product: Product) -> None:
    image = _image(loop, product)
    loop.add_reference(image)
    like = like_filters(loop, product)
    loop.add_reference(like)
    filters = _by_the_cpu(emitter, "ResizeLike", [product.input, like], "filters")
    convolved = add(emitter, "Conv", [image, filters], [emitter.blob("convolved")], kernel=1, training_mode=1)
    if product.sigmoid is not None:
        assert product.bias is None
        _emit_sigmoid(emitter, convolved, product.sigmoid)
        emitter.add("Squeeze", [product.sigmoid], product.sigmoid, dims=[FEATURES])
        return
    copied = result_of_convolution(emitter, loop, product)
    add(emitter, FROM, [convolved], [copied])
    emitter.add("Squeeze", [copied], copied, dims=[FEATURES])
    add_bias(emitter, product, copied)


def _by_the_cpu(emitter: Emitter, kind: str, inputs: Sequence[str], name: str, **arguments: Any) -> str:
    """A copy for oneDNN that an operator of the CPU makes: TO takes longer, as it plans each copy anew."""
    copied = add(emitter, kind, inputs, [emitter.blob(name)], **arguments)
    emitter.made.append(ON_CPU.format(copied, kind))
    return copied


def _emit_inner_product(emitter: Emitter, loop: Loop, product: Product) -> None:
    bias = product.bias
    if bias is None:
        bias = loop.add_before("ConstantFill", [], product.output + "_no_bias", shape=[product.outer], value=0.0)
    inputs = [_rows(loop, product), laid_out_before(loop, "plain", bias, [product.outer], copied_there)]
    for outer in inputs:
        loop.add_reference(outer)
    laid_out = _by_the_cpu(emitter, "Scale", [product.input], "input", scale=1.0)
    multiplied = emitter.blob("multiplied")
    add(emitter, "FC", [laid_out, *inputs], [multiplied], axis=FEATURES, training_mode=1)
    if product.addend is not None:
        add(emitter, "Add", [product.addend, multiplied], [product.output])
        return
    result = product.output
    if product.sigmoid is not None:
        result = product.sigmoid
        _emit_sigmoid(emitter, multiplied, result)
    else:
        add(emitter, FROM, [multiplied], [result])
    emitter.reshape_in_place(result, [1, -1, product.outer])


def _emit_sigmoid(emitter: Emitter, there: str, result: str) -> None:
    """The sigmoid of oneDNN's `there`, in its place, copied back into `result`."""
    add(emitter, "Sigmoid", [there], [there])
    add(emitter, FROM, [there], [result])


def _image(loop: Loop, product: Product) -> str:
    """W as an image in blocks."""
    ones = loop.add_before("ConstantFill", [], "onednn_ones", shape=[product.inner, 1, 1, 1], value=1.0)

    def lay_out(emitter: Emitter, weights: str) -> str:
        plain = add(emitter, TO, [weights], [emitter.blob("plain")])
        if product.columns is None:
            plain = transposed(emitter, plain, product.parts > 1)
        shape = [product.parts, product.inner, 1, product.outer]
        add(emitter, "Reshape", [plain], [plain, emitter.blob("old_shape")], shape=shape)
        filters = add(emitter, TO, [ones], [emitter.blob("one_filters")])
        arguments = {"kernel": 1, "group": product.inner, "training_mode": 1}
        return add(emitter, "Conv", [plain, filters], [emitter.blob("in_blocks")], **arguments)

    parts = [product.parts] if product.parts > 1 else []
    if product.columns is not None:
        return laid_out_before(loop, "image", product.columns, [*parts, product.inner, product.outer], lay_out)
    return laid_out_before(loop, "image, transposed", product.rows, [*parts, product.outer, product.inner], lay_out)


def _rows(loop: Loop, product: Product) -> str:
    """W as rows."""

    def lay_out(emitter: Emitter, weights: str) -> str:
        return transposed(emitter, copied_there(emitter, weights))

    if product.rows is not None:
        return laid_out_before(loop, "plain", product.rows, [product.outer, product.inner], copied_there)
    return laid_out_before(loop, "transposed", product.columns, [product.inner, product.outer], lay_out)


def copied_there(emitter: Emitter, blob: str) -> str:
    """A copy of a blob of the CPU's."""
    return add(emitter, TO, [blob], [emitter.blob("for_onednn")])


def laid_out_before(
    loop: Loop,
    layout: str,
    blob: Optional[str],
    shape: Sequence[int],
    lay_out: Callable[[Emitter, str], str],
    others: Sequence[str] = (),
) -> str:
    """What `lay_out` makes of an outer blob, and `others`, once before the loop; the same blob if it is asked for
    again."""
    assert blob is not None
    key = ("onednn", layout, blob)
    if key not in loop.made:
        loop.made[key], operators = laid_out(loop, blob, shape, lay_out, others)
        loop.before += operators
    return loop.made[key]


def laid_out(
    loop: Loop, blob: str, shape: Sequence[int], lay_out: Callable[[Emitter, str], str], others: Sequence[str] = ()
) -> Tuple[str, List[caffe2_pb2.OperatorDef]]:
    """What `lay_out` makes of an outer blob of that shape, and the operators of the outer net that make it, and
    `others`."""
    emitter = Emitter(loop, loop.forward, blob)
    only_floats.emit(emitter, blob, len(shape))
    _emit_shape(emitter, blob, shape)
    made = lay_out(emitter, blob)
    return made, in_a_net(emitter.operators, [made, *others], loop)


def _emit_shape(emitter: Emitter, blob: str, shape: Sequence[int]) -> None:
    """Operators that fail unless `blob` is of that shape; one of as many numbers would be laid out like it."""
    found = emitter.new("Shape", [blob], "shape")
    wanted = emitter.new("GivenTensorInt64Fill", [], "wanted_shape", shape=[len(shape)], values=list(shape))
    same = emitter.new("EQ", [found, wanted], "has_shape")
    message = "'{}' is not [{}], for which the net has been optimised".format(blob, ", ".join(map(str, shape)))
    emitter.operators.append(new_operator("Assert", [same], [], emitter.beside, error_msg=message))


def transposed(emitter: Emitter, there: str, each: bool = False) -> str:
    """oneDNN's matrix `there`, or `each` of its matrices, transposed.

    For large ones the operator of the CPU takes several times as long.
    """
    return add(emitter, "Transpose", [there], [emitter.blob("transposed")], axes=LAST_TWO if each else [1, 0])


def free(emitter: Emitter, blobs: Sequence[str]) -> None:
    """Let go of the memory of blobs."""
    emitter.operators.append(new_operator(FREE, blobs, blobs, emitter.beside))


def add(emitter: Emitter, kind: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: Any) -> str:
    """An operator of oneDNN; gives its first output."""
    emitter.operators.append(on_onednn(new_operator(kind, inputs, outputs, emitter.beside, **arguments)))
    return outputs[0]
