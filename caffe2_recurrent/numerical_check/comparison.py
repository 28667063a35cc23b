"""Both gradients of each blob, and where they are farthest apart."""

import math
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.numerical_check.report import BlobCheck, GradientReport
from caffe2_recurrent.numerical_check.roles import INPUT, read_roles
from caffe2_recurrent.numerical_check.settings import Settings
from caffe2_recurrent.numerical_check.slopes import Index, Slope, slope
from caffe2_recurrent.numerical_check.trial import Trial
from caffe2_recurrent.problems import Problems, first_line

ROUNDING = 3e-5
# Of float32, for large outputs, divided by the step: with the default one and outputs of 1, as much as ROUNDING.
ROUNDINGS = 4


def compare(
    net: caffe2_pb2.NetDef,
    values: Mapping[str, Any],
    outputs: Sequence[str],
    blobs: Sequence[str],
    settings: Settings,
) -> GradientReport:
    """Check `blobs`, in the current workspace."""
    trial = Trial(net, values, outputs)
    at_rest = _outputs(trial, outputs)
    weights = _weights(at_rest, settings.seed)
    analytic = trial.gradients(weights)
    roles = read_roles(net)
    random = np.random.RandomState(settings.seed)
    checks = []
    for blob in blobs:
        places = _places(values[blob].shape, settings.most_elements, random)
        slopes = [slope(trial.outputs, weights, blob, values[blob], place, settings.step) for place in places]
        numerical = np.array([found.value for found in slopes])
        own = _own_gradient(analytic.get(blob), places)
        atol = _rounding(weights, slopes, settings.step) if settings.atol is None else settings.atol
        allowed = atol + settings.rtol * float(np.max(np.abs(numerical), initial=0.0))
        worst = _worst(own, numerical)
        checks.append(
            BlobCheck(
                blob=blob,
                role=roles.get(blob, INPUT),
                checked=len(places),
                elements=values[blob].size,
                worst=places[worst],
                analytic=float(own[worst]),
                numerical=float(numerical[worst]),
                allowed=allowed,
                disagreement=slopes[worst].disagreement,
                missing=blob not in analytic,
            )
        )
    return GradientReport(checks)


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


def _worst(own: np.ndarray, numerical: np.ndarray) -> int:
    # A gradient that is no number is the worst there is.
    return int(np.argmax(np.nan_to_num(np.abs(own - numerical), nan=np.inf, posinf=np.inf)))
