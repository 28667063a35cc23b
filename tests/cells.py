"""The registry of cells: for each its blobs, a plain numpy loop in float64, and how to add it to a model.

The cross-cutting tests (test_cells.py) run over all of them, with T = 3 steps, N = 2 sequences, D = 3 and S = 4.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import strategies as st

import comparing
import numpy_loop
from caffe2_recurrent import GRU, LSTM, MILSTM, AttentionType, LSTMWithAttention

T, N, DIM_IN, D, S, E = 3, 2, 2, 3, 4, 2
# Of cells that several tests have.
REFERENCE_GRADIENTS: Dict[str, Dict[str, np.ndarray]] = {}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def fc(x, values, name):
    return x @ values[name + "_w"].T + values[name + "_b"]


def batch_of(state, batch):
    return np.broadcast_to(state.reshape(-1, state.shape[-1]), (batch, state.shape[-1]))


def lstm_unit(gates, cell, forget_bias):
    i, f, o, g = np.split(gates, 4, axis=1)
    new_cell = sigmoid(f + forget_bias) * cell + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(new_cell), new_cell


def loop(values, states, step, options):
    """Run `step(t, states) -> states` over the sequence, with lengths; `<state>_all` and `<state>_last` in order."""
    x, lengths = values["X"], values.get("lengths")
    states = [batch_of(values[name], x.shape[1]) for name in states]
    history = [[] for _ in states]
    for t in range(x.shape[0]):
        new = step(t, states)
        if lengths is not None:
            # Attention's context has no length: it goes on with the state that no longer changes.
            running = (t < lengths)[:, np.newaxis]
            kept = 0.0 if options.get("drop_states") else 1.0
            masked = options.get("masked_states", len(new))
            new = [np.where(running, n, kept * s) if k < masked else n for k, (n, s) in enumerate(zip(new, states))]
        states = new
        for values_so_far, state in zip(history, states):
            values_so_far.append(state)
    return [output for run in history for output in (np.stack(run), run[-1][np.newaxis])]


def lstm_loop(values, options):
    def step(t, states):
        gates = fc(values["X"][t], values, "i2h") + fc(states[0], values, "gates_t")
        return list(lstm_unit(gates, states[1], options.get("forget_bias", 0.0)))

    return loop(values, ("hidden", "cell"), step, options)


def milstm_loop(values, options):
    def step(t, states):
        x, u = fc(values["X"][t], values, "i2h"), fc(states[0], values, "prev_t")
        gates = values["alpha"] * x * u + values["beta1"] * u + values["beta2"] * x + values["b"]
        return list(lstm_unit(gates, states[1], options.get("forget_bias", 0.0)))

    return loop(values, ("hidden", "cell"), step, options)


def gru_loop(values, options):
    def step(t, states):
        (hidden,) = states
        x_r, x_u, x_o = np.split(fc(values["X"][t], values, "i2h"), 3, axis=1)
        reset = sigmoid(x_r + fc(hidden, values, "reset_gate_t"))
        update = sigmoid(x_u + fc(hidden, values, "update_gate_t"))
        if options.get("linear_before_reset"):
            output = np.tanh(x_o + reset * fc(hidden, values, "output_gate_t"))
        else:
            output = np.tanh(x_o + fc(reset * hidden, values, "output_gate_t"))
        return [update * hidden + (1 - update) * output]

    return loop(values, ("hidden",), step, options)


def attention(values, hidden, context, options):
    """Context `[N, E]` and weights `[N, S]` for one step."""
    encoder = values["encoder"]
    if options.get("weighted"):
        weighted = values["weighted"]
    else:
        weighted = fc(encoder, values, "weighted_encoder_outputs")
    query = fc(hidden, values, "weighted_decoder_hidden_state")
    if options.get("attention_type") == AttentionType.Recurrent:
        query = query + fc(context, values, "weighted_prev_attention_context")
    energies = (np.tanh(weighted + query) @ values["attention_v"][0]).T
    weights = np.exp(energies - energies.max(axis=1, keepdims=True))
    if "encoder_lengths" in values:
        weights = weights * (np.arange(encoder.shape[0]) < values["encoder_lengths"][:, np.newaxis])
    total = weights.sum(axis=1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    return np.einsum("ns,sne->ne", weights, encoder), weights


def attention_loop(values, options):
    def step(t, states):
        hidden, cell, context = states
        gates = fc(values["X"][t], values, "i2h") + fc(np.concatenate([hidden, context], axis=1), values, "gates_t")
        new_hidden, new_cell = lstm_unit(gates, cell, options.get("forget_bias", 0.0))
        if "lengths" in values:
            running = (t < values["lengths"])[:, np.newaxis]
            new_hidden, new_cell = np.where(running, new_hidden, hidden), np.where(running, new_cell, cell)
        return [new_hidden, new_cell, attention(values, new_hidden, context, options)[0]]

    return loop(values, ("hidden", "cell", "context"), step, dict(options, masked_states=2))


def fc_shapes(name, dim_in, dim_out):
    return {name + "_w": (dim_out, dim_in), name + "_b": (dim_out,)}


LSTM_SHAPES = {**fc_shapes("i2h", DIM_IN, 4 * D), **fc_shapes("gates_t", D, 4 * D)}
MILSTM_SHAPES = {
    **fc_shapes("i2h", DIM_IN, 4 * D),
    **fc_shapes("prev_t", D, 4 * D),
    **dict.fromkeys(("alpha", "beta1", "beta2", "b"), (4 * D,)),
}
GRU_SHAPES = {
    **fc_shapes("i2h", DIM_IN, 3 * D),
    **{k: v for gate in ("reset", "update", "output") for k, v in fc_shapes(gate + "_gate_t", D, D).items()},
}
ATTENTION_SHAPES = {
    **fc_shapes("i2h", DIM_IN, 4 * D),
    **fc_shapes("gates_t", D + E, 4 * D),
    **fc_shapes("weighted_encoder_outputs", E, E),
    **fc_shapes("weighted_decoder_hidden_state", D, E),
    "attention_v": (1, E),
}
RECURRENT_ATTENTION_SHAPES = {**ATTENTION_SHAPES, **fc_shapes("weighted_prev_attention_context", E, E)}


def plain(builder):
    def build(model, lengths, states, scope, options):
        return builder(model, "X", lengths, states, DIM_IN, D, scope, **options)

    return build


def with_attention(model, lengths, states, scope, options):
    options = dict(options)
    weighted = "weighted" if options.pop("weighted", False) else None
    encoder_lengths = "encoder_lengths" if options.pop("encoder", False) else None
    return LSTMWithAttention(
        model,
        "X",
        lengths,
        *states,
        E,
        "encoder",
        DIM_IN,
        D,
        scope,
        weighted_encoder_outputs=weighted,
        encoder_lengths=encoder_lengths,
        **options,
    )


@dataclass
class Cell:
    """A kind of layer, with options, sizes and values drawn from a seed."""

    name: str
    builder: Callable[..., Any]
    loop: Callable[..., List[np.ndarray]]
    parameters: Dict[str, Tuple[int, ...]]
    states: Dict[str, int]
    memory: Tuple[str, ...] = ("memory_optimization",)
    inputs: Dict[str, Tuple[int, ...]] = field(default_factory=dict)
    options: Dict[str, Any] = field(default_factory=dict)
    lengths: Optional[List[int]] = None
    encoder_lengths: Optional[List[int]] = None
    rank: int = 2
    steps: int = T
    batch: int = N
    seed: int = 0

    def but(self, **changes):
        options = dict(self.options, **changes.pop("options", {}))
        return replace(self, options=options, **changes)

    def remembering_nothing(self):
        return self.but(options=dict.fromkeys(self.memory, True))

    @property
    def positions(self):
        default = (0, 4) if self.name.startswith("attention") else (0,)
        chosen = self.options.get("outputs_with_grads", default)
        return tuple(range(2 * len(self.states))) if chosen == "auto" else tuple(chosen)

    def values(self):
        random = np.random.RandomState(self.seed)
        state_shape = {1: lambda d: (d,), 2: lambda d: (self.batch, d), 3: lambda d: (1, self.batch, d)}[self.rank]
        shapes = {"X": (self.steps, self.batch, DIM_IN), **self.inputs, **self.parameters}
        shapes.update({name: state_shape(size) for name, size in self.states.items()})
        values = {name: random.uniform(-1, 1, size=shape).astype(np.float32) for name, shape in shapes.items()}
        for name, lengths in (("lengths", self.lengths), ("encoder_lengths", self.encoder_lengths)):
            if lengths is not None:
                values[name] = np.array(lengths, dtype=np.int32)
        return values

    def doubles(self):
        return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in self.values().items()}

    def full_name(self, name, scope="layer"):
        return "{}/{}".format(scope, name) if name in self.parameters else name

    def reference(self, values=None):
        return self.loop(self.doubles() if values is None else values, self.options)

    def output_gradients(self):
        random = np.random.RandomState(self.seed + 1)
        return {n: random.uniform(0.5, 1.5, size=out.shape) for n, out in enumerate(self.reference())}

    def reference_gradients(self):
        # What a cell keeps in memory does not change them, and each output adds its own.
        aside = (*self.memory, "outputs_with_grads")
        key = repr(self.but(options=dict.fromkeys(aside)))
        if key not in REFERENCE_GRADIENTS:
            REFERENCE_GRADIENTS[key] = self._gradients_by_output()
        return {name: found[..., list(self.positions)].sum(axis=-1) for name, found in REFERENCE_GRADIENTS[key].items()}

    def _gradients_by_output(self):
        values, seeds = self.doubles(), self.output_gradients()

        def loss(values):
            outputs = self.reference(values)
            return np.array([(output * seeds[position]).sum() for position, output in enumerate(outputs)])

        names = [name for name, value in values.items() if value.dtype == np.float64]
        return numpy_loop.numerical_gradients(loss, values, names)

    def build(self, model=None, scope="layer"):
        model = model or ModelHelper("model")
        options = dict(self.options)
        if self.encoder_lengths is not None:
            options["encoder"] = True
        states = tuple(self.states)
        outputs = self.builder(model, None if self.lengths is None else "lengths", states, scope, options)
        return model, outputs

    def feed(self, scope="layer"):
        for name, value in self.values().items():
            workspace.FeedBlob(self.full_name(name, scope), value)

    def run(self, executor=True, rewrite=None):
        """Outputs, gradients by name, and the model, run by the engine; `rewrite` may change the model before."""
        model, outputs = self.build()
        return comparing.run_layer(self, model, outputs, executor, rewrite)

    def assert_right(self, executor=True, rewrite=None):
        outputs, gradients, _ = self.run(executor, rewrite)
        self.assert_as_reference(outputs, gradients)

    def assert_as_reference(self, outputs, gradients):
        for index, (found, expected) in enumerate(zip(outputs, self.reference())):
            comparing.assert_close(found, expected, "output {}".format(index))
        if not self.options.get("forward_only"):
            for name, expected in self.reference_gradients().items():
                comparing.assert_close(gradients[name], expected, "gradient of " + name)


TWO = {"hidden": D, "cell": D}
ATTENTION = {
    "builder": with_attention,
    "loop": attention_loop,
    "states": {"hidden": D, "cell": D, "context": E},
    "memory": ("lstm_memory_optimization", "attention_memory_optimization"),
    "inputs": {"encoder": (S, N, E)},
}
RECURRENT = {"attention_type": AttentionType.Recurrent}
MAPPED = {name: shape for name, shape in ATTENTION_SHAPES.items() if not name.startswith("weighted_encoder_outputs")}

CELLS = [
    Cell("lstm", plain(LSTM), lstm_loop, LSTM_SHAPES, TWO),
    Cell("milstm", plain(MILSTM), milstm_loop, MILSTM_SHAPES, TWO),
    Cell("gru", plain(GRU), gru_loop, GRU_SHAPES, {"hidden": D}),
    Cell("gru_linear", plain(GRU), gru_loop, GRU_SHAPES, {"hidden": D}, options={"linear_before_reset": True}),
    Cell("attention_regular", parameters=ATTENTION_SHAPES, **ATTENTION),
    Cell("attention_recurrent", parameters=RECURRENT_ATTENTION_SHAPES, options=RECURRENT, **ATTENTION),
    Cell("attention_lengths", parameters=ATTENTION_SHAPES, encoder_lengths=[4, 2], **ATTENTION),
    Cell(
        "attention_recurrent_lengths",
        parameters=RECURRENT_ATTENTION_SHAPES,
        options=RECURRENT,
        encoder_lengths=[0, 3],
        **ATTENTION,
    ),
    Cell(
        "attention_weighted",
        parameters=MAPPED,
        options={"weighted": True},
        **{**ATTENTION, "inputs": {"encoder": (S, N, E), "weighted": (S, N, E)}},
    ),
]


def choices(cell):
    """Values for `outputs_with_grads`."""
    outputs = range(2 * len(cell.states))
    return [chosen for size in (1, 2) for chosen in itertools.combinations(outputs, size)] + [tuple(outputs), "auto"]


def drawn(data, among, flags=None):
    """A cell with random sizes, lengths and options, drawn by Hypothesis; `flags` are options that are on or off."""
    cell = data.draw(st.sampled_from(among))
    steps = data.draw(st.integers(1, 5))
    # Encoders have as many sequences as the registry says.
    batch = N if cell.inputs else data.draw(st.integers(1, 3))
    options = {flag: data.draw(st.booleans()) for flag in (cell.memory if flags is None else flags)}
    options["outputs_with_grads"] = data.draw(st.sampled_from(choices(cell)))
    return cell.but(
        steps=steps,
        batch=batch,
        lengths=data.draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch)),
        rank=data.draw(st.integers(1, 3)),
        seed=data.draw(st.integers(0, 99)),
        options=options,
    )
