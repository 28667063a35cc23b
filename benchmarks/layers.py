"""The layers that are timed: Caffe2's own, ours, and ours optimised, each a net in a workspace of its own."""

import itertools
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, gru_cell, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper

import caffe2_recurrent
from measuring import current_threads
from other_interpreter import value_shapes

TRAINING, FORWARD = "training", "forward"
PASSES = (TRAINING, FORWARD)

STOCK, OURS, OPTIMISED = "stock Caffe2", "ours", "ours optimised"
MAKERS = (STOCK, OURS, OPTIMISED)

SCOPE = "layer"
LOOPS = ("RecurrentNetwork", "RecurrentNetworkGradient")
# Of the largest number of a result.
TOLERANCE = 1e-4


class Shape(NamedTuple):
    """T steps, N sequences, I numbers in an input element, D in a state."""

    steps: int
    batch: int
    dim_in: int
    dim: int

    def __str__(self) -> str:
        return ",".join(str(size) for size in self)


class Cell(NamedTuple):
    """How a kind of layer is built, stock and by us, and which blobs it reads beside its parameters.

    `gradients` are the positions of the outputs that receive a gradient.
    """

    stock: Callable[..., Sequence[core.BlobReference]]
    ours: Callable[..., Sequence[core.BlobReference]]
    inputs: Callable[[Shape], Dict[str, Tuple[int, ...]]]
    outputs: Sequence[str]
    gradients: Sequence[int] = (0,)


# -------------------------------------------------------------------------------------------------------------- cells


def _lstm_inputs(shape: Shape) -> Dict[str, Tuple[int, ...]]:
    return {
        "x": (shape.steps, shape.batch, shape.dim_in),
        "hidden": (shape.batch, shape.dim),
        "cell": (shape.batch, shape.dim),
    }


def _gru_inputs(shape: Shape) -> Dict[str, Tuple[int, ...]]:
    inputs = _lstm_inputs(shape)
    del inputs["cell"]
    return inputs


def _with_lengths(inputs: Callable[[Shape], Dict[str, Tuple[int, ...]]]) -> Callable[[Shape], Dict[str, Any]]:
    return lambda shape: dict(inputs(shape), lengths=(shape.batch,))


def _attention_inputs(shape: Shape) -> Dict[str, Tuple[int, ...]]:
    """The encoder has as many steps as the decoder, and states of the same size."""
    return dict(_lstm_inputs(shape), context=(shape.batch, shape.dim), encoder=(shape.steps, shape.batch, shape.dim))


def _sequence_layer(
    builder: Callable[..., Any], states: Sequence[str], lengths: Optional[str] = None
) -> Callable[..., Any]:
    def build(model: ModelHelper, shape: Shape, forward_only: bool, memory_optimization: bool) -> Any:
        return builder(
            model, "x", lengths, tuple(states), shape.dim_in, shape.dim, SCOPE,
            memory_optimization=memory_optimization, forward_only=forward_only,
        )  # fmt: skip

    return build


def _with_attention(builder: Callable[..., Any]) -> Callable[..., Any]:
    def build(model: ModelHelper, shape: Shape, forward_only: bool, memory_optimization: bool) -> Any:
        return builder(
            model,
            decoder_inputs="x",
            decoder_input_lengths=None,
            initial_decoder_hidden_state="hidden",
            initial_decoder_cell_state="cell",
            initial_attention_weighted_encoder_context="context",
            encoder_output_dim=shape.dim,
            encoder_outputs="encoder",
            encoder_lengths=None,
            decoder_input_dim=shape.dim_in,
            decoder_state_dim=shape.dim,
            scope=SCOPE,
            lstm_memory_optimization=memory_optimization,
            attention_memory_optimization=memory_optimization,
            forward_only=forward_only,
        )

    return build


_STATES = ("hidden_all", "hidden_last", "cell_all", "cell_last")

CELLS: Dict[str, Cell] = {
    "LSTM": Cell(
        _sequence_layer(rnn_cell.LSTM, ["hidden", "cell"]),
        _sequence_layer(caffe2_recurrent.LSTM, ["hidden", "cell"]),
        _lstm_inputs,
        _STATES,
    ),
    "LSTMWithLengths": Cell(
        _sequence_layer(rnn_cell.LSTM, ["hidden", "cell"], "lengths"),
        _sequence_layer(caffe2_recurrent.LSTM, ["hidden", "cell"], "lengths"),
        _with_lengths(_lstm_inputs),
        _STATES,
    ),
    # Caffe2's does not do without lengths.
    "MILSTM": Cell(
        _sequence_layer(rnn_cell.MILSTM, ["hidden", "cell"], "lengths"),
        _sequence_layer(caffe2_recurrent.MILSTM, ["hidden", "cell"], "lengths"),
        _with_lengths(_lstm_inputs),
        _STATES,
    ),
    "LSTMWithAttention": Cell(
        _with_attention(rnn_cell.LSTMWithAttention),
        _with_attention(caffe2_recurrent.LSTMWithAttention),
        _attention_inputs,
        (*_STATES, "context_all", "context_last"),
        gradients=(0, 4),
    ),
    "GRU": Cell(
        _sequence_layer(gru_cell.GRU, ["hidden"]),
        _sequence_layer(caffe2_recurrent.GRU, ["hidden"]),
        _gru_inputs,
        ("hidden_all", "hidden_last"),
    ),
    "GRUWithLengths": Cell(
        _sequence_layer(gru_cell.GRU, ["hidden"], "lengths"),
        _sequence_layer(caffe2_recurrent.GRU, ["hidden"], "lengths"),
        _with_lengths(_gru_inputs),
        ("hidden_all", "hidden_last"),
    ),
}


# ------------------------------------------------------------------------------------------------------------- values


def lstm_values(shape: Shape) -> Dict[str, np.ndarray]:
    """What an LSTM reads, by plain name: the numbers that `Layer` feeds."""
    sizes = value_shapes(*shape)
    return {
        name: drawn(name, size, 1.0 if name in ("x", "hidden", "cell", "gradient_0") else _bound(shape))
        for name, size in sizes.items()
    }


def drawn(name: str, size: Sequence[int], bound: float) -> np.ndarray:
    """Uniform between -`bound` and `bound`; one name and size always get the same numbers."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return random.uniform(-bound, bound, size=size).astype(np.float32)


def plain(parameter: str) -> str:
    """A parameter's name without its scope, and as ours is called where Caffe2's is called otherwise."""
    name = parameter.split("/")[-1]
    return "attention_v" if name == "attention_logits_w" else name


def _bound(shape: Shape) -> float:
    """Of parameters, as torch starts an LSTM."""
    return float(1.0 / np.sqrt(shape.dim))


# ------------------------------------------------------------------------------------------------------------ the net


def optimizer() -> Optional[Callable[..., Any]]:
    """`caffe2_recurrent.optimize`, or None where the package has none."""
    found = getattr(caffe2_recurrent, "optimize", None)
    return found if callable(found) else None


_numbers: Set[int] = set()


def _are_constant(threads: int) -> bool:
    """Whether all nets of this process have been optimised with this number of threads so far."""
    _numbers.add(threads)
    return len(_numbers) == 1


class Layer:
    """A layer made by one of `MAKERS`, created and ready to run, until `close`.

    All layers have the same values under the same names, which is why each needs a workspace of its own.
    """

    _numbers = itertools.count()
    _free_workspaces: List[str] = []

    def __init__(
        self,
        cell: str,
        maker: str,
        shape: Shape,
        pass_: str,
        threads: int = 1,
        executor: bool = True,
        memory_optimization: bool = False,
        without: Sequence[str] = (),
        batch_parts: int = 1,
    ) -> None:
        self._cell, self._shape = CELLS[cell], shape
        self._outer = workspace.CurrentWorkspace()
        # A workspace cannot be removed, only emptied.
        free = Layer._free_workspaces
        self._workspace = free.pop() if free else "benchmark_{}".format(next(Layer._numbers))
        workspace.SwitchWorkspace(self._workspace, True)
        try:
            self._build(maker, pass_, threads, executor, memory_optimization, without, batch_parts)
        except BaseException:
            self.close()
            raise
        finally:
            workspace.SwitchWorkspace(self._outer)

    def _build(
        self,
        maker: str,
        pass_: str,
        threads: int,
        executor: bool,
        memory_optimization: bool,
        without: Sequence[str],
        batch_parts: int,
    ) -> None:
        cell, self.rewritten, self.is_parted = self._cell, 0, False
        self.model = ModelHelper("benchmark")
        build = cell.stock if maker == STOCK else cell.ours
        self._outputs = build(self.model, self._shape, pass_ == FORWARD, memory_optimization)
        self._gradients: Dict[Any, Any] = {}
        if pass_ == TRAINING:
            given = {
                self._outputs[position]: self.model.net.AddExternalInput("gradient_{}".format(position))
                for position in cell.gradients
            }
            self._gradients = self.model.AddGradientOperators(given)
        enable_executor(self.model.net, executor)
        fed = self._feed(pass_)
        if maker == OPTIMISED:
            optimize = optimizer()
            if optimize is None:
                raise RuntimeError("the package has no optimize")
            shapes = {name: list(value.shape) for name, value in fed.items()}
            options: Dict[str, Any] = {"without": without} if without else {}
            if batch_parts > 1:
                options["batch_parts"] = batch_parts
            promises = {"constant_threads": _are_constant(current_threads()), "constant_weights": pass_ == FORWARD}
            report = optimize(self.model, shapes=shapes, **promises, **options)
            self.rewritten, self.is_parted = report.total, bool(report.counts.get("batch_parts"))
        set_executor_threads(self.model.net, threads)
        workspace.CreateNet(self.model.net)
        self._net = self.model.net.Name()
        self._fed = list(fed)

    def _feed(self, pass_: str) -> Dict[str, np.ndarray]:
        values: Dict[str, np.ndarray] = {}
        for name, size in self._cell.inputs(self._shape).items():
            values[name] = drawn(name, size, 1.0)
        if "lengths" in values:
            # What a step does, it does for those that have ended too.
            values["lengths"] = np.full(self._shape.batch, self._shape.steps, np.int32)
        if pass_ == TRAINING:
            size = (self._shape.steps, self._shape.batch, self._shape.dim)
            for position in self._cell.gradients:
                name = "gradient_{}".format(position)
                values[name] = drawn(name, size, 1.0)
        workspace.RunNetOnce(self.model.param_init_net)
        for name in map(str, self.model.params):
            start = workspace.FetchBlob(name)
            noise = drawn(plain(name), start.shape, _bound(self._shape))
            # Vectors start at 0 or 1, which tells something about the layer; matrices start at random.
            values[name] = noise + start if start.ndim == 1 else noise
        for name, value in values.items():
            workspace.FeedBlob(name, value)
        return values

    def run(self, repeats: int) -> None:
        workspace.SwitchWorkspace(self._workspace)
        try:
            workspace.RunNet(self._net, repeats)
        finally:
            workspace.SwitchWorkspace(self._outer)

    def results(self) -> Dict[str, np.ndarray]:
        """Outputs, and gradients of all that is fed and has one, of one pass."""
        self.run(1)
        workspace.SwitchWorkspace(self._workspace)
        try:
            found = {name: workspace.FetchBlob(str(blob)) for name, blob in zip(self._cell.outputs, self._outputs)}
            by_name = {str(blob): gradient for blob, gradient in self._gradients.items()}
            for name in self._fed:
                if name in by_name:
                    found["gradient of " + plain(name)] = workspace.FetchBlob(str(by_name[name]))
        finally:
            workspace.SwitchWorkspace(self._outer)
        return found

    def kept_by_steps(self) -> List[int]:
        """Bytes that each step's workspace keeps and that are no view into an outer blob; for 10 steps at most. Where
        steps are written out, those of the blobs that only one of them computes.

        The executor, which has its own names for steps, must be off.
        """
        assert self._shape.steps <= 10
        self.run(1)
        workspace.SwitchWorkspace(self._workspace)
        try:
            written_out = list(filter(_is_written_out, self.model.net.Proto().op))
            return self._of_blobs(written_out[0]) if written_out else self._of_workspaces()
        finally:
            workspace.SwitchWorkspace(self._outer)

    def _of_workspaces(self) -> List[int]:
        loops = [operator for operator in self.model.net.Proto().op if operator.type == LOOPS[0]]
        linked = {blob for loop in loops for blob in _linked(loop, "link_internal")}
        kept = [0] * self._shape.steps
        for name in map(bytes.decode, caffe2_recurrent.retrieve_step_blobs(self.model.net, "kept")):
            # kept_<blob><step>, and a step is one digit here.
            blob, step = name[len("kept_") : -1], int(name[-1])
            if blob not in linked:
                kept[step] += workspace.FetchBlob(name).nbytes
        return kept

    def _of_blobs(self, chosen: caffe2_pb2.OperatorDef) -> List[int]:
        nets = {given.name: given.n for given in chosen.arg}
        (loop,) = nets["else_net"].op
        # Rows of these are what links show in the loop.
        stems = ["unrolled_{}".format(plain(outer)) for outer in _linked(loop, "link_external")]
        rows = {stem + ending for stem in stems for ending in ("_", "_view_")}
        by_stem: Dict[str, Dict[int, int]] = {}
        for name in {blob for operator in nets["then_net"].op for blob in operator.output}:
            stem, step = plain(name)[:-1], name[-1]
            if step.isdigit() and stem not in rows:
                by_stem.setdefault(stem, {})[int(step)] = workspace.FetchBlob(name).nbytes
        steps = range(self._shape.steps)
        own = [sizes for sizes in by_stem.values() if sorted(sizes) == list(steps)]
        return [sum(sizes[step] for sizes in own) for step in steps]

    def close(self) -> None:
        workspace.SwitchWorkspace(self._workspace)
        workspace.ResetWorkspace()
        workspace.SwitchWorkspace(self._outer)
        Layer._free_workspaces.append(self._workspace)


def _is_written_out(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it has the steps of a loop, and the loop itself for other numbers of steps; a product is an If too."""
    nets = [given.n for given in operator.arg if operator.type == "If" and given.name == "else_net"]
    return any(inside.type == LOOPS[0] for net in nets for inside in net.op)


def _linked(loop: caffe2_pb2.OperatorDef, name: str) -> List[str]:
    return [blob.decode() for given in loop.arg if given.name == name for blob in given.strings]


def enable_executor(net: core.Net, executor: bool) -> None:
    """Turn the RNN executor of all loops on or off."""
    for operator in net.Proto().op:
        if operator.type in LOOPS:
            for argument in operator.arg:
                if argument.name == "enable_rnn_executor":
                    argument.i = int(executor)


def set_executor_threads(net: core.Net, threads: int) -> None:
    """As many threads for the RNN executor as are measured, where `optimize` has not chosen their number."""
    for operator in net.Proto().op:
        if operator.type in LOOPS and all(given.name != "rnn_executor.num_threads" for given in operator.arg):
            caffe2_recurrent.set_rnn_executor_config(operator, num_threads=threads)


# --------------------------------------------------------------------------------------------------------- comparison


def difference(found: Dict[str, np.ndarray], expected: Dict[str, np.ndarray]) -> Optional[str]:
    """What `found` has that is not as in `expected`, in words; None if all that both have is the same.

    The same is: no number is off by more than `TOLERANCE` times the largest one.
    """
    shared = [name for name in expected if name in found]
    if not shared:
        return "nothing to compare"
    for name in shared:
        if found[name].shape != expected[name].shape:
            return "{} is {} instead of {}".format(name, found[name].shape, expected[name].shape)
        largest = float(np.abs(expected[name]).max()) if expected[name].size else 0.0
        off = float(np.abs(found[name] - expected[name]).max()) if expected[name].size else 0.0
        # Written so that what is no number is not the same either.
        if not off <= TOLERANCE * largest:
            return "{} is off by {:.1e}, where the largest number is {:.1e}".format(name, off, largest)
    return None
