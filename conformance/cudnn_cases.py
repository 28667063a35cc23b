"""LSTMs as Caffe2 computes them, with all that `cudnn_check.py` needs to have cuDNN compute them on another machine.

    .venv/bin/python conformance/cudnn_cases.py cases.npz     here, no GPU needed
    python conformance/cudnn_check.py cases.npz               where PyTorch has a GPU, no Caffe2 needed

The file has for each LSTM its input, states and output gradients, its weights as `lstm_to_torch` and as
`lstm_to_cudnn` give them, and the values and gradients that Caffe2 found.
"""

import itertools
import sys

import numpy as np
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import LSTM, lstm_to_cudnn, lstm_to_torch

SCOPE = "lstm"
# (steps, batch, input, state)
SIZES = ((2, 1, 1, 1), (4, 3, 2, 3), (7, 5, 9, 32), (3, 2, 40, 64))
# Positions of hidden_all, hidden_last and cell_last among what LSTM returns.
SEEN = (0, 1, 3)


def main(arguments):
    """Write the cases to the file that is named."""
    if len(arguments) != 1:
        sys.exit("name the file to write, such as cases.npz")
    arrays = {}
    for sizes, layers, directions, forget_bias in itertools.product(SIZES, (1, 2, 3), (1, 2), (0.0, 1.0)):
        name = "T{} N{} input {} D{}, {} layers, {} directions, forget_bias {:g}".format(
            *sizes, layers, directions, forget_bias
        )
        for key, array in case(sizes, layers, directions, forget_bias).items():
            arrays["{}|{}".format(name, key)] = array
    np.savez_compressed(arguments[0], **arrays)


def case(sizes, layers, directions, forget_bias):
    """What there is to know of one LSTM, by what it is; weights and their gradients under the names of PyTorch."""
    workspace.ResetWorkspace()
    model = ModelHelper("as_used")
    outputs = built(model, sizes, layers, directions, forget_bias)
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(layers + 10 * directions)
    given = inputs(random, sizes, layers, directions)
    for parameter in model.params:
        feed(parameter, random.uniform(-0.5, 0.5, size=workspace.FetchBlob(parameter).shape))
    for blob, value in given.items():
        feed(blob, value)
    seen = [outputs[position] for position in SEEN]
    seeds = {output: model.net.AddExternalInput("seed_{}".format(n)) for n, output in enumerate(seen)}
    found = {str(blob): str(gradient) for blob, gradient in model.net.AddGradientOperators(seeds).items()}
    workspace.RunNetOnce(model.net)

    known = {"layers": layers, "directions": directions, "flat": lstm_to_cudnn(model, SCOPE), **given}
    known.update(zip(("hidden_all", "hidden_last", "cell_last"), map(workspace.FetchBlob, seen)))
    known.update({"weight/" + name: value for name, value in lstm_to_torch(model, SCOPE).items()})
    known["gradient/x"] = workspace.FetchBlob(found["x"])
    for state in states(layers, directions):
        known["gradient/" + state] = workspace.FetchBlob(found[state])
    # Gradients change their names and the order of their gates as weights do, without a bias that is added.
    for parameter in model.params:
        workspace.FeedBlob(str(parameter), workspace.FetchBlob(found[str(parameter)]))
    plain = ModelHelper("without_forget_bias", init_params=False)
    built(plain, sizes, layers, directions, 0.0)
    known.update({"gradient/" + name: value for name, value in lstm_to_torch(plain, SCOPE).items()})
    return {name: np.asarray(value) for name, value in known.items()}


def built(model, sizes, layers, directions, forget_bias):
    """The outputs of the LSTM, added to the model."""
    _, _, dim_in, dim = sizes
    return LSTM(
        model,
        "x",
        None,
        states(layers, directions),
        dim_in,
        dim if layers == 1 else [dim] * layers,
        SCOPE,
        outputs_with_grads="auto",
        forget_bias=forget_bias,
        bidirectional=directions == 2,
    )


def states(layers, directions):
    """The blobs of the initial states, hidden and cell in turn, layer by layer, forward before backward."""
    return [side + str(loop) for loop in range(layers * directions) for side in ("h", "c")]


def inputs(random, sizes, layers, directions):
    """Input, initial states and output gradients by blob."""
    steps, batch, dim_in, dim = sizes
    shapes = {"x": (steps, batch, dim_in), "seed_0": (steps, batch, directions * dim)}
    shapes.update(dict.fromkeys(("seed_1", "seed_2"), (1, batch, directions * dim)))
    shapes.update(dict.fromkeys(states(layers, directions), (batch, dim)))
    return {blob: random.uniform(-1, 1, size=shape).astype(np.float32) for blob, shape in shapes.items()}


def feed(blob, value):
    workspace.FeedBlob(str(blob), value.astype(np.float32))


if __name__ == "__main__":
    main(sys.argv[1:])
