"""The settings of the RNN executor, with which the engine runs several steps at once."""

from typing import Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import is_integer
from caffe2_recurrent.operator_arguments import argument, set_arguments
from caffe2_recurrent.operators import GRADIENT_OPERATOR, LOOPS, OPERATOR
from caffe2_recurrent.problems import Problems, given

# The argument of both operators that has the engine use it; without, it does not.
ENABLE = "enable_rnn_executor"
# What its settings begin with, and two of them.
SETTING = "rnn_executor."
THREADS, STREAMS = SETTING + "num_threads", SETTING + "max_cuda_streams"


def set_rnn_executor_config(
    rnn_op: caffe2_pb2.OperatorDef, num_threads: Optional[int] = None, max_cuda_streams: Optional[int] = None
) -> None:
    """Say with how many threads or CUDA streams the RNN executor runs the steps of one loop.

    Set on the forward operator before `AddGradientOperators`, it holds for the gradient operator as well. A second
    call replaces what the first one set; nets that have been created already keep what they had.

    Args:
        rnn_op: a RecurrentNetwork or RecurrentNetworkGradient operator, as in `net.Proto().op`.
        num_threads: 1 or more, for loops on the CPU. None: leave as it is; without a setting the engine starts 4.
        max_cuda_streams: 1 or more, for loops on a GPU. None: leave as it is; without a setting there are 2.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: the operator is neither of the two, or a number is below 1.

    Source: caffe2/operators/rnn/recurrent_network_executor.h.
    """
    types, values = Problems("set_rnn_executor_config"), Problems("set_rnn_executor_config")
    settings = {"num_threads": num_threads, "max_cuda_streams": max_cuda_streams}
    if not isinstance(rnn_op, caffe2_pb2.OperatorDef):
        types.add("rnn_op must be an operator, as in net.Proto().op; got {}", given(rnn_op))
    elif rnn_op.type not in LOOPS:
        values.add("rnn_op must be a {} or {} operator; got '{}'", OPERATOR, GRADIENT_OPERATOR, rnn_op.type)
    for name, value in settings.items():
        if value is not None and not is_integer(value):
            types.add("{} must be a whole number or None; got {}", name, given(value))
        elif value is not None and value < 1:
            values.add("{} must be 1 or more; got {}", name, value)
    types.raise_if_any(TypeError)
    values.raise_if_any()
    set_arguments(rnn_op, {SETTING + name: int(value) for name, value in settings.items() if value is not None})


def switch_off(operator: caffe2_pb2.OperatorDef) -> None:
    """Have the engine run the steps of a loop one after the other."""
    enabled = argument(operator, ENABLE)
    if enabled is not None:
        enabled.i = 0
