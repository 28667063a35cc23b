"""Filters of oneDNN's over weights `[K, M]` as these lie, for convolutions with kernels of 1 x 1.

Filters are `[M, K, 1, 1]`, and what an operator copies to oneDNN lies in that order: for weights whose columns are the
filters they are copied, transposed, and then laid out as the convolution wants them, for which numbers far apart have
to be put beside each other. No operator is told that the first dimension lies innermost. But the gradient of filters
comes so where oneDNN multiplies matrices that it makes of an image, as it does if the image has a margin wider than the
kernels. Filters that came so get the memory of a blob of the CPU's; what is copied into that is read in rows of M.

Source: caffe2/ideep/operators/conv_op.cc, operator_fallback_ideep.h; oneDNN's gemm_convolution_bwd_weights_t, which
`DNNL_VERBOSE=1` shows as `gemm:jit` with filters in the order `cdba`.
"""

import contextlib

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn, onednn_tensors, thread_numbers
from caffe2_recurrent.rewriting.products.onednn_tensors import shown
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.scratch_workspace import scratch_workspace

MARGIN = 2
WORKSPACE = "caffe2_recurrent_filters_of_columns"
# As many as fill the blocks of kernels, and do not.
ROWS = (16, 3)


def add(emitter: Emitter, there: str, inner: int, outer: int) -> None:
    """`there` `[outer, inner, 1, 1]` in the memory of `shown(there)` `[inner, outer]`, which the CPU writes."""
    width = 1 + 2 * MARGIN
    shapes = {"image": [1, inner, 1, 1], "filters": [outer, inner, 1, 1], "gradient": [1, outer, width, width]}
    zeros = {
        name: emitter.new("ConstantFill", [], "like_" + name, shape=shape, value=0.0) for name, shape in shapes.items()
    }
    copies = {name: onednn.copied_there(emitter, blob) for name, blob in zeros.items()}
    for name in ("image", "gradient"):
        copies[name] = onednn.add(emitter, onednn.CHANNELS_LAST, [copies[name]], [emitter.blob(name)])
    arguments = {"kernel": 1, "pad": MARGIN, "training_mode": 1, "no_bias": 1}
    onednn.add(emitter, "ConvGradient", list(copies.values()), [there], **arguments)
    # By name, the first to write it is an operator that others see.
    emitter.add("ConstantFill", [], shown(there), shape=[inner, outer], value=0.0)
    onednn.add(emitter, onednn_tensors.COPYING, [zeros["filters"]], [there], scale=1.0)
    emitter.reshape_in_place(shown(there), [inner, outer])


@trial.known
def are_right(inner: int, outer: int) -> bool:
    """Whether this Caffe2's oneDNN reads weights `[inner, outer]` as is said above, as rows of steps are convolved."""
    loop = trial.lone_loop(["x", "w", "y"])
    made, step = Emitter(loop, loop.forward, "y"), Emitter(loop, loop.forward, "y")
    filters, rows, results = (made.blob(name) for name in ("filters", "rows", "results"))
    add(made, filters, inner, outer)
    onednn_tensors.add_rows(made, rows, inner, "number")
    onednn_tensors.add_rows(made, results, outer, "number")
    step.operators += thread_numbers.set_at_once(step.blob("number"))
    step.add("Copy", ["w"], shown(filters))
    step.add("Copy", ["x"], shown(rows))
    onednn.add(step, "Conv", [rows, filters], [results], kernel=1, training_mode=0)
    step.add("Copy", [shown(results)], "y")
    random = np.random.default_rng(0)
    with scratch_workspace(WORKSPACE), contextlib.suppress(RuntimeError):
        for count in ROWS:
            # Of whole numbers, so that products are exact whatever is added up first.
            x, w = (random.integers(-8, 9, shape).astype(np.float32) for shape in ((1, count, inner), (inner, outer)))
            for blob, value in (("x", x), ("w", w), ("number", np.array([count]))):
                workspace.FeedBlob(blob, value)
            for name, emitter in (("made", made), ("step", step)):
                workspace.CreateNet(caffe2_pb2.NetDef(name=name, op=emitter.operators), overwrite=True)
                workspace.RunNet(name)
            if not np.array_equal(workspace.FetchBlob("y"), x @ w):
                return False
        return True
    return False
