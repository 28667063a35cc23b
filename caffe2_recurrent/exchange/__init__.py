"""An LSTM's weights to and from where else LSTMs are computed, and the whole of it as an ONNX model.

lstm_in_net      the operators of a net  ->  layers, directions, blobs, options
caffe2_blobs     blobs in the workspace  <->  one value (layout)
torch_weights, cudnn_weights, onnx_export        that value  <->  theirs
"""

from caffe2_recurrent.exchange.cudnn_weights import lstm_from_cudnn, lstm_to_cudnn
from caffe2_recurrent.exchange.onnx_export import export_onnx
from caffe2_recurrent.exchange.torch_weights import lstm_from_torch, lstm_to_torch

__all__ = ["export_onnx", "lstm_from_cudnn", "lstm_from_torch", "lstm_to_cudnn", "lstm_to_torch"]
