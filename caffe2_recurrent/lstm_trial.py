"""Whether a small LSTM can really be built, run and differentiated here, and comes to numpy's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from caffe2_recurrent import installation

TOLERANCE = 1e-5
SLOPE_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Trial:
    """How a small LSTM fared: `trouble` in plain words, or how close it came to numpy's values."""

    trouble: str | None = None
    value_error: float = float("nan")
    slope_error: float = float("nan")


def try_network() -> Trial:
    """Build a small LSTM, run it with its gradient, and compare both with numpy."""
    # It imports Caffe2, which is what the doctor may find missing.
    from caffe2_recurrent.scratch_workspace import scratch_workspace

    with scratch_workspace("caffe2_recurrent_doctor"):
        try:
            network = _build()
        # Whatever it is that fails here, telling it is what the doctor is for.
        except Exception as error:
            return Trial(f"an LSTM could not be built: {installation.reason(error)}")
        try:
            value_error, slope_error = _run(*network)
        except Exception as error:
            return Trial(f"an LSTM was built, but did not run: {installation.reason(error)}")
    # Written so that a NaN fails.
    if not value_error <= TOLERANCE:
        return Trial(f"an LSTM ran, but its values are off by {value_error:.1e}", value_error, slope_error)
    if not slope_error <= SLOPE_TOLERANCE:
        return Trial(f"an LSTM ran, but its gradient is off by {slope_error:.1%}", value_error, slope_error)
    return Trial(None, value_error, slope_error)


# T steps of N sequences, from I features to D.
_T, _N, _I, _D = 4, 2, 3, 5
_WEIGHTS = ("i2h_w", "i2h_b", "gates_t_w", "gates_t_b")


def _build() -> tuple[Any, Any, dict[Any, Any]]:
    from caffe2.python.model_helper import ModelHelper

    from caffe2_recurrent import LSTM

    model = ModelHelper(name="doctor")
    x, lengths, hidden, cell = model.net.AddExternalInputs("x", "lengths", "hidden", "cell")
    hidden_all, _, _, _ = LSTM(model, x, lengths, (hidden, cell), _I, _D, scope="doctor")
    loss = model.net.SumElements(hidden_all, "loss")
    return model, hidden_all, model.AddGradientOperators([loss])


def _run(model: Any, hidden_all: Any, gradients: dict[Any, Any]) -> tuple[float, float]:
    """Return how far the values are from numpy's, and how far, relatively, the slope is from the gradient."""
    import numpy as np
    from caffe2.python import workspace

    numbers = np.random.RandomState(0)
    x = numbers.randn(_T, _N, _I).astype(np.float32)
    state = np.zeros((_N, _D), np.float32)
    feeds = {"x": x, "lengths": np.full(_N, _T, np.int32), "hidden": state, "cell": state}
    for name, value in feeds.items():
        workspace.FeedBlob(name, value)
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)

    weights = [workspace.FetchBlob(f"doctor/{name}").astype(np.float64) for name in _WEIGHTS]
    value_error = float(np.abs(workspace.FetchBlob(hidden_all) - _lstm_in_numpy(x, *weights)).max())

    # Walking along the gradient must raise the loss at a rate of its squared length.
    slopes = [workspace.FetchBlob(gradients[f"doctor/{name}"]) for name in _WEIGHTS]
    expected = sum(float((slope.astype(np.float64) ** 2).sum()) for slope in slopes)
    step = 1e-4
    ahead, behind = (
        _lstm_in_numpy(x, *[w + side * step * slope for w, slope in zip(weights, slopes)]).sum() for side in (1, -1)
    )
    measured = float(ahead - behind) / (2 * step)
    # A gradient of zero is no gradient: it must not pass as one that fits.
    slope_error = abs(measured - expected) / expected if expected > 0 else float("inf")
    return value_error, slope_error


def _lstm_in_numpy(x: Any, input_w: Any, input_b: Any, state_w: Any, state_b: Any) -> Any:
    """Return all hidden states `[T, N, D]` from a zero start; gates lie as input, forget, output, cell."""
    import numpy as np

    def sigmoid(gate: Any) -> Any:
        return 1 / (1 + np.exp(-gate))

    hidden = cell = np.zeros((_N, _D))
    hiddens = []
    for x_t in x:
        gates = x_t @ input_w.T + input_b + hidden @ state_w.T + state_b
        take, keep, show, candidate = np.split(gates, 4, axis=-1)
        cell = sigmoid(keep) * cell + sigmoid(take) * np.tanh(candidate)
        hidden = sigmoid(show) * np.tanh(cell)
        hiddens.append(hidden)
    return np.stack(hiddens)
