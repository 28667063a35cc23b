"""The rules, in the order in which they follow each other."""

from caffe2_recurrent.optimize.rules.parameter_gradients import ParameterGradients
from caffe2_recurrent.optimize.rules.transposed_weights import TransposedWeights

RULES = (ParameterGradients(), TransposedWeights())
