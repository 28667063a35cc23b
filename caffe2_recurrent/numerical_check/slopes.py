"""Numerical gradients of a net that computes in float32.

The loss is a weighted sum of the outputs. It is never rounded to float32: the outputs are subtracted, weighted and
added in float64, so that only the rounding within the net is left. Central differences of steps h and 2 h cancel the
error of second order (Richardson):

    D(h) = (loss(x + h) - loss(x - h)) / 2 h        gradient = (4 D(h) - D(2 h)) / 3
"""

import math
from typing import Callable, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

Index = Tuple[int, ...]
# The outputs in float64 for given values of some inputs.
Function = Callable[[Mapping[str, np.ndarray]], List[np.ndarray]]


class Slope(NamedTuple):
    """The numerical gradient at one element, and how far apart those of the two steps are.

    `size` is that of what has changed: the root of the sum of squares of these weighted elements of the outputs.
    """

    value: float
    disagreement: float
    size: float


def slope(
    function: Function, weights: Sequence[np.ndarray], blob: str, value: np.ndarray, index: Index, step: float
) -> Slope:
    """The gradient at element `index` of input `blob`."""
    (near, of_near), (far, of_far) = (_central(function, weights, blob, value, index, by) for by in (step, 2 * step))
    return Slope((4 * near - far) / 3, abs(near - far), max(of_near, of_far))


def is_moved(value: np.ndarray, step: float) -> np.ndarray:
    """Whether float32 changes each element by the step."""
    return value + np.float32(step) != value - np.float32(step)


def _central(
    function: Function, weights: Sequence[np.ndarray], blob: str, value: np.ndarray, index: Index, step: float
) -> Tuple[float, float]:
    """The slope, and the size of what has changed."""
    moved = value.copy()
    moved[index] = value[index] + step
    above, after = float(moved[index]), function({blob: moved})
    moved[index] = value[index] - step
    below, before = float(moved[index]), function({blob: moved})
    change = sum(float(np.vdot(weight, a - b)) for weight, a, b in zip(weights, after, before))
    changed = sum(float(np.square((weight * a)[a != b]).sum()) for weight, a, b in zip(weights, after, before))
    # What was added is what float32 made of the step.
    return change / (above - below), math.sqrt(changed)
