"""The rules, in the order in which they follow each other."""

from caffe2_recurrent.optimize.rules.forward_links import ForwardLinks
from caffe2_recurrent.optimize.rules.gradient_buffer import GradientBuffer
from caffe2_recurrent.optimize.rules.lstm_unit import LSTMUnits
from caffe2_recurrent.optimize.rules.parameter_gradients import ParameterGradients
from caffe2_recurrent.optimize.rules.scaled_weights import ScaledWeights
from caffe2_recurrent.optimize.rules.transposed_weights import TransposedWeights
from caffe2_recurrent.optimize.rules.zero_gradients import ZeroGradients

RULES = (
    ParameterGradients(),
    TransposedWeights(),
    LSTMUnits(),
    ScaledWeights(),
    ZeroGradients(),
    GradientBuffer(),
    ForwardLinks(),
)
