"""A loop as it is read from a net."""

import pytest

import comparing
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
