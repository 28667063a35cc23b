"""A decoder with attention, run in several sizes."""

import numpy as np
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import AttentionType, LSTMWithAttention

# The width of what is encoded.
ENCODED = 6
STATES = ("h0", "c0", "w0")
# Numbers of steps, of sequences, and of what is encoded.
SIZES = [(5, 7, 4), (3, 4, 9), (4, 1, 2), (6, 5, 1), (2, 8, 8)]


def decoder(kind=AttentionType.Regular):
    """A model of it, and the blobs that it must leave as they would be: outputs and gradients."""
    model = ModelHelper("model")
    encoder = (ENCODED, "encoded", support.DIM_IN, support.D)
    outputs = LSTMWithAttention(model, "x", None, *STATES, *encoder, "layer", kind, encoder_lengths="encoder_lengths")
    of_outputs = model.net.AddExternalInputs("dh", "dw")
    gradients = model.AddGradientOperators(dict(zip([outputs[0], outputs[4]], of_outputs)))
    inputs = ["x", *STATES, "encoded", *map(str, model.params)]
    return model, [str(blob) for blob in (outputs[0], outputs[4], *(gradients[blob] for blob in inputs))]


def runs_of_attention(change, sizes=SIZES, kind=AttentionType.Regular):
    """What a decoder, after `change`, gives in runs with such numbers."""
    workspace.ResetWorkspace()
    model, seen = decoder(kind)
    random = np.random.RandomState(0)
    workspace.RunNetOnce(model.param_init_net)
    for blob in model.params:
        workspace.FeedBlob(blob, random.uniform(-1, 1, workspace.FetchBlob(blob).shape).astype(np.float32))
    found = []
    for steps, batch, encoded in sizes:
        widths = {"x": support.DIM_IN, "h0": support.D, "c0": support.D, "w0": ENCODED, "dh": support.D, "dw": ENCODED}
        for blob, width in {**widths, "encoded": ENCODED}.items():
            leading = {"x": steps, "dh": steps, "dw": steps, "encoded": encoded}.get(blob, 1)
            workspace.FeedBlob(blob, random.uniform(-1, 1, (leading, batch, width)).astype(np.float32))
        workspace.FeedBlob("encoder_lengths", random.randint(0, encoded + 1, batch).astype(np.int32))
        if not found:
            change(model)
            workspace.CreateNet(model.net)
        workspace.RunNet(model.net)
        found += [workspace.FetchBlob(blob) for blob in seen]
    return found, {}
