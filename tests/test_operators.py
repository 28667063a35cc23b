"""Copies of operators between other blobs."""

import pytest
from caffe2.python import core

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.operator_arguments import net, string, strings
from caffe2_recurrent.operators import renamed

RENAMING = {
    "x": "sequence",
    "y": "results",
    "workspaces": "kept",
    "h_all": "states",
    "h0": "initial",
    "w": "weights",
    "x_t": "slice",
    "h_t": "state",
    "step": "number",
    "w_grad": "gradient",
    "w_grad_sum": "added",
}


@pytest.fixture(params=["a net", "text"])
def loop(request):
    """A loop whose blobs are those that are to be called otherwise, and no others."""
    inner = core.Net("inner")
    inner.Proto().op.extend([core.CreateOperator("FC", ["x_t", "w", "w_grad"], ["h_t"])])
    step_net = inner.Proto()
    return core.CreateOperator(
        "RecurrentNetworkGradient",
        ["x", "h0"],
        ["y", "workspaces"],
        step_net=str(step_net) if request.param == "text" else step_net,
        link_internal=["x_t", "h_t"],
        link_external=["x", "h_all"],
        timestep="step",
        **{"w_grad.rename": "w_grad_sum"},
    )


def test_all_that_names_a_blob_of_a_loop(loop):
    assert {*names_of(loop)} == {*RENAMING}


def test_a_loop_of_other_names(loop):
    made = renamed(loop, RENAMING)
    assert {*names_of(made)} == {*RENAMING.values()}
    assert list(made.input) == ["sequence", "initial"] and list(made.output) == ["results", "kept"]
    assert strings(made, "link_internal") == ["slice", "state"]
    assert strings(made, "link_external") == ["sequence", "states"]
    assert string(made, "timestep", "") == "number"
    assert string(made, "gradient.rename", "") == "added"
    (operator,) = net(made, "step_net").op
    assert list(operator.input) == ["slice", "weights", "gradient"]


def test_the_loop_stays_as_it_was(loop):
    before = loop.SerializeToString()
    renamed(loop, RENAMING)
    assert loop.SerializeToString() == before


def test_strings_of_other_operators_are_none_of_blobs():
    operator = core.CreateOperator("Unknown", ["x"], ["y"], words=["x"], timestep="x")
    made = renamed(operator, {"x": "other"})
    assert strings(made, "words") == ["x"] and string(made, "timestep", "") == "x" and list(made.input) == ["other"]


def test_nets_in_a_list_name_blobs_too():
    inner = core.Net("inner")
    inner.Copy("a", "b")
    operator = core.CreateOperator("Unknown", ["x"], ["y"])
    operator.arg.add(name="branches").nets.extend([inner.Proto()])
    assert {"a", "b"} < {*names_of(operator)}
