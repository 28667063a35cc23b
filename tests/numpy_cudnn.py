"""cuDNN's operators on flat LSTM weights in numpy, to follow what the nets of `cudnn_LSTM` mean without a GPU.

Where a gate lies in the flat blob is cuDNN's affair; here it is one after the other by layer, side and gate.
"""

import numpy as np
from caffe2.python import workspace

from numpy_lstm import sigmoid

GATES = ("input_gate", "forget_gate", "cell", "output_gate")
ENGINES_OWN = ("RecurrentParamSet", "RecurrentParamGet", "Recurrent")


def arguments(operator):
    """The arguments of an operator as Python's values."""
    found = {}
    for argument in operator.arg:
        kind = next((kind for kind in ("i", "f", "s") if argument.HasField(kind)), "ints")
        value = getattr(argument, kind)
        found[argument.name] = {"s": bytes.decode, "ints": list}.get(kind, lambda value: value)(value)
    return found


def layout(dim_in, dim, num_layers):
    """(layer, side, name) -> where it lies in the flat weights, and its shape."""
    places, position = {}, 0
    for layer in range(num_layers):
        for side in ("input", "recurrent"):
            width = dim_in if side == "input" and layer == 0 else dim
            for gate in GATES:
                for name, shape in ((gate + "_w", (dim, width)), (gate + "_b", (dim,))):
                    size = int(np.prod(shape))
                    places[layer, side, name] = slice(position, position + size), shape
                    position += size
    return places, position


def run(net):
    """Run a net on the engine, but for the operators of cuDNN; returns the slices that were set, in order."""
    set_slices = []
    for operator in net.Proto().op:
        if operator.type not in ENGINES_OWN:
            workspace.RunOperatorOnce(operator)
            continue
        given = arguments(operator)
        blobs = [workspace.FetchBlob(name) for name in operator.input]
        places, size = layout(blobs[0].shape[2], given["hidden_size"], given["num_layers"])
        flat = blobs[3] if operator.type == "Recurrent" else blobs[1]
        assert flat.shape == (size,)
        if operator.type == "Recurrent":
            for name, value in zip(operator.output, forward(*blobs, given["hidden_size"], given["num_layers"])):
                workspace.FeedBlob(name, value.astype(np.float32))
            continue
        place, shape = places[given["layer"], given["input_type"], given["param_type"]]
        if operator.type == "RecurrentParamSet":
            assert list(operator.output) == [operator.input[1]] and blobs[2].size == flat[place].size
            flat[place] = blobs[2].ravel()
            workspace.FeedBlob(operator.output[0], flat)
            set_slices.append(place)
        else:
            # cuDNN describes each as a filter of three axes.
            workspace.FeedBlob(operator.output[0], flat[place].reshape(1, -1, 1))
    return set_slices


def forward(x, hidden, cell, flat, dim, num_layers):
    places, _ = layout(x.shape[2], dim, num_layers)

    def gates(layer, side, values):
        products = {}
        for gate in GATES:
            (w, w_shape), (b, _) = places[layer, side, gate + "_w"], places[layer, side, gate + "_b"]
            products[gate] = values @ flat[w].reshape(w_shape).T.astype(np.float64) + flat[b]
        return products

    last_hidden, last_cell = [], []
    sequence = x
    for layer in range(num_layers):
        h, c, outputs = hidden[layer], cell[layer], []
        for x_t in sequence:
            of_input, of_state = gates(layer, "input", x_t), gates(layer, "recurrent", h)
            i, f, g, o = (of_input[gate] + of_state[gate] for gate in GATES)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            outputs.append(h)
        sequence = np.stack(outputs)
        last_hidden.append(h)
        last_cell.append(c)
    return sequence, np.stack(last_hidden), np.stack(last_cell)
