"""The weights of an LSTM as one value, whoever computes it; and the order in which each of them keeps its gates.

An LSTM has layers, a layer one direction or two, a direction the two products of a step and their biases:

    gates_t = weight_ih x_t + bias_ih + weight_hh hidden_{t-1} + bias_hh

All gates of a product lie one under the other along the first axis. With two directions a layer reads the hidden states
of both directions below it, the forward one first.
"""

import itertools
from typing import Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from caffe2_recurrent.problems import Problems

# i: input gate, f: forget gate, o: output gate, g: cell.
CAFFE2, TORCH, CUDNN, ONNX = "ifog", "ifgo", "ifgo", "iofg"

Shape = Tuple[int, ...]


class LoopWeights(NamedTuple):
    """One direction of one layer: `[4 D, width]`, `[4 D, D]`, `[4 D]`, `[4 D]`, gates in the order of Caffe2."""

    weight_ih: np.ndarray
    weight_hh: np.ndarray
    bias_ih: np.ndarray
    bias_hh: np.ndarray


# From the input on, the forward direction before the backward one.
LSTMWeights = List[LoopWeights]
WEIGHTS, BIASES = LoopWeights._fields[:2], LoopWeights._fields[2:]


class StackSizes(NamedTuple):
    """What fixes the shapes of all weights: the input's size, the states' in each layer, 1 direction or 2."""

    dim_in: int
    dims: Tuple[int, ...]
    directions: int

    def places(self) -> Iterator[Tuple[int, int]]:
        """(layer, direction) of each loop, in the order of `LSTMWeights`; the backward direction is 1."""
        return itertools.product(range(len(self.dims)), range(self.directions))

    def shapes(self) -> List[Dict[str, Shape]]:
        """The shape of each field of each loop."""
        found = []
        for layer, _ in self.places():
            width = self.dims[layer - 1] * self.directions if layer else self.dim_in
            rows = len(CAFFE2) * self.dims[layer]
            found.append(dict(zip(LoopWeights._fields, ((rows, width), (rows, self.dims[layer]), (rows,), (rows,)))))
        return found


def sizes_of(weights: LSTMWeights, directions: int) -> StackSizes:
    dims = tuple(loop.weight_hh.shape[1] for loop in weights[::directions])
    return StackSizes(weights[0].weight_ih.shape[1], dims, directions)


def check_one_size(sizes: StackSizes, theirs: str, problems: Problems) -> None:
    """Note layers of different sizes, which `theirs` does not have."""
    if len(set(sizes.dims)) > 1:
        problems.add("layers of {} have one size; those here have {}", theirs, list(sizes.dims))


def reordered(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """A copy of `values`, whose first axis has the gates in the order `source`, with them in the order `target`."""
    parts = dict(zip(source, np.split(values, len(source))))
    return np.concatenate([parts[gate] for gate in target])
