"""A copy of the sequence's gradient that two products by oneDNN share, beside products of other gradients as wide."""

import numpy as np
import pytest
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.products import onednn_over_steps
from caffe2_recurrent.rewriting.rules.joined_gradients import JoinedGradients
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps

pytestmark = pytest.mark.usefixtures("backward_loops")

T, N, D, DIM_IN = 5, 3, 4, 6
SHAPES = {"x": (T, N, DIM_IN), "h0": (1, N, D), "w": (D, DIM_IN), "b": (D,)}
OF_STEP = ("w1", "b1", "w2", "b2")
SHAPES.update({name: (D, D) if name[0] == "w" else (D,) for name in OF_STEP})
RULES = {
    "each by itself": ["parameter_gradients", "products_over_steps"],
    "joined": ["parameter_gradients", "joined_gradients", "products_over_steps"],
    "where it lies": ["parameter_gradients", "products_over_steps", "backward_loop", "gradient_in_place"],
    "joined, where it lies": ["parameter_gradients", "joined_gradients", "products_over_steps"]
    + ["backward_loop", "gradient_in_place"],
    "all rules": None,
}


def built(first):
    """A loop of tanh(x W + h W1) sigmoid(h W2), and the gradients of all that it is made of; the net and their names.

    The gradient of what is in tanh is that of the sequence. `first` is the product of which the gradients are computed
    before those of the other one.
    """
    workspace.ResetWorkspace()
    random = np.random.RandomState(0)
    for name, shape in SHAPES.items():
        workspace.FeedBlob(name, random.randn(*shape).astype(np.float32))
    model, step = ModelHelper("model"), ModelHelper("step")
    sequence = model.net.FC(["x", "w", "b"], "loop/sequence", axis=2)
    x_t, h_prev, *_ = step.net.AddExternalInputs("x_t", "h_prev", *OF_STEP)

    def squashed(number):
        product = step.net.FC([h_prev, "w{}".format(number), "b{}".format(number)], "p{}".format(number), axis=2)
        if number == 1:
            return step.net.Tanh(step.net.Sum([product, x_t], "sum"), "tanh")
        return step.net.Sigmoid(product, "sigmoid")

    # The backward step begins with what comes last.
    made = {number: squashed(number) for number in sorted((1, 2), key=lambda number: number == first)}
    h = step.net.Mul([made[1], made[2]], "h_t")
    step.net.AddExternalOutput(h)
    outputs = recurrent_net(model.net, step.net, [(x_t, sequence)], [(h_prev, "h0")], {h_prev: h}, scope="loop")
    loss = model.net.SumElements(model.net.Sqr(outputs[0]), "loss")
    found = model.AddGradientOperators([loss])
    return support.without_executor(model), {name: str(found[name]) for name in SHAPES}


def gradients(model, names):
    workspace.CreateNet(model.net)
    for _ in range(2):
        workspace.RunNet(model.net)
    return [], {name: workspace.FetchBlob(blob) for name, blob in names.items()}


@pytest.fixture(params=[True, False], ids=["stays", "is freed"])
def stays(request, monkeypatch):
    """Whether copies stay in oneDNN's memory; and all that can be had by oneDNN is."""
    monkeypatch.setattr(onednn_over_steps, "stays", lambda *_: request.param)
    for rule in (ProductsOverSteps, JoinedGradients):
        monkeypatch.setattr(rule, "loss", lambda *_: None)


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
def test_each_reads_the_gradient_that_it_is_of(first, rules):
    expected = gradients(*built(first))
    model, names = built(first)
    report = optimize(model, rules, even_if_slower=True, shapes={name: SHAPES[name] for name in ("x", "h0")})
    assert report.counts["parameter_gradients"] == 2 and report.counts["products_over_steps"] >= 1
    for rule in {"gradient_in_place", "joined_gradients"}.intersection(rules or []):
        assert report.counts[rule] == 1
    support.assert_same(gradients(model, names), expected)


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("stays", [True], indirect=True)
def test_a_copy_that_others_write_to_is_seen(monkeypatch):
    monkeypatch.setattr(
        onednn_over_steps, "to_share", lambda loop, operator: onednn_over_steps.Shared("loop/results", False)
    )
    results = onednn_over_steps._results
    monkeypatch.setattr(onednn_over_steps, "_results", lambda *given: results(*given) and "loop/results")
    expected = gradients(*built(1))
    model, names = built(1)
    optimize(model, RULES["each by itself"], even_if_slower=True, trials=False)
    with pytest.raises(AssertionError, match="gradient of [xwb]$"):
        support.assert_same(gradients(model, names), expected)
