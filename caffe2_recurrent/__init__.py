"""Recurrent networks for Caffe2: LSTM, MILSTM, LSTM with attention, and step nets of your own."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from caffe2_recurrent.installation import doctor_is_starting as _doctor_is_starting
from caffe2_recurrent.installation import require_caffe2 as _require_caffe2

__version__ = "0.1.0"

# By their names, the modules that have them. They are imported when they are first asked for: a script that builds a
# net may need none of them, and would wait for all.
_TOOLS = {
    "check_gradients": "gradient_check",
    "check_inputs": "input_check",
    "describe": "viewing",
    "draw": "viewing",
    "export_onnx": "exchange",
    "gradcheck": "numerical_check",
    "install": "drop_in",
    "lstm_from_cudnn": "exchange",
    "lstm_from_torch": "exchange",
    "lstm_to_cudnn": "exchange",
    "lstm_to_torch": "exchange",
    "optimize": "rewriting",
    "prediction_net": "serving",
    "save_predictor": "serving",
    "step_times": "debugging.step_times",
    "step_values": "debugging.step_values",
    "uninstall": "drop_in",
}

if TYPE_CHECKING:
    from caffe2_recurrent.debugging.step_times import step_times
    from caffe2_recurrent.debugging.step_values import step_values
    from caffe2_recurrent.drop_in import install, uninstall
    from caffe2_recurrent.exchange import export_onnx, lstm_from_cudnn, lstm_from_torch, lstm_to_cudnn, lstm_to_torch
    from caffe2_recurrent.gradient_check import check_gradients
    from caffe2_recurrent.input_check import check_inputs
    from caffe2_recurrent.numerical_check import gradcheck
    from caffe2_recurrent.rewriting import optimize
    from caffe2_recurrent.serving import prediction_net, save_predictor
    from caffe2_recurrent.viewing import describe, draw
else:

    def __getattr__(name: str) -> object:
        """A tool is imported when it is first asked for."""
        if name not in _TOOLS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = tool = getattr(_import_module(f"{__name__}.{_TOOLS[name]}"), name)
        return tool

    def __dir__() -> list:
        return sorted({*globals(), *_TOOLS})


try:
    _require_caffe2()
except ImportError:
    # The doctor is there to explain this very error: for it, the package loads without its public names.
    if not _doctor_is_starting():
        raise
else:
    from caffe2_recurrent.attention import AttentionType, apply_recurrent_attention, apply_regular_attention
    from caffe2_recurrent.control_ops import get_external_blob_names
    from caffe2_recurrent.cudnn import cudnn_LSTM
    from caffe2_recurrent.executor import set_rnn_executor_config
    from caffe2_recurrent.gru import GRU
    from caffe2_recurrent.lstm import LSTM, MILSTM
    from caffe2_recurrent.lstm_with_attention import LSTMWithAttention
    from caffe2_recurrent.recurrent import recurrent_net
    from caffe2_recurrent.step_workspaces import retrieve_step_blobs
    from caffe2_recurrent.weights import GetLSTMParamNames, InitFromLSTMParams

    __all__ = [
        "AttentionType",
        "GRU",
        "GetLSTMParamNames",
        "InitFromLSTMParams",
        "LSTM",
        "LSTMWithAttention",
        "MILSTM",
        "cudnn_LSTM",
        "apply_recurrent_attention",
        "apply_regular_attention",
        "check_gradients",
        "check_inputs",
        "describe",
        "draw",
        "export_onnx",
        "get_external_blob_names",
        "gradcheck",
        "install",
        "lstm_from_cudnn",
        "lstm_from_torch",
        "lstm_to_cudnn",
        "lstm_to_torch",
        "optimize",
        "prediction_net",
        "recurrent_net",
        "retrieve_step_blobs",
        "save_predictor",
        "set_rnn_executor_config",
        "step_times",
        "step_values",
        "uninstall",
    ]
