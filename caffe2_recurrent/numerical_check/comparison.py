"""Both gradients of each blob, and where they are farthest apart."""

import functools
import math
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.numerical_check.report import BlobCheck, GradientReport
from caffe2_recurrent.numerical_check.roles import INPUT, read_roles
from caffe2_recurrent.numerical_check.settings import Settings
from caffe2_recurrent.numerical_check.slopes import Index, Slope, slope
from caffe2_recurrent.numerical_check.smaller_steps import agreement
from caffe2_recurrent.numerical_check.trial import Trial
from caffe2_recurrent.problems import Problems, first_line

ROUNDING = 3e-5
# Of float32, for large outputs, divided by the step: with the default one and outputs of 1, as much as ROUNDING.
ROUNDINGS = 4


class Elements(NamedTuple):
    """Numerical gradients, how far those of the net may be apart, and how many are of smaller steps, as for a kink."""

    slopes: List[Slope]
    allowed: np.ndarray
    near_kinks: int


def compare(
    net: caffe2_pb2.NetDef,
    values: Mapping[str, Any],
    outputs: Sequence[str],
    blobs: Sequence[str],
    settings: Settings,
) -> GradientReport:
    """Check `blobs`, in the current workspace."""
    trial = Trial(net, values, outputs)
    weights = _weights(_outputs(trial, outputs), settings.seed)
    analytic = trial.gradients(weights)
    roles = read_roles(net)
    random = np.random.RandomState(settings.seed)
    checks = []
    for blob in blobs:
        places = _places(values[blob].shape, settings.most_elements, random)
        own = _own_gradient(analytic.get(blob), places)
        look = functools.partial(slope, trial.outputs, weights, blob, values[blob])
        found = _elements(look, values[blob], places, own, weights, settings)
        worst = _worst(own, found)
        checks.append(
            BlobCheck(
                blob=blob,
                role=roles.get(blob, INPUT),
                checked=len(places),
                elements=values[blob].size,
                worst=places[worst],
                analytic=float(own[worst]),
                numerical=found.slopes[worst].value,
                allowed=float(found.allowed[worst]),
                disagreement=found.slopes[worst].disagreement,
                missing=blob not in analytic,
                near_kinks=found.near_kinks,
            )
        )
    return GradientReport(checks)


def _elements(
    look: Callable[[Index, float], Slope],
    value: np.ndarray,
    places: Sequence[Index],
    own: np.ndarray,
    weights: Sequence[np.ndarray],
    settings: Settings,
) -> Elements:
    """The numerical gradients of one blob; where they are not the `own` ones, by smaller steps if these agree."""
    slopes = [look(place, settings.step) for place in places]
    numerical = np.array([found.value for found in slopes])
    relative = settings.rtol * float(np.max(np.abs(numerical), initial=0.0))
    atol = _rounding(weights, slopes, settings.step) if settings.atol is None else settings.atol
    allowed = np.full(len(places), atol + relative)

    def error(found: Slope, step: float) -> float:
        return max(_rounding(weights, [found], step), settings.atol or 0.0)

    difference = np.abs(own - numerical)
    near_kinks = 0
    for element in np.argsort(-difference):
        place = places[element]
        if not difference[element] > allowed[element]:
            break
        there = functools.partial(look, place)
        agreed = agreement(there, error, value[place], own[element], difference[element], relative, settings.step)
        if agreed is None:
            # The gradient is wrong, whatever the others are.
            break
        slopes[element], allowed[element] = agreed
        near_kinks += 1
    return Elements(slopes, allowed, near_kinks)


def _outputs(trial: Trial, outputs: Sequence[str]) -> List[np.ndarray]:
    """The outputs at the values that were given; they must be the same in every run."""
    problems = Problems("gradcheck")
    try:
        first, second = trial.outputs({}), trial.outputs({})
    except RuntimeError as error:
        raise ValueError(
            "gradcheck: the net does not run: {}; its inputs are {}".format(first_line(error), _described(trial.values))
        ) from error
    for output, before, after in zip(outputs, first, second):
        if not np.isfinite(before).all():
            problems.add("output '{}' has elements that are not finite at these values", output)
        elif not np.array_equal(before, after):
            problems.add("output '{}' changes from run to run; take what draws random numbers out of the net", output)
    problems.raise_if_any()
    return first


def _described(values: Mapping[str, Any]) -> str:
    tensors = {blob: value for blob, value in values.items() if isinstance(value, np.ndarray)}
    return ", ".join("'{}' {} {}".format(blob, value.dtype, list(value.shape)) for blob, value in tensors.items())


def _weights(outputs: Sequence[np.ndarray], seed: int) -> List[np.ndarray]:
    random = np.random.RandomState(seed)
    return [random.standard_normal(output.shape).astype(np.float32) for output in outputs]


def _rounding(weights: Sequence[np.ndarray], slopes: Sequence[Slope], step: float) -> float:
    """Several times the error of a slope, measured to grow like this from 40 to 40,000 elements.

    That is for elements of about 1. Of larger ones float32 keeps less, down to a loss that is one large number.
    """
    elements = math.sqrt(sum(weight.size for weight in weights))
    size = max((found.size for found in slopes), default=0.0)
    return max(ROUNDING * elements, ROUNDINGS * float(np.finfo(np.float32).eps) * size / step)


def _places(shape: Tuple[int, ...], most: int, random: np.random.RandomState) -> List[Index]:
    """The elements to check: all, or as many as may be, drawn at random."""
    size = int(np.prod(shape))
    flat = np.arange(size) if size <= most else np.sort(random.choice(size, most, replace=False))
    return [tuple(int(axis) for axis in np.unravel_index(element, shape)) for element in flat]


def _own_gradient(gradient: Optional[np.ndarray], places: Sequence[Index]) -> np.ndarray:
    return np.array([0.0 if gradient is None else gradient[place] for place in places], dtype=np.float64)


def _worst(own: np.ndarray, found: Elements) -> int:
    difference = np.abs(own - [slope.value for slope in found.slopes])
    # A gradient that is no number is the worst there is.
    return int(np.argmax(np.where(np.isfinite(difference), difference - np.nan_to_num(found.allowed), np.inf)))
