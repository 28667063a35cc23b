"""A step net of its own through `recurrent_net`, with all that had to be said in 2016. Saves its blobs to argv[1]."""

from __future__ import absolute_import, division, print_function

import sys

import numpy as np
from caffe2.python import workspace
from caffe2.python.cnn import CNNModelHelper
from caffe2.python.recurrent import recurrent_net

STEPS, BATCH, SIZE = 4, 2, 3

model = CNNModelHelper(name="outer")
sequence, initial = model.net.AddExternalInputs("sequence", "initial")
step_model = CNNModelHelper(name="step", param_model=model)
input_t, timestep, hidden_t_prev = step_model.net.AddScopedExternalInputs("input_t", "timestep", "hidden_t_prev")
gates_t = step_model.FC(hidden_t_prev, "rnn/gates_t", dim_in=SIZE, dim_out=SIZE, axis=2)
step_model.net.Sum([gates_t, input_t], [gates_t])
hidden_t = step_model.net.Tanh(gates_t, "rnn/hidden_t")
step_model.net.AddExternalOutputs(hidden_t)
hidden_all, hidden_last = recurrent_net(
    model.net,
    step_model.net,
    [(input_t, sequence)],
    [(hidden_t_prev, initial, SIZE)],
    {hidden_t_prev: hidden_t},
    [SIZE],
    timestep,
    "rnn",
)
squared = model.net.Sqr(hidden_all, "squared")
loss = model.net.SumElements(squared, "loss")
gradients = model.AddGradientOperators([loss])

random = np.random.RandomState(3)
workspace.FeedBlob(sequence, random.randn(STEPS, BATCH, SIZE).astype(np.float32))
workspace.FeedBlob(initial, random.randn(1, BATCH, SIZE).astype(np.float32))
workspace.RunNetOnce(model.param_init_net)
workspace.RunNetOnce(model.net)
blobs = {"hidden_all": hidden_all, "hidden_last": hidden_last, "sequence": sequence, "initial": initial, "loss": loss}
blobs.update(w="rnn/gates_t_w", b="rnn/gates_t_b")
blobs.update(w_grad=gradients["rnn/gates_t_w"], sequence_grad=gradients["sequence"])
np.savez(sys.argv[1], **{name: workspace.FetchBlob(str(blob)) for name, blob in blobs.items()})
