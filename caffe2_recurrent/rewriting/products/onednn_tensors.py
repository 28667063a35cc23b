"""Tensors of oneDNN's in orders that no operator is told, or in memory of the CPU's, made of zeros.

Rows lie as an image does whose channels come last, in memory that a blob of the CPU's has too (`shown`); the slices of
all steps, as they are, lie in such memory as well. Filters are in the order that a convolution wants them: the one in
which the gradient of such filters comes. What is copied into a tensor of oneDNN's that has its shape gets the order
that is there.

Source: caffe2/ideep/operators/order_switch_ops.cc, operator_fallback_ideep.h, conv_op.cc, utility_ops.cc.
"""

from typing import Iterator

from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.engine_blobs import ON_CPU
from caffe2_recurrent.rewriting.products import onednn

# The operator of the CPU whose result lies where oneDNN has its own.
COPYING = "Scale"


def shown(there: str) -> str:
    """The blob of the CPU's that has the memory of oneDNN's."""
    return ON_CPU.format(there, COPYING)


def add_rows(emitter: Emitter, there: str, width: int, number: str) -> None:
    """`there` `[1, width, 1, N]` and `shown(there)` `[1, N, width]`; a blob `number` `[1]` says N."""
    channels = emitter.new("GivenTensorInt64Fill", [], "channels", shape=[3], values=[1, width, 1])
    image = emitter.concat([channels, number], "image_shape", 0)
    like = emitter.new("ConstantFill", [image], "like_image", input_as_shape=1, value=0.0)
    one, last = (
        emitter.new("GivenTensorInt64Fill", [], name, shape=[1], values=[size])
        for name, size in (("one", 1), ("width", width))
    )
    shape = emitter.concat([one, number, last], "shape_of_rows", 0)
    first = onednn.add(emitter, onednn.TO, [like], [emitter.blob("channels_first")])
    onednn.add(emitter, onednn.CHANNELS_LAST, [first], [there])
    # By name, the first to write it is an operator that others see.
    emitter.add("ConstantFill", [shape], shown(there), input_as_shape=1, value=0.0)
    onednn.add(emitter, COPYING, [like], [there], scale=1.0)
    emitter.reshape_in_place_like(shown(there), shape)


def add_slices(emitter: Emitter, there: str, leading: str, width: int) -> None:
    """`there` and `shown(there)`, of the dimensions that the blob `leading` says and one of `width`."""
    last = emitter.new("GivenTensorInt64Fill", [], "width", shape=[1], values=[width])
    shape = emitter.concat([leading, last], "shape_of_slices", 0)
    like = emitter.new("ConstantFill", [shape], "like_slices", input_as_shape=1, value=0.0)
    emitter.add("ConstantFill", [shape], shown(there), input_as_shape=1, value=0.0)
    onednn.add(emitter, COPYING, [like], [there], scale=1.0)


def add_filters(emitter: Emitter, there: str, outer: int, inner: int) -> None:
    """`there` `[outer, inner, 1, 1]`; where there is such a tensor already, in its memory."""

    def zeros() -> Iterator[str]:
        for name, shape in (("image", [1, inner]), ("like", [outer, inner]), ("gradient", [1, outer])):
            plain = emitter.new("ConstantFill", [], name, shape=[*shape, 1, 1], value=0.0)
            yield onednn.add(emitter, onednn.TO, [plain], [emitter.blob(name + "_there")])

    arguments = {"kernel": 1, "training_mode": 1, "no_bias": 1}
    onednn.add(emitter, "ConvGradient", list(zeros()), [there], **arguments)
