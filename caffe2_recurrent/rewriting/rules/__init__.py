"""The rules, in the order in which they follow each other."""

from caffe2_recurrent.rewriting.rules.executor_threads import ExecutorThreads
from caffe2_recurrent.rewriting.rules.forward_links import ForwardLinks
from caffe2_recurrent.rewriting.rules.gradient_buffer import GradientBuffer
from caffe2_recurrent.rewriting.rules.lstm_unit import LSTMUnits
from caffe2_recurrent.rewriting.rules.parameter_gradients import ParameterGradients
from caffe2_recurrent.rewriting.rules.scaled_weights import ScaledWeights
from caffe2_recurrent.rewriting.rules.transposed_weights import TransposedWeights
from caffe2_recurrent.rewriting.rules.zero_gradients import ZeroGradients

RULES = (
    ParameterGradients(),
    TransposedWeights(),
    LSTMUnits(),
    ScaledWeights(),
    ZeroGradients(),
    GradientBuffer(),
    ForwardLinks(),
    ExecutorThreads(),
)
