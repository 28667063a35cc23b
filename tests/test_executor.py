"""`set_rnn_executor_config`, on the engine."""

import os

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import recurrent, workspace

import comparing
from caffe2_recurrent import set_rnn_executor_config
from errors_support import listed
from numpy_lstm import Case

SETTINGS = ("rnn_executor.num_threads", "rnn_executor.max_cuda_streams")


def settings(operator):
    """The executor's settings, as (name, value), in the order in which they stand."""
    return [(argument.name, argument.i) for argument in operator.arg if argument.name in SETTINGS]


def loops(net):
    return [operator for operator in net.Proto().op if operator.type.startswith("RecurrentNetwork")]


def test_settings_become_arguments():
    model, _ = Case().build()
    (operator,) = loops(model.net)
    before = list(operator.arg)
    set_rnn_executor_config(operator)
    assert list(operator.arg) == before
    set_rnn_executor_config(operator, 3)
    assert settings(operator) == [("rnn_executor.num_threads", 3)]
    set_rnn_executor_config(operator, max_cuda_streams=np.int64(5))
    assert settings(operator) == [("rnn_executor.num_threads", 3), ("rnn_executor.max_cuda_streams", 5)]
    assert list(operator.arg)[:-2] == before


def test_a_second_call_replaces_the_first():
    model, _ = Case().build()
    (operator,) = loops(model.net)
    set_rnn_executor_config(operator, num_threads=3, max_cuda_streams=2)
    set_rnn_executor_config(operator, num_threads=1)
    assert sorted(settings(operator)) == [("rnn_executor.max_cuda_streams", 2), ("rnn_executor.num_threads", 1)]


def test_operator_is_that_of_caffe2s_function():
    ours, theirs = (loops(Case().build()[0].net)[0] for _ in range(2))
    set_rnn_executor_config(ours, 2, 3)
    recurrent.set_rnn_executor_config(theirs, 2, 3)
    assert comparing.differences(ours, theirs) == []


@pytest.mark.parametrize("outputs_with_grads", [(0,), "auto"], ids=str)
def test_settings_pass_to_the_gradient(outputs_with_grads):
    model, outputs = Case(options={"outputs_with_grads": outputs_with_grads}).build()
    set_rnn_executor_config(loops(model.net)[0], num_threads=2, max_cuda_streams=3)
    model.AddGradientOperators([outputs[0]])
    forward, backward = loops(model.net)
    assert backward.type == "RecurrentNetworkGradient"
    assert settings(backward) == settings(forward) == list(zip(SETTINGS, (2, 3)))
    set_rnn_executor_config(backward, num_threads=1)
    assert ("rnn_executor.num_threads", 1) in settings(backward)
    assert ("rnn_executor.num_threads", 2) in settings(forward)


@pytest.mark.usefixtures("executor_in_created_nets")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads where Linux lists them")
@pytest.mark.parametrize("num_threads", [None, 1, 3])
def test_the_engine_starts_that_many_threads(num_threads):
    case = Case(options={"forward_only": True})
    model, _ = case.build()
    set_rnn_executor_config(loops(model.net)[0], num_threads=num_threads)
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    workspace.CreateNet(model.net)
    before = len(os.listdir("/proc/self/task"))
    workspace.RunNet(model.net)
    assert len(os.listdir("/proc/self/task")) - before == (4 if num_threads is None else num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_values_do_not_depend_on_threads(num_threads):
    case = Case(steps=5)
    model, outputs = case.build()
    set_rnn_executor_config(loops(model.net)[0], num_threads=num_threads)
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    workspace.RunNetOnce(model.net)
    comparing.assert_close(workspace.FetchBlob(outputs[0]), case.reference()[0], "hidden_all")


WRONG_TYPES = {
    "operator missing": ((None,), "rnn_op must be an operator, as in net.Proto().op; got None of type NoneType"),
    "threads a float": (
        (caffe2_pb2.OperatorDef(type="RecurrentNetwork"), 2.0),
        "num_threads must be a whole number or None; got 2.0 of type float",
    ),
    "streams a flag": (
        (caffe2_pb2.OperatorDef(type="RecurrentNetwork"), None, True),
        "max_cuda_streams must be a whole number or None; got True of type bool",
    ),
}


@pytest.mark.parametrize("arguments, text", WRONG_TYPES.values(), ids=list(WRONG_TYPES))
def test_setting_of_the_wrong_type(arguments, text):
    with pytest.raises(TypeError) as caught:
        set_rnn_executor_config(*arguments)
    assert str(caught.value) == "set_rnn_executor_config: " + text


def test_all_wrong_types_of_settings_in_one_error():
    with pytest.raises(TypeError) as caught:
        set_rnn_executor_config("operator", "1", "2")
    assert str(caught.value) == listed(
        "set_rnn_executor_config",
        "rnn_op must be an operator, as in net.Proto().op; got 'operator' of type str",
        "num_threads must be a whole number or None; got '1' of type str",
        "max_cuda_streams must be a whole number or None; got '2' of type str",
    )


def test_settings_out_of_range_change_nothing():
    operator = caffe2_pb2.OperatorDef(type="FC")
    with pytest.raises(ValueError) as caught:
        set_rnn_executor_config(operator, 0, -1)
    assert str(caught.value) == listed(
        "set_rnn_executor_config",
        "rnn_op must be a RecurrentNetwork or RecurrentNetworkGradient operator; got 'FC'",
        "num_threads must be 1 or more; got 0",
        "max_cuda_streams must be 1 or more; got -1",
    )
    operator.type = "RecurrentNetwork"
    with pytest.raises(ValueError) as caught:
        set_rnn_executor_config(operator, 2, 0)
    assert str(caught.value) == "set_rnn_executor_config: max_cuda_streams must be 1 or more; got 0"
    assert list(operator.arg) == []
