"""Weights `[K, M]` transposed by oneDNN, in memory of the CPU's that stays.

As an image `[1, K, 1, M]` they lie with their channels first. What is copied into oneDNN's tensor of that shape whose
channels come last is transposed on the way, and that tensor has the memory of a blob of the CPU's: `[M, K]`. Caffe2's
`Transpose` goes through a column at a time, and of 1024 x 256 numbers no column stays in a cache until the next one.

Source: caffe2/ideep/operators/utility_ops.cc; caffe2/utils/math/transpose.cc.
"""

import contextlib

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn_copies, onednn_tensors
from caffe2_recurrent.rewriting.products.onednn_tensors import shown
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.scratch_workspace import scratch_workspace

# Bytes of weights up to which oneDNN took less time, where it was measured; of 10 MB it took as much.
MOST = 1 << 22
FLOAT = 4
WORKSPACE = "caffe2_recurrent_turned_weights"


def pay(inner: int, outer: int) -> bool:
    """Whether this Caffe2 has weights `[inner, outer]` transposed so, and in less time."""
    return inner * outer * FLOAT <= MOST and are_right(inner, outer)


def add(emitter: Emitter, there: str, inner: int, outer: int) -> None:
    """`there`, and `shown(there)` `[1, outer, inner]`, for weights `[inner, outer]`."""
    columns = emitter.new("GivenTensorInt64Fill", [], "columns", shape=[1], values=[outer])
    onednn_tensors.add_rows(emitter, there, inner, columns)


def turn(emitter: Emitter, weights: str, there: str, inner: int, outer: int) -> str:
    """`weights` transposed, in the memory of `there`; the blob given may get any shape."""
    image = emitter.new("Alias", [weights], "image")
    emitter.reshape_in_place(image, [1, inner, 1, outer])
    onednn_copies.copy_there(emitter, image, there)
    return emitter.new("Alias", [shown(there)], "turned")


@trial.known
def are_right(inner: int, outer: int) -> bool:
    """Whether this Caffe2 has weights `[inner, outer]` transposed so, again and again."""
    loop = trial.lone_loop(["w", "there"])
    made, each = Emitter(loop, loop.forward, "there"), Emitter(loop, loop.forward, "w")
    add(made, "there", inner, outer)
    turned = turn(each, "w", "there", inner, outer)
    random = np.random.default_rng(0)
    with scratch_workspace(WORKSPACE), contextlib.suppress(RuntimeError):
        workspace.RunNetOnce(caffe2_pb2.NetDef(name="made", op=made.operators))
        for run in range(2):
            weights = random.standard_normal((inner, outer), dtype=np.float32)
            workspace.FeedBlob("w", weights)
            if run == 0:
                workspace.CreateNet(caffe2_pb2.NetDef(name="each", op=each.operators))
            workspace.RunNet("each")
            if not np.array_equal(workspace.FetchBlob(turned), weights.T[np.newaxis]):
                return False
        return True
    return False
