"""The weights of an LSTM out of the workspace, and into it.

The LSTMUnit operator adds `forget_bias` to the forget gate. Elsewhere nothing does, so it is added to that gate of
`bias_ih` on the way out, and taken away from it on the way in. Where it is 0, all numbers stay what they are.
"""

from typing import Dict

import numpy as np
from caffe2.python import workspace

from caffe2_recurrent.exchange.layout import CAFFE2, WEIGHTS, LoopWeights, LSTMWeights, StackSizes, sizes_of
from caffe2_recurrent.exchange.lstm_in_net import LSTMInNet
from caffe2_recurrent.exchange.lstm_loop import LSTMLoop
from caffe2_recurrent.problems import Problems

FORGET_GATE = CAFFE2.index("f")


def fetch_weights(lstm: LSTMInNet, problems: Problems) -> LSTMWeights:
    """The weights as if there were no forget_bias. Raises `ValueError` for blobs that are missing or do not fit."""
    fetched = _fetch(lstm, problems)
    problems.raise_if_any()
    return [_with_forget_bias(weights, loop.forget_bias) for weights, loop in zip(fetched, lstm.loops)]


def fetch_sizes(lstm: LSTMInNet, problems: Problems) -> StackSizes:
    """The sizes of the LSTM, from its blobs. Raises `ValueError` as `fetch_weights`."""
    sizes = sizes_of(_fetch(lstm, problems), lstm.directions)
    problems.raise_if_any()
    return sizes


def feed_weights(lstm: LSTMInNet, weights: LSTMWeights, problems: Problems) -> None:
    """Set the blobs, as float32 and on the device of the current `DeviceScope`, or none of them.

    `weights` have the shapes of the blobs. Raises `ValueError` where a blob is shared and would get different values,
    and where these are beyond what float32 holds.
    """
    values: Dict[str, np.ndarray] = {}
    for loop, given in zip(lstm.loops, weights):
        for name, value in _with_forget_bias(given, -loop.forget_bias)._asdict().items():
            blob = loop.parameters[name]
            if blob in values and not np.array_equal(values[blob], value):
                problems.add("'{}' is shared by layers or directions whose {} differs", blob, name)
            values[blob] = value
    for blob, value in values.items():
        beyond = value[np.abs(value, dtype=np.float64) > np.finfo(np.float32).max]
        beyond = beyond[np.isfinite(beyond)]
        if beyond.size:
            problems.add("'{}' would get {}, which float32 cannot hold", blob, beyond[0])
    problems.raise_if_any()
    for blob, value in values.items():
        workspace.FeedBlob(blob, np.ascontiguousarray(value, dtype=np.float32))


def _with_forget_bias(weights: LoopWeights, forget_bias: float) -> LoopWeights:
    if forget_bias == 0:
        # Even adding 0 changes a bit, that of -0.
        return weights
    dim = weights.weight_hh.shape[1]
    bias = weights.bias_ih.astype(np.float32)
    bias[FORGET_GATE * dim : (FORGET_GATE + 1) * dim] += np.float32(forget_bias)
    return weights._replace(bias_ih=bias)


def _fetch(lstm: LSTMInNet, problems: Problems) -> LSTMWeights:
    found = [_fetch_loop(loop, problems) for loop in lstm.loops]
    problems.raise_if_any()
    weights = [LoopWeights(**loop) for loop in found]
    sizes = sizes_of(weights, lstm.directions)
    for loop, given, shapes in zip(lstm.loops, weights, sizes.shapes()):
        for name, shape in shapes.items():
            value = getattr(given, name)
            if value.shape != shape:
                problems.add(
                    "blob '{}' has shape {}; the {} of an LSTM of these sizes is {}",
                    loop.parameters[name],
                    list(value.shape),
                    name,
                    list(shape),
                )
    return weights


def _fetch_loop(loop: LSTMLoop, problems: Problems) -> Dict[str, np.ndarray]:
    return {name: _fetch_blob(blob, 2 if name in WEIGHTS else 1, problems) for name, blob in loop.parameters.items()}


def _fetch_blob(blob: str, axes: int, problems: Problems) -> np.ndarray:
    if not workspace.HasBlob(blob):
        problems.add("blob '{}' is not in the workspace; run the model's param_init_net first", blob)
        return np.zeros(0)
    value = workspace.FetchBlob(blob)
    if not isinstance(value, np.ndarray):
        problems.add("blob '{}' holds no tensor; run the model's param_init_net first", blob)
    elif value.ndim != axes or value.dtype.kind != "f":
        text = "blob '{}' is {} with {} axes; a parameter like it has floating point numbers and {}"
        problems.add(text, blob, value.dtype, value.ndim, axes)
    return value
