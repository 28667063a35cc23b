"""LSTMs of several layers and directions with random values in all their blobs, run with gradients; and their copies in
numpy, written down once more here, without what the package knows of gate orders."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Sequence

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import LSTM
from errors_support import model_snapshot
from workspace_contents import contents

LAYERS = pytest.mark.parametrize("layers", [1, 2, 3])
DIRECTIONS = pytest.mark.parametrize("bidirectional", [False, True], ids=["one direction", "both directions"])
FORGET_BIAS = pytest.mark.parametrize("forget_bias", [0.0, 1.0], ids=["no forget_bias", "forget_bias"])
PARAMETERS = ("i2h_w", "gates_t_w", "i2h_b", "gates_t_b")


def bits(array):
    """The numbers of a float32 array as they lie in memory: -0 is not 0, and NaN is itself."""
    assert array.dtype == np.float32
    return array.view(np.int32)


def gates(array, order, wanted):
    """The parts of an array, which lie in one order along its first axis, in another."""
    parts = np.split(array, len(order))
    return np.concatenate([parts[order.index(gate)] for gate in wanted])


@dataclass
class Stack:
    """An LSTM under `scope`, with its initial states in blobs s0, s1, ..., or its own with `own_states`."""

    layers: int = 1
    bidirectional: bool = False
    forget_bias: float = 0.0
    lengths: Optional[Sequence[int]] = None
    steps: int = 4
    batch: int = 3
    dim_in: int = 2
    dim: int = 3
    own_states: bool = False
    state_axes: int = 2
    scope: str = "lstm"
    seed: int = 0
    options: Dict[str, Any] = field(default_factory=dict)

    @property
    def directions(self):
        return 2 if self.bidirectional else 1

    @property
    def loops(self):
        return self.layers * self.directions

    @property
    def scopes(self):
        """The scope of each loop, layer by layer, forward before backward."""
        layers = [self.scope] if self.layers == 1 else ["{}/layer_{}".format(self.scope, n) for n in range(self.layers)]
        return [one + end for one in layers for end in (("/fw", "/bw") if self.bidirectional else ("",))]

    @property
    def states(self):
        """(hidden, cell) of each loop."""
        if self.own_states:
            return [(one + "/initial_hidden_state", one + "/initial_cell_state") for one in self.scopes]
        return [("s{}".format(2 * loop), "s{}".format(2 * loop + 1)) for loop in range(self.loops)]

    @property
    def parameters(self):
        """The blobs of each loop, in the order in which torch has its parameters."""
        return [["{}/{}".format(one, name) for name in PARAMETERS] for one in self.scopes]

    def build(self, model=None):
        model = model or ModelHelper("model")
        outputs = LSTM(
            model,
            "x",
            None if self.lengths is None else "lengths",
            None if self.own_states else [state for states in self.states for state in states],
            self.dim_in,
            self.dim if self.layers == 1 else [self.dim] * self.layers,
            self.scope,
            bidirectional=self.bidirectional,
            forget_bias=self.forget_bias,
            **{"outputs_with_grads": "auto", **self.options},
        )
        return model, outputs

    def values(self):
        """Random numbers for all blobs, of a size that tells gates and states apart."""
        random = np.random.RandomState(self.seed)
        shapes = {"x": (self.steps, self.batch, self.dim_in)}
        state = [(self.dim,), (self.batch, self.dim), (1, self.batch, self.dim)][self.state_axes - 1]
        for loop, (blobs, states) in enumerate(zip(self.parameters, self.states)):
            width = self.dim_in if loop < self.directions else self.directions * self.dim
            rows = 4 * self.dim
            shapes.update(zip(blobs, ((rows, width), (rows, self.dim), (rows,), (rows,))))
            shapes.update(dict.fromkeys(states, (self.dim,) if self.own_states else state))
        values = {blob: random.uniform(-1, 1, size=shape).astype(np.float32) for blob, shape in shapes.items()}
        if self.lengths is not None:
            values["lengths"] = np.array(self.lengths, dtype=np.int32)
        return values

    def feed(self):
        for blob, value in self.values().items():
            workspace.FeedBlob(blob, value)

    def built(self):
        """The model and its outputs, with the blobs in the workspace."""
        model, outputs = self.build()
        self.feed()
        return model, outputs

    def seeds(self):
        """Gradients for hidden_all, hidden_last and cell_last."""
        random = np.random.RandomState(self.seed + 1)
        width = self.directions * self.dim
        shapes = [(self.steps, self.batch, width), (1, self.batch, width), (1, self.batch, width)]
        return [random.uniform(0.5, 1.5, size=shape).astype(np.float32) for shape in shapes]

    def run(self, model, outputs):
        """hidden_all, hidden_last and cell_last, and the gradients by blob, for what is in the workspace."""
        seen = [outputs[position] for position in (0, 1, 3)]
        given = {}
        for number, (output, seed) in enumerate(zip(seen, self.seeds())):
            name = "seed{}".format(number)
            workspace.FeedBlob(name, seed)
            given[output] = model.net.AddExternalInput(name)
        found = model.net.AddGradientOperators(given)
        workspace.RunNetOnce(model.net)
        wanted = ["x", *(blob for blobs in self.parameters for blob in blobs)]
        wanted += [blob for states in self.states for blob in states]
        by_name = {str(blob): str(gradient) for blob, gradient in found.items()}
        return (
            [workspace.FetchBlob(output) for output in seen],
            {blob: workspace.FetchBlob(by_name[blob]) for blob in wanted},
        )


def weights(stack):
    """The blobs with the parameters, as they are in the workspace."""
    return {blob: workspace.FetchBlob(blob) for blobs in stack.parameters for blob in blobs}


def refused(kind, function, *arguments, **options):
    """The text of the error, which is a `kind`; models among the arguments and the workspace are as they were."""
    models = [argument for argument in arguments if isinstance(argument, ModelHelper)]
    before, snapshots = contents(), [model_snapshot(model) for model in models]
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    assert type(caught.value) is kind
    assert contents() == before
    assert [model_snapshot(model) for model in models] == snapshots
    assert core.ScopedName("") == ""
    return str(caught.value)


def assert_brought_back(before, forget_bias, dim):
    """The blobs have the bits that they had; with a forget_bias, that gate of `i2h_b` has been rounded twice.

    One rounding is that of the sum and one that of the difference.
    """
    for blob, value in before.items():
        found = workspace.FetchBlob(blob)
        changed = bits(found) != bits(value)
        if forget_bias == 0 or not blob.endswith("i2h_b"):
            assert not changed.any()
        else:
            assert not changed[:dim].any() and not changed[2 * dim :].any()
            assert (np.abs(found - value) <= np.spacing(np.abs(value) + np.float32(abs(forget_bias)))).all()
