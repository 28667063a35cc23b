"""The parameters of an LSTM gate by gate: their names, and setting them.

Gates lie in the order input, forget, output, cell along the first axis of a weight `[4 D, dim_in]` or bias `[4 D]`,
which is the order that the LSTMUnit operator expects; D is the size of the states.
"""

import collections.abc
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np
from caffe2.python import workspace

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.arguments import Blob, is_blob
from caffe2_recurrent.problems import Problems, given, given_array, names

GATES = ("input_gate", "forget_gate", "output_gate", "cell")
# The two products of an LSTM, with its input and with its previous state.
SIDES = ("input", "recurrent")
ROLES = ("weights", "biases")


def GetLSTMParamNames() -> Dict[str, List[str]]:  # noqa: N802
    """What the weights `[D, dim_in]` and biases `[D]` of the single gates of an LSTM are called.

    Returns:
        `{'weights': [...], 'biases': [...]}`, four names each, in the order input, forget, output, cell, in which
        `LSTMUnit` and the parameters of `LSTM` have their gates.
    """
    return {"weights": [gate + "_w" for gate in GATES], "biases": [gate + "_b" for gate in GATES]}


def InitFromLSTMParams(  # noqa: N802
    lstm_pblobs: Mapping[str, Mapping[str, Blob]], param_values: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set the parameters of an `LSTM` in the workspace from those of its gates.

    Args:
        lstm_pblobs: what `LSTM(..., return_params=True)` returns last, with several layers or directions one entry of
            it: `{'input': {'weights', 'biases'}, 'recurrent': {'weights', 'biases'}}`. The blobs must be in the
            workspace already; each keeps its shape, `[4 D, dim_in]` or `[4 D]`.
        param_values: `{'input': {name: array}, 'recurrent': {name: array}}`, or one of the two, with all names of
            `GetLSTMParamNames`. Weights `[D, dim_in]` or the same numbers in a row, biases `[D]`, as fetched from the
            net that `cudnn_LSTM` returns. Axes of size 1 are ignored.

    The blobs are written as float32, on the device of the current `DeviceScope`.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: names that are missing or unknown, sizes that do not fit, blobs that are not in the workspace, all
            in one error. Nothing has been written then.
    """
    _check_types(lstm_pblobs, param_values)
    problems = Problems("InitFromLSTMParams")
    _check_sides(lstm_pblobs, param_values, problems)
    stacked: List[Tuple[str, np.ndarray]] = []
    for side in (side for side in SIDES if side in param_values):
        check_gate_names("param_values['{}']".format(side), param_values[side], problems)
        for role, gates in GetLSTMParamNames().items():
            blob = lstm_pblobs.get(side, {}).get(role)
            value = None if blob is None else _stack(blob, side, gates, param_values[side], problems)
            if value is not None:
                stacked.append((str(blob), value))
    problems.raise_if_any()
    for name, value in stacked:
        workspace.FeedBlob(name, value)


def _stack(
    blob: Blob, side: str, gates: List[str], values: Mapping[str, np.ndarray], problems: Problems
) -> Optional[np.ndarray]:
    """The gates one under the other in the shape of `blob`, or None where something does not fit."""
    shape = _current_shape(blob, problems)
    if shape is None:
        return None
    gate_shape = (shape[0] // len(GATES),) + shape[1:]
    there = [gate for gate in gates if gate in values]
    fitting = [gate for gate in there if _fits(blob, gate_shape, side, gate, values[gate], problems)]
    if fitting != gates:
        return None
    return np.concatenate([values[gate].reshape(gate_shape) for gate in gates]).astype(np.float32)


def _fits(blob: Blob, expected: Tuple[int, ...], side: str, gate: str, array: np.ndarray, problems: Problems) -> bool:
    # cuDNN's weights come as [1, D * dim_in, 1]; a matrix with its axes swapped has the right size as well.
    axes = [size for size in array.shape if size != 1]
    matrix = [size for size in expected if size != 1]
    if array.size == np.prod(expected) and (len(axes) < 2 or axes == matrix):
        return True
    problems.add(
        "param_values['{}']['{}'] has shape {}; a gate of '{}' takes {}",
        side,
        gate,
        list(array.shape),
        blob,
        list(expected),
    )
    return False


def _current_shape(blob: Blob, problems: Problems) -> Optional[Tuple[int, ...]]:
    if not workspace.HasBlob(str(blob)):
        problems.add("blob '{}' is not in the workspace; run the model's param_init_net first", blob)
        return None
    shape = workspace_blobs.shape(str(blob))
    if shape is None:
        problems.add("blob '{}' holds no tensor; run the model's param_init_net first", blob)
        return None
    if not shape or shape[0] % len(GATES):
        problems.add("blob '{}' has shape {}, which is not that of four gates", blob, list(shape))
        return None
    return shape


def _check_sides(lstm_pblobs: Mapping[str, Any], param_values: Mapping[str, Any], problems: Problems) -> None:
    unknown = [side for side in param_values if side not in SIDES]
    if unknown:
        problems.add("param_values has {}; it takes {}", names(unknown), names(SIDES))
    for side in SIDES:
        missing = [role for role in ROLES if role not in lstm_pblobs.get(side, {})]
        if side in param_values and missing:
            problems.add("lstm_pblobs has no {} for '{}'", names(missing), side)


def check_gate_names(role: str, values: Mapping[Any, Any], problems: Problems) -> None:
    """Notes what a dict for the gates of one side, called `role`, lacks or has beyond `GetLSTMParamNames`."""
    expected = [gate for of_role in ROLES for gate in GetLSTMParamNames()[of_role]]
    missing = [gate for gate in expected if gate not in values]
    unknown = [gate for gate in values if gate not in expected]
    if missing:
        problems.add("{} lacks {}", role, names(missing))
    if unknown:
        problems.add("{} has {}; GetLSTMParamNames lists what it takes", role, names(unknown))


def _check_types(lstm_pblobs: Any, param_values: Any) -> None:
    problems = Problems("InitFromLSTMParams")
    for side, blobs in _sides("lstm_pblobs", lstm_pblobs, problems):
        for role, blob in blobs.items():
            if not is_blob(blob):
                problems.add("lstm_pblobs['{}']['{}'] must be a blob or its name; got {}", side, role, given(blob))
    for side, values in _sides("param_values", param_values, problems):
        for gate, value in values.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
                text = "param_values['{}']['{}'] must be a numpy array of real numbers; got {}"
                problems.add(text, side, gate, given_array(value))
    problems.raise_if_any(TypeError)


def _sides(role: str, value: Any, problems: Problems) -> List[Tuple[Any, Mapping[Any, Any]]]:
    """The entries of a dict of dicts; notes whatever is not one."""
    if not isinstance(value, collections.abc.Mapping):
        # As LSTM returns it for several loops.
        of_loops = isinstance(value, list) and bool(value) and isinstance(value[0], collections.abc.Mapping)
        hint = "; pass one of its entries at a time, each is of one layer and direction" if of_loops else ""
        problems.add("{} must be a dict of dicts; got {}{}", role, given(value), hint)
        return []
    sides = []
    for side, content in value.items():
        if isinstance(content, collections.abc.Mapping):
            sides.append((side, content))
        else:
            problems.add("{}['{}'] must be a dict; got {}", role, side, given(content))
    return sides
