"""Recurrent networks for Caffe2: LSTM, MILSTM, LSTM with attention, and step nets of your own."""

from caffe2_recurrent.installation import doctor_is_starting as _doctor_is_starting
from caffe2_recurrent.installation import require_caffe2 as _require_caffe2

__version__ = "0.1.0"

try:
    _require_caffe2()
except ImportError:
    # The doctor is there to explain this very error: for it, the package loads without its public names.
    if not _doctor_is_starting():
        raise
else:
    from caffe2_recurrent.attention import (
        AttentionType,
        LSTMWithAttention,
        apply_recurrent_attention,
        apply_regular_attention,
    )
    from caffe2_recurrent.executor import retrieve_step_blobs
    from caffe2_recurrent.gradient_check import check_gradients
    from caffe2_recurrent.gru import GRU
    from caffe2_recurrent.lstm import LSTM, MILSTM
    from caffe2_recurrent.recurrent import recurrent_net

    __all__ = [
        "GRU",
        "LSTM",
        "MILSTM",
        "AttentionType",
        "LSTMWithAttention",
        "apply_recurrent_attention",
        "apply_regular_attention",
        "check_gradients",
        "recurrent_net",
        "retrieve_step_blobs",
    ]
