"""An LSTM of a net written as an ONNX model."""

import os
from typing import Dict, Mapping, Union

import numpy as np
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import files
from caffe2_recurrent.arguments import outer_name
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.exchange.caffe2_blobs import fetch_weights
from caffe2_recurrent.exchange.layout import LSTMWeights
from caffe2_recurrent.exchange.lstm_in_net import LSTMInNet, find_one
from caffe2_recurrent.exchange.onnx_graph import require_onnx
from caffe2_recurrent.exchange.onnx_lstm import InitialState, lstm_model
from caffe2_recurrent.nets import AnyNet, read_net
from caffe2_recurrent.problems import Problems

# What LSTM calls initial states that are its parameters.
OWN_STATES = ("initial_hidden_state", "initial_cell_state")


def export_onnx(path: Union[str, "os.PathLike[str]"], net: AnyNet, scope: str) -> None:
    """Write an LSTM as an ONNX model with the operator LSTM, which gives what the net gives.

    All layers and directions under `scope` are exported, and nothing else of the net. The inputs and outputs of the
    model are called as the blobs are. Inputs:

        the sequence        float32 `[T, N, dim_in]`
        the lengths         int32 `[N]`, from 0 to T; if the LSTM has them
        initial states      float32 `[D]`, `[N, D]` or `[1, N, D]`, as they lie in the workspace. States that are
                            parameters are stored in the model instead: those of a `ModelHelper`, in other nets those
                            called `initial_hidden_state` or `initial_cell_state`.

    Outputs: hidden_all `[T, N, D]`, hidden_last and cell_last `[1, N, D]`, 2 D with two directions, with and without
    drop_states what `LSTM` returns past the ends of sequences too. ONNX has no output for the cells of all steps, so
    cell_all is left out, as is dropout.

    The weights of ONNX are W `[directions, 4 D, width]`, R `[directions, 4 D, D]`, B `[directions, 8 D]` (those of W,
    then those of R), gates in the order input, output, forget, cell; forget_bias is added to the forget gate in B.

    Args:
        path: of the file, whose content is replaced in one go.
        net: a model, its net or a `NetDef`, with the LSTM as it was built; `optimize` comes later.
        scope: under which the LSTM was built, below the current `NameScope`.

    Raises:
        ImportError: there is no package onnx.
        TypeError: all arguments that are of the wrong type.
        ValueError: no such LSTM in the net, or several, or none of its outputs but cell_all; blobs that are missing or
            do not fit; all of them.
        OSError: the file cannot be written. Whatever fails, a file that was there is as it was.

    The model needs opset 14. Source of the layout: the operator LSTM of ONNX, version 14.
    """
    checks = Checks("export_onnx")
    proto, scope = read_net("net", net, checks.types), checks.scope(scope)
    file = files.read_path(path, checks.types)
    checks.done()
    assert proto is not None
    onnx = require_onnx("export_onnx")
    scope = outer_name(scope)
    lstm = find_one(proto, scope, checks.values)
    states = _fetch_states(lstm, net, checks.values)
    weights = fetch_weights(lstm, checks.values)
    _check_states(lstm, weights, states, checks.values)
    if not any(lstm.outputs._replace(cell_all=None)):
        text = "net '{}' has none of the outputs that ONNX knows: hidden_all, hidden_last, cell_last"
        checks.values.add(text, proto.name)
    checks.done()
    initial = {blob: InitialState(array, stored=_is_parameter(blob, net)) for blob, array in states.items()}
    files.write_bytes(file, lstm_model(onnx, scope, lstm, weights, initial).SerializeToString())


def _fetch_states(lstm: LSTMInNet, net: AnyNet, problems: Problems) -> Dict[str, np.ndarray]:
    """The initial states that are in the workspace; notes those that are not."""
    states: Dict[str, np.ndarray] = {}
    for blob in dict.fromkeys(blob for loop in lstm.loops for blob in loop.initial):
        array = workspace.FetchBlob(blob) if workspace.HasBlob(blob) else None
        if isinstance(array, np.ndarray):
            states[blob] = array
        else:
            how = "run the model's param_init_net" if _is_parameter(blob, net) else "feed it"
            problems.add("initial state '{}' is not in the workspace, which tells its shape; {} first", blob, how)
    return states


def _check_states(lstm: LSTMInNet, weights: LSTMWeights, states: Mapping[str, np.ndarray], problems: Problems) -> None:
    for loop, in_loop in zip(lstm.loops, weights):
        dim = in_loop.weight_hh.shape[1]
        for blob in loop.initial:
            shape = states[blob].shape
            if shape[-1:] != (dim,) or len(shape) > 3 or shape[:-2] not in ((), (1,)):
                text = "initial state '{}' has shape {}; it takes [{}], [N, {}] or [1, N, {}]"
                problems.add(text, blob, list(shape), dim, dim, dim)


def _is_parameter(blob: str, net: AnyNet) -> bool:
    return blob in net.params if isinstance(net, ModelHelper) else blob.split("/")[-1] in OWN_STATES
