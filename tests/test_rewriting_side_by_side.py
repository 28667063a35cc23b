"""Nets that run operators side by side order them by the names in inputs, outputs and `control_input` alone.

What operators do to each other's memory must show there; whether it goes wrong if it does not depends on the moment.
"""

import numpy as np
import pytest
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import GRU, LSTM, MILSTM, optimize
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.rewriting.products import onednn_over_steps

pytestmark = pytest.mark.usefixtures("backward_loops")

# Each product has what it is of copied to oneDNN.
COPIED = ["parameter_gradients", "products_over_steps"]
KINDS = ("simple", "dag", "async_scheduling")


def undeclared(net):
    """What operators inside of Ifs write and leave there, that the If does not list among its outputs."""
    found = set()
    for operator in net.Proto().op:
        if operator.type == "If":
            inside = net_argument(operator, "then_net").op
            written = {blob for other in inside for blob in other.output}
            freed = {blob for other in inside if other.type == "Free" for blob in other.output}
            found |= written - freed - set(operator.output)
    return found


def trained(builder, **options):
    model = ModelHelper("model")
    states = ("h0",) if builder is GRU else ("h0", "c0")
    outputs = builder(model, "x", None, states, support.DIM_IN, support.D, "layer", **options)
    found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    return model, {str(blob): str(gradient) for blob, gradient in found.items()}


def run_as(kind, net):
    net.Proto().type, net.Proto().num_workers = kind, 4
    workspace.CreateNet(net, overwrite=True)
    workspace.RunNet(net)


@pytest.mark.parametrize("stay", [True, False], ids=["what stays", "what is freed"])
@pytest.mark.parametrize("builder", [LSTM, MILSTM, GRU], ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("rules", [None, COPIED], ids=["all rules", "copies"])
def test_what_products_leave_with_onednn_is_declared(builder, rules, stay, monkeypatch):
    """Else several of them fill one blob at once."""
    monkeypatch.setattr(onednn_over_steps, "LITTLE", 2**30 if stay else 0)
    model, gradients = trained(builder)
    run_as("simple", model.net)
    parameters = [gradients[str(blob)] for blob in model.params]
    expected = {blob: workspace.FetchBlob(blob) for blob in parameters}
    optimize(model, rules, even_if_slower=True, trials=False)
    kept = [operator for operator in model.net.Proto().op if any("to_keep" in blob for blob in operator.output)]
    # With all rules the products of an LSTM have nothing to keep.
    assert bool(kept) == (stay and (rules is not None or builder is not LSTM))
    assert undeclared(model.net) == set()
    for kind in KINDS:
        run_as(kind, model.net)
        for blob, value in expected.items():
            np.testing.assert_allclose(workspace.FetchBlob(blob), value, rtol=1e-4, atol=1e-5, err_msg=kind + blob)


def test_a_blob_that_is_not_declared_is_found():
    model, _ = trained(LSTM)
    optimize(model, even_if_slower=True, trials=False)
    operator = next(other for other in model.net.Proto().op if other.type == "If")
    lost = operator.output.pop()
    assert undeclared(model.net) == {lost}


def test_who_changes_the_gradient_of_the_output_waits_for_a_backward_pass_of_its_own():
    """It reads that gradient as a view, under another name."""
    model, gradients = trained(LSTM, outputs_with_grads="auto")
    run_as("simple", model.net)
    name = gradients["layer/gates_t_w"]
    expected = workspace.FetchBlob(name)
    rules = ["parameter_gradients", "lstm_unit", "backward_loop"]
    assert optimize(model, rules, even_if_slower=True).counts["backward_loop"] == 1
    backward = next(other for other in model.net.Proto().op if other.type == support.LOOP and other.is_gradient_op)
    assert "dh" in backward.input
    model.net.Scale("dh", "dh", scale=0.0)
    for kind in KINDS:
        support.feed()
        run_as(kind, model.net)
        np.testing.assert_allclose(workspace.FetchBlob(name), expected, rtol=1e-4, atol=1e-5, err_msg=kind)


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("rules", [["products_over_steps"], None], ids=["one rule", "all"])
def test_what_takes_an_operators_place_waits_for_what_it_waited_for(rules, written_out, request):
    if written_out:
        request.getfixturevalue("unrolled_steps")
    model, _ = trained(LSTM)
    operators = model.net.Proto().op
    for operator in operators:
        if operator.type in ("FC", support.LOOP):
            operator.control_input.append("ready")
        elif operator.type in ("FCGradient", support.GRADIENT):
            operator.control_input.append("clipped")
    as_it_was = [operator.SerializeToString() for operator in operators]
    report = optimize(model, rules, even_if_slower=True, trials=False)
    assert report.total
    made = [operator for operator in operators if operator.SerializeToString() not in as_it_was]
    waiting = [set(operator.control_input) & {"ready", "clipped"} for operator in made]
    assert all(len(blobs) == 1 for blobs in waiting), [made[at].type for at, blobs in enumerate(waiting) if not blobs]
    assert {"ready"} in waiting and {"clipped"} in waiting


def test_a_product_that_another_operator_waits_for_stays():
    model, _ = trained(LSTM)
    model.net.Copy("x", "copied")
    model.net.Proto().op[-1].control_input.append("layer/i2h")
    optimize(model, even_if_slower=True, trials=False)
    assert any("layer/i2h" in operator.output for operator in model.net.Proto().op)


def test_sizes_of_no_sequences_say_nothing():
    """As of placeholders, or of a batch that is empty."""
    for blob, shape in {"x": (5, 0, support.DIM_IN), "h0": (1, 0, support.D), "c0": (1, 0, support.D)}.items():
        workspace.FeedBlob(blob, np.zeros(shape, dtype=np.float32))
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, ("h0", "c0"), support.DIM_IN, support.D, "layer", forward_only=True)
    workspace.RunNetOnce(model.param_init_net)
    report = optimize(model)
    assert any(refusal.reason == "the batch size is not known; give shapes" for refusal in report.refusals)
    support.feed()
    workspace.RunNetOnce(model.net)
    assert workspace.FetchBlob(hidden_all).shape == (support.T, support.N, support.D)
