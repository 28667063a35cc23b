"""Operators that run in the first run of a net and when blobs have changed, and leave what they made where it is."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.rewriting import kept_results
from caffe2_recurrent.rewriting.same_weights import EQUAL
from caffe2_recurrent.rewriting.trials import trial

KINDS = {"floats": (core.DataType.FLOAT, np.float32), "whole numbers": (core.DataType.INT64, np.int64)}
OF_EACH_KIND = pytest.mark.parametrize("kind, dtype", KINDS.values(), ids=list(KINDS))


def net_of(kind, blobs=("a",), name="net", by="factor"):
    """`y = sum of the blobs + factor`, when one of the blobs has changed; that the factor has is not seen."""
    loop = trial.lone_loop([*blobs, by, "y"])
    made = [core.CreateOperator("Sum", [*blobs, by], ["y"])]
    ways, copies = dict.fromkeys(blobs, EQUAL), {blob: blob + "_seen" for blob in blobs}
    operators = kept_results.when_changed(loop, ways, copies, made, ["y"], kind)
    return caffe2_pb2.NetDef(name=name, op=operators, external_input=[*blobs, by])


def feed(dtype, **values):
    for blob, value in values.items():
        workspace.FeedBlob(blob, np.array(value, dtype=dtype))


def run(net, dtype, **values):
    feed(dtype, **values)
    workspace.RunNet(net.name)
    return workspace.FetchBlob("y").tolist()


@OF_EACH_KIND
def test_they_run_first_and_when_a_blob_has_changed(kind, dtype):
    net = net_of(kind)
    feed(dtype, a=[1, 2], factor=[1, 1])
    workspace.CreateNet(net)
    assert run(net, dtype) == [2, 3]
    assert run(net, dtype, factor=[5, 5]) == [2, 3]
    assert run(net, dtype, a=[1, 3]) == [6, 8]
    assert run(net, dtype, a=[1, 3], factor=[0, 0]) == [6, 8]
    # Of another shape.
    assert run(net, dtype, a=[1, 3, 5], factor=[0, 0, 0]) == [1, 3, 5]


@OF_EACH_KIND
def test_of_several_blobs_one_is_enough(kind, dtype):
    net = net_of(kind, blobs=["a", "b"])
    feed(dtype, a=[1], b=[2], factor=[0])
    workspace.CreateNet(net)
    assert [run(net, dtype), run(net, dtype, factor=[9])] == [[3], [3]]
    assert [run(net, dtype, b=[3]), run(net, dtype, a=[0])] == [[13], [12]]


@OF_EACH_KIND
@pytest.mark.parametrize("runs_before", [0, 2])
def test_after_a_run_that_fails_they_run_again(kind, dtype, runs_before):
    net = net_of(kind)
    feed(dtype, a=[1, 2], factor=[1, 1])
    workspace.CreateNet(net)
    for _ in range(runs_before):
        workspace.RunNet(net.name)
    feed(dtype, a=[4, 4], factor=[1, 1, 1])
    with pytest.raises(RuntimeError):
        workspace.RunNet(net.name)
    assert run(net, dtype, factor=[2, 2]) == [6, 6]
    assert run(net, dtype, factor=[3, 3]) == [6, 6]


@OF_EACH_KIND
def test_a_net_that_is_created_anew_runs_them(kind, dtype):
    net = net_of(kind)
    feed(dtype, a=[1], factor=[1])
    for factor in (1, 2):
        feed(dtype, factor=[factor])
        workspace.CreateNet(net, overwrite=True)
        assert run(net, dtype) == [1 + factor]


def test_the_counting_is_said_to_be_another_thing_in_each_run():
    operators = net_of(core.DataType.FLOAT).op
    counting = [operator.type for operator in operators if kept_results.tells_runs_apart(operator)]
    assert counting == ["AccumulateHistogram"]


def test_what_is_missing(monkeypatch):
    assert kept_results.missing("Sum", "NoSuchOperator") == ["NoSuchOperator"]
    is_operator = core.IsOperator
    monkeypatch.setattr(kept_results.core, "IsOperator", lambda name: name != "ATen" and is_operator(name))
    assert kept_results.missing() == ["ATen"]
