"""Builds every cell by position, and runs those that need no GPU. Prints names and shapes of what they return."""

from __future__ import absolute_import, division, print_function

import logging

import numpy as np
from caffe2.python import recurrent, workspace
from caffe2.python.attention import AttentionType
from caffe2.python.cnn import CNNModelHelper
from caffe2.python.recurrent import MILSTM, GetLSTMParamNames, InitFromLSTMParams, LSTMWithAttention, cudnn_LSTM

logging.getLogger().setLevel(logging.ERROR)
T, N, IN, D, S, E = 3, 2, 4, 5, 6, 7


def feed(name, *shape):
    workspace.FeedBlob(name, np.random.randn(*shape).astype(np.float32))


feed("x", T, N, IN)
feed("encoded", S, N, E)
feed("context", 1, N, E)
for state in ("h", "c"):
    feed(state, 1, N, D)
workspace.FeedBlob("lengths", np.array([T, T - 1], dtype=np.int32))

model = CNNModelHelper(name="cells")
lstm = recurrent.LSTM(model, "x", "lengths", ("h", "c"), IN, D, "lstm", (0, 3), True)
milstm = MILSTM(model, "x", "lengths", ("h", "c"), IN, D, "milstm", (0, 3))
attended = [
    LSTMWithAttention(
        model, "x", "lengths", "h", "c", "context", E, "encoded", IN, D, "attention_{}".format(kind), kind, (0, 4)
    )
    for kind in (AttentionType.Regular, AttentionType.Recurrent)
]
losses = [model.net.SumElements(blob, str(blob) + "_loss") for blob in (lstm[0], lstm[3], milstm[0], milstm[3])]
losses += [model.net.SumElements(found[at], str(found[at]) + "_loss") for found in attended for at in (0, 4)]
model.AddGradientOperators(losses)
workspace.RunNetOnce(model.param_init_net)
workspace.RunNetOnce(model.net)
for blobs in (lstm[:4], milstm, *attended):
    for blob in blobs:
        print(blob, *workspace.FetchBlob(blob).shape)
print("with gradients", len(model.param_to_grad), "of", len(model.params))

names = GetLSTMParamNames()
sizes = {"input": IN, "recurrent": D}
values = {
    of: dict(
        [(name, np.random.randn(D, sizes[of])) for name in names["weights"]]
        + [(name, np.random.randn(D)) for name in names["biases"]]
    )
    for of in sizes
}
InitFromLSTMParams(lstm[4], values)
found = workspace.FetchBlob(lstm[4]["recurrent"]["weights"])
print("stacked", np.abs(found - np.concatenate([values["recurrent"][name] for name in names["weights"]])).max() < 1e-6)

on_gpu = CNNModelHelper(name="on_gpu")
output, hidden, cell, (extract, mapping) = cudnn_LSTM(on_gpu, "x", ("h", "c"), IN, D, "cudnn", None, None, 1, True)
print(output, hidden, cell, len(extract.Proto().op), sorted(mapping))
