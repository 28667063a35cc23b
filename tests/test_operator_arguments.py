"""The nets that operators are given."""

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent import operator_arguments


@pytest.fixture
def inner():
    return caffe2_pb2.NetDef(name="inner", op=[core.CreateOperator("Copy", ["a"], ["b"])])


def test_a_net_to_be_read_is_the_one_in_the_operator(inner):
    operator = core.CreateOperator("If", ["condition"], [], then_net=inner)
    found = operator_arguments.net_to_read(operator, "then_net")
    operator.arg[0].n.name = "changed"
    assert found.name == "changed" and list(found.op) == list(inner.op)


def test_a_copy_of_a_net_is_none_of_the_operators(inner):
    operator = core.CreateOperator("If", ["condition"], [], then_net=inner)
    copy = operator_arguments.net(operator, "then_net")
    operator.arg[0].n.name = "changed"
    assert copy == inner


def test_step_nets_may_be_text(inner):
    operator = core.CreateOperator("RecurrentNetwork", ["x"], ["y"], step_net=str(inner))
    assert operator_arguments.net(operator, "step_net") == inner
    assert operator_arguments.net_to_read(operator, "step_net") == inner


@pytest.mark.parametrize("as_text", [False, True])
def test_a_loop_has_nets_whether_they_are_text_or_not(inner, as_text):
    operator = core.CreateOperator("RecurrentNetwork", ["x"], ["y"], step_net=str(inner) if as_text else inner)
    assert operator_arguments.has_nets(operator)
    assert not operator_arguments.has_nets(core.CreateOperator("Copy", ["x"], ["y"], words="text"))


def test_no_net_is_an_empty_one():
    assert not operator_arguments.net_to_read(caffe2_pb2.OperatorDef(), "step_net").op
