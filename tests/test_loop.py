"""A loop as it is read from a net."""

import pytest

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.loops.reading import read_loops


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_a_blob_by_itself_is_a_reference_if_it_is_among_all(make):
    loops = []
    comparing.run(recurrent_net, make(), False, lambda net: loops.extend(read_loops(net.Proto()).values()))
    for loop in loops:
        operators = [operator for step in loop.steps for operator in step]
        blobs = {blob for operator in operators for blob in [*operator.input, *operator.output]}
        others = {"no blob", loop.timestep, *loop.inputs, *loop.outputs, *(link.inner for link in loop.all_links)}
        assert {blob for blob in blobs | others if loop.is_reference(blob)} == loop.references
    assert loops


def test_what_nothing_reads_is_not_made_and_what_that_alone_has_read():
    (loop,) = read_loops(support.lstm(gradients=False)[0].net.Proto()).values()
    one = loop.add_before("ConstantFill", [], "one", shape=[1], value=1.0)
    both = loop.add_before("Copy", [one], "both")
    made = loop.add_before("Sum", [one, both], "made")
    loop.add_reference(made)
    before = list(loop.before)
    for blob in (one, both, "x", loop.inputs[0]):
        loop.drop_unread(blob)
        assert loop.before == before
    loop.drop_unread(made)
    assert loop.before == [] and made not in loop.inputs
    assert loop.add_before("Copy", [loop.add_before("ConstantFill", [], "one", shape=[1], value=1.0)], "both") != both


@pytest.mark.parametrize("role", ["sequence", "slice", "initial value", "step"])
def test_what_a_loop_sees_is_not_dropped(role):
    (loop,) = read_loops(support.lstm(gradients=False)[0].net.Proto()).values()
    made = loop.add_before("ConstantFill", [], "made", shape=[1], value=1.0)
    if role == "sequence":
        loop.inputs[0] = made
    elif role == "slice":
        loop.links[0] = loop.links[0]._replace(outer=made)
    elif role == "initial value":
        loop.states[0] = loop.states[0]._replace(outer_initial=made)
    else:
        loop.operators[0].input[0] = made
    loop.drop_unread(made)
    assert [operator.output[0] for operator in loop.before] == [made]
