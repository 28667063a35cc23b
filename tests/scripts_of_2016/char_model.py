"""Learns to repeat a short text, as training scripts of 2016 did it. Prints the loss at the start and at the end."""

from __future__ import absolute_import, division, print_function

import logging

import numpy as np
from caffe2.python import workspace
from caffe2.python.cnn import CNNModelHelper
from caffe2.python.recurrent import LSTM

logging.getLogger().setLevel(logging.ERROR)
TEXT = "the cat sat on the mat. " * 8
STEPS, BATCH, HIDDEN = 12, 4, 24

characters = sorted(set(TEXT))
numbers = np.array([characters.index(character) for character in TEXT])
size = len(characters)

model = CNNModelHelper(name="char_model")
input_blob, seq_lengths, hidden_init, cell_init, target = model.net.AddExternalInputs(
    "input_blob", "seq_lengths", "hidden_init", "cell_init", "target"
)
hidden_all, hidden_last, _, cell_last = LSTM(
    model, input_blob, seq_lengths, (hidden_init, cell_init), size, HIDDEN, "LSTM"
)
output = model.FC(hidden_all, None, dim_in=HIDDEN, dim_out=size, axis=2)
softmax = model.net.Softmax(output, "softmax", axis=2)
softmax_rows, _ = model.net.Reshape(softmax, ["softmax_rows", "_"], shape=[-1, size])
xent = model.LabelCrossEntropy([softmax_rows, target], "xent")
loss = model.AveragedLoss(xent, "loss")
model.AddGradientOperators([loss])

iteration = model.Iter("iteration")
rate = model.LearningRate(iteration, "rate", base_lr=-4.0, policy="step", stepsize=1, gamma=0.9999)
one = model.param_init_net.ConstantFill([], "one", shape=[1], value=1.0)
for param in model.params:
    model.WeightedSum([param, one, model.param_to_grad[param], rate], param)

workspace.FeedBlob(seq_lengths, np.full(BATCH, STEPS, dtype=np.int32))
starts = np.arange(BATCH) * 5
windows = np.stack([numbers[start : start + STEPS + 1] for start in starts], axis=1)
workspace.FeedBlob(input_blob, np.eye(size, dtype=np.float32)[windows[:-1]])
workspace.FeedBlob(target, windows[1:].reshape(-1).astype(np.int32))
for state in (hidden_init, cell_init):
    workspace.FeedBlob(state, np.zeros((1, BATCH, HIDDEN), dtype=np.float32))
workspace.RunNetOnce(model.param_init_net)
workspace.CreateNet(model.net)
losses = []
for _ in range(150):
    workspace.RunNet(model.net.Proto().name)
    losses.append(float(workspace.FetchBlob(loss)))
print("loss", losses[0], losses[-1])
print("params", *[str(param) for param in model.params])
