"""Refusing other numbers than floats, where an operator that is gone now has refused them.

oneDNN takes the bytes of any blob for those of floats. So does a link, which makes the blob one of floats on top. Of a
first slice an operator of the CPU sees in half a microsecond that it does not hold what it expects.

Source: CopyCPUToIDEEP in caffe2/ideep/operators/utility_ops.cc, RNNApplyLinkOp in
caffe2/operators/rnn/recurrent_network_op.h.
"""

from caffe2_recurrent.rewriting.emit import Emitter


def emit(emitter: Emitter, blob: str, dimensions: int) -> str:
    """Operators that fail unless `blob` holds floats; gives a blob that they make of it."""
    first = emitter.new("Slice", [blob], "first", starts=[0] * dimensions, ends=[1] + [-1] * (dimensions - 1))
    return emitter.new("DotProduct", [first, first], "is_of_floats")
