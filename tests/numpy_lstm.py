"""An LSTM layer as a plain numpy loop, in float64, and a model that runs ours on the same numbers."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional

import numpy as np
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import comparing
import numpy_loop
from caffe2_recurrent import LSTM

PARAMETERS = ("i2h_w", "i2h_b", "gates_t_w", "gates_t_b")


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def lstm(values, forget_bias=0.0, drop_states=False):
    """hidden_all, hidden_last, cell_all, cell_last for the blobs in `values`, named as in `Case`."""
    x, lengths = values["X"], values.get("lengths")
    steps, batch = x.shape[:2]
    size = values["gates_t_w"].shape[1]
    hidden = np.broadcast_to(values["hidden"].reshape(-1, size), (batch, size))
    cell = np.broadcast_to(values["cell"].reshape(-1, size), (batch, size))
    hidden_all, cell_all = [], []
    for t in range(steps):
        gates = x[t] @ values["i2h_w"].T + values["i2h_b"] + hidden @ values["gates_t_w"].T + values["gates_t_b"]
        i, f, o, g = np.split(gates, 4, axis=1)
        new_cell = sigmoid(f + forget_bias) * cell + sigmoid(i) * np.tanh(g)
        new_hidden = sigmoid(o) * np.tanh(new_cell)
        if lengths is not None:
            running = (t < lengths)[:, np.newaxis]
            kept = 0.0 if drop_states else 1.0
            new_cell = np.where(running, new_cell, kept * cell)
            new_hidden = np.where(running, new_hidden, kept * hidden)
        hidden, cell = new_hidden, new_cell
        hidden_all.append(hidden)
        cell_all.append(cell)
    return [np.stack(hidden_all), hidden[np.newaxis], np.stack(cell_all), cell[np.newaxis]]


@dataclass
class Case:
    """Sizes and options of one layer, and values for its blobs drawn from a seed."""

    steps: int = 3
    batch: int = 2
    dim_in: int = 2
    dim: int = 3
    lengths: Optional[Any] = None
    state_rank: int = 2
    options: Dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def values(self):
        random = np.random.RandomState(self.seed)
        state = {1: (self.dim,), 2: (self.batch, self.dim), 3: (1, self.batch, self.dim)}[self.state_rank]
        shapes = {
            "X": (self.steps, self.batch, self.dim_in),
            "hidden": state,
            "cell": state,
            "i2h_w": (4 * self.dim, self.dim_in),
            "i2h_b": (4 * self.dim,),
            "gates_t_w": (4 * self.dim, self.dim),
            "gates_t_b": (4 * self.dim,),
        }
        values = {name: random.uniform(-1, 1, size=shape).astype(np.float32) for name, shape in shapes.items()}
        if self.lengths is not None:
            values["lengths"] = np.array(self.lengths, dtype=np.int32)
        return values

    @property
    def positions(self):
        chosen = self.options.get("outputs_with_grads", (0,))
        return (0, 1, 2, 3) if chosen == "auto" else tuple(chosen)

    def reference(self, values=None):
        if values is None:
            values = self.doubles()
        options = {name: self.options[name] for name in ("forget_bias", "drop_states") if name in self.options}
        return lstm(values, **options)

    def doubles(self):
        values = self.values()
        return {name: values[name].astype(np.float64) if name != "lengths" else values[name] for name in values}

    def output_gradients(self):
        random = np.random.RandomState(self.seed + 1)
        return {n: random.uniform(0.5, 1.5, size=out.shape) for n, out in enumerate(self.reference())}

    def reference_gradients(self):
        values, seeds = self.doubles(), self.output_gradients()

        def loss(values):
            outputs = self.reference(values)
            return sum((outputs[position] * seeds[position]).sum() for position in self.positions)

        return numpy_loop.numerical_gradients(loss, values, [name for name in values if name != "lengths"])

    def gradient_of_summed_hidden(self):
        """The gradient of X for the sum of hidden_all."""
        return numpy_loop.numerical_gradients(lambda values: self.reference(values)[0].sum(), self.doubles(), ["X"])[
            "X"
        ]

    def build(self, builder=LSTM, model=None, scope="lstm"):
        """A model with the layer; blobs are named as in `values`, parameters under the scope."""
        model = model or ModelHelper("model")
        outputs = builder(
            model,
            "X",
            None if self.lengths is None else "lengths",
            ("hidden", "cell"),
            self.dim_in,
            self.dim,
            scope,
            **self.options,
        )
        return model, outputs

    def feed(self, scope="lstm"):
        for name, value in self.values().items():
            workspace.FeedBlob(self.full_name(name, scope), value)

    def full_name(self, name, scope="lstm"):
        return "{}/{}".format(scope, name) if name in PARAMETERS else name

    def run(self, builder=LSTM, executor=True):
        """Outputs, and the gradients by name, of the layer run by the engine; and the model."""
        model, outputs = self.build(builder)
        return comparing.run_layer(self, model, outputs, executor)
