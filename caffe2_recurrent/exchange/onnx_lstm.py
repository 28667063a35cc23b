"""An LSTM in the operators of ONNX: a node LSTM for each layer, and what stands between and behind them.

    sequence --------> LSTM -> join directions -> LSTM -> join directions -> past the ends -> hidden_all, ...
    initial states -----^--------------------------^------------------------------^
    lengths ------------^--------------------------^------------------------------^

Past the end of a sequence LSTM gives 0, its last states are those before the end, and those of a sequence of length 0
are not what it started from. Our LSTM repeats its states there or, with drop_states, makes them 0; so that is put in
behind the last layer. What the other layers give past an end nobody reads.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from caffe2_recurrent.exchange.layout import CAFFE2, ONNX, LoopWeights, LSTMWeights, reordered, sizes_of
from caffe2_recurrent.exchange.lstm_in_net import LSTMInNet
from caffe2_recurrent.exchange.onnx_graph import Axes, OnnxGraph

# Symbolic axes: steps and sequences in the batch.
STEPS, BATCH = "T", "N"


class InitialState:
    """How many axes it has, its size, and its value where the model is to store it."""

    def __init__(self, array: np.ndarray, stored: bool) -> None:
        self.axes, self.dim = array.ndim, array.shape[-1]
        self.value = array.astype(np.float32) if stored else None


def lstm_model(onnx: Any, scope: str, lstm: LSTMInNet, weights: LSTMWeights, states: Mapping[str, InitialState]) -> Any:
    """The model of the LSTM under `scope`; `states` has each of its initial states by the name of its blob."""
    sizes, first = sizes_of(weights, lstm.directions), lstm.loops[0]
    named = [first.sequence, first.lengths, *states, *lstm.outputs]
    graph = OnnxGraph(onnx, scope + "/onnx/", [name for name in named if name is not None])
    sequence = graph.input(first.sequence, "FLOAT", [STEPS, BATCH, sizes.dim_in])
    lengths = None if first.lengths is None else graph.input(first.lengths, "INT32", [BATCH])
    axes = _Axes(graph, sequence)
    starts = {blob: _start(graph, blob, state, axes) for blob, state in states.items()}
    for index, layer in enumerate(lstm.layers):
        in_layer = weights[index * sizes.directions : (index + 1) * sizes.directions]
        initial = [_stacked(graph, [starts[loop.initial[state]] for loop in layer]) for state in (0, 1)]
        every, *last = _add_layer(graph, sequence, in_layer, lengths, initial)
        sequence = _steps(graph, every, in_layer)
    hidden, cell = (_joined(graph, state, in_layer) for state in last)
    ends = _Ends(sequence, hidden, cell)
    if lengths is not None and first.drop_states:
        ends = _dropped(graph, ends, lengths, axes)
    elif lengths is not None:
        ends = _kept(graph, ends, [_joined(graph, state, in_layer) for state in initial], lengths, axes)
    for value, name, steps in (
        (ends.hidden_all, lstm.outputs.hidden_all, STEPS),
        (ends.hidden_last, lstm.outputs.hidden_last, 1),
        (ends.cell_last, lstm.outputs.cell_last, 1),
    ):
        if name is not None:
            graph.output(value, name, [steps, BATCH, sizes.directions * sizes.dims[-1]])
    return graph.model(scope, "an LSTM of Caffe2; T steps, N sequences in the batch")


class _Axes:
    """T and N as a sequence has them when the model runs."""

    def __init__(self, graph: OnnxGraph, sequence: str) -> None:
        self._graph, self._sequence = graph, sequence

    def steps(self) -> str:
        """A number, int32 as lengths are."""
        steps = self._graph.add("Gather", [self._shape(), self._graph.number(np.int64(0))], "steps")
        return self._graph.add("Cast", [steps], "steps", to=self._graph.int32)

    def batch(self) -> str:
        """`[1]` int64, a part of a shape."""
        return self._graph.add("Gather", [self._shape(), self._graph.integers(1)], "batch")

    def _shape(self) -> str:
        return self._graph.add("Shape", [self._sequence], "shape")


class _Ends(NamedTuple):
    """What comes out in the end: `[T, N, width]` and, the last ones, `[1, N, width]`."""

    hidden_all: str
    hidden_last: str
    cell_last: str


def _start(graph: OnnxGraph, blob: str, state: InitialState, axes: _Axes) -> str:
    """An initial state as `[1, N, D]`, an input or stored."""
    shapes: Dict[int, Axes] = {1: [state.dim], 2: [BATCH, state.dim], 3: [1, BATCH, state.dim]}
    stored = state.value
    value = graph.input(blob, "FLOAT", shapes[state.axes]) if stored is None else graph.constant("start", stored)
    if state.axes == 3:
        return value
    if state.axes == 2:
        return graph.add("Unsqueeze", [value, graph.integers(0)], "start")
    wanted = graph.add("Concat", [graph.integers(1), axes.batch(), graph.integers(state.dim)], "start_shape", axis=0)
    return graph.add("Expand", [value, wanted], "start")


def _stacked(graph: OnnxGraph, states: Sequence[str]) -> str:
    """`[1, N, D]` of each direction -> `[directions, N, D]`"""
    return graph.add("Concat", states, "starts", axis=0) if len(states) > 1 else states[0]


def _add_layer(
    graph: OnnxGraph, sequence: str, weights: Sequence[LoopWeights], lengths: Optional[str], initial: Sequence[str]
) -> List[str]:
    """The LSTM node of a layer: `[T, directions, N, D]`, and `[directions, N, D]` of the last hidden and cell state."""
    turned = [LoopWeights(*(reordered(values, CAFFE2, ONNX) for values in loop)) for loop in weights]
    stacked = {
        "W": [loop.weight_ih for loop in turned],
        "R": [loop.weight_hh for loop in turned],
        "B": [np.concatenate([loop.bias_ih, loop.bias_hh]) for loop in turned],
    }
    constants = [graph.constant(name, np.stack(values).astype(np.float32)) for name, values in stacked.items()]
    return graph.add_several(
        "LSTM",
        [sequence, *constants, lengths or "", *initial],
        ["Y", "Y_h", "Y_c"],
        hidden_size=_dim(weights),
        direction="forward" if len(weights) == 1 else "bidirectional",
    )


def _dim(weights: Sequence[LoopWeights]) -> int:
    return int(weights[0].weight_hh.shape[1])


def _steps(graph: OnnxGraph, every: str, weights: Sequence[LoopWeights]) -> str:
    """`[T, directions, N, D]` of a layer -> `[T, N, directions * D]`"""
    if len(weights) == 1:
        return graph.add("Squeeze", [every, graph.integers(1)], "steps")
    turned = graph.add("Transpose", [every], "turned", perm=[0, 2, 1, 3])
    # 0 keeps the size of an axis.
    return graph.add("Reshape", [turned, graph.integers(0, 0, 2 * _dim(weights))], "steps")


def _joined(graph: OnnxGraph, state: str, weights: Sequence[LoopWeights]) -> str:
    """`[directions, N, D]` of a layer -> `[1, N, directions * D]`"""
    if len(weights) == 1:
        return state
    turned = graph.add("Transpose", [state], "turned", perm=[1, 0, 2])
    return graph.add("Reshape", [turned, graph.integers(1, -1, 2 * _dim(weights))], "joined")


def _kept(graph: OnnxGraph, ends: _Ends, initial: Sequence[str], lengths: str, axes: _Axes) -> _Ends:
    """States past the end of a sequence are the last ones before it, or the initial ones where there are none."""
    begun = _of_sequences(graph, "Greater", lengths, graph.number(np.int32(0)))
    hidden, cell = (
        graph.add("Where", [begun, last, start], "kept")
        for last, start in zip((ends.hidden_last, ends.cell_last), initial)
    )
    return _Ends(graph.add("Where", [_inside(graph, lengths, axes), ends.hidden_all, hidden], "kept"), hidden, cell)


def _dropped(graph: OnnxGraph, ends: _Ends, lengths: str, axes: _Axes) -> _Ends:
    """States past the end of a sequence are 0, and so are the last ones of a sequence that ends before T."""
    zero = graph.number(np.float32(0))
    whole = _of_sequences(graph, "Equal", lengths, axes.steps())
    hidden, cell = (graph.add("Where", [whole, last, zero], "dropped") for last in (ends.hidden_last, ends.cell_last))
    return _Ends(graph.add("Where", [_inside(graph, lengths, axes), ends.hidden_all, zero], "dropped"), hidden, cell)


def _of_sequences(graph: OnnxGraph, comparison: str, lengths: str, value: str) -> str:
    """`[1, N, 1]`: how the length of each sequence compares."""
    return graph.add("Unsqueeze", [graph.add(comparison, [lengths, value], "compared"), graph.integers(0, 2)], "which")


def _inside(graph: OnnxGraph, lengths: str, axes: _Axes) -> str:
    """`[T, N, 1]`: whether a step is within its sequence."""
    first, stride = graph.number(np.int32(0)), graph.number(np.int32(1))
    numbers = graph.add("Range", [first, axes.steps(), stride], "numbers")
    column = graph.add("Unsqueeze", [numbers, graph.integers(1)], "column")
    return graph.add("Unsqueeze", [graph.add("Less", [column, lengths], "before_end"), graph.integers(2)], "inside")
