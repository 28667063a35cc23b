"""Products by oneDNN in which what is no number would spread from row to row are found, and left to MKL."""

import numpy as np
import pytest
from caffe2.python import core, workspace

import rewriting_support as support
from caffe2_recurrent import optimize
from caffe2_recurrent.operator_arguments import set_arguments
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn, onednn_over_steps, product_ways, separate_rows
from caffe2_recurrent.rewriting.products.onednn_over_steps import layouts
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import result
from onednn_support import in_ifs, leaving_no_trace, on_onednn

PACKED, OVER_STEPS = "packed_products", "products_over_steps"


def with_a_neighbour(loop, operator, rows, share):
    """The product, and a `share` of each row added to the next one: what a kernel that reads on would do."""
    product = core.CreateOperator("FC", list(operator.input), ["product"], axis=2)
    shifted = core.CreateOperator("ATen", ["product"], ["shifted"], operator="roll", shifts=[1], dims=[1])
    weight = core.CreateOperator("Scale", ["shifted"], ["shared"], scale=share)
    return [product, shifted, weight, core.CreateOperator("Sum", ["product", "shared"], ["y"])]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_rows_that_change_each_other_are_found(share):
    """Even where the share is 0, which is what a kernel multiplies with that has no use for what it has read."""

    def operators(loop, operator, rows):
        return with_a_neighbour(loop, operator, rows, share)

    with leaving_no_trace():
        assert not separate_rows._stay_apart(operators, (4, 3))


def test_rows_that_stay_apart():
    def operators(loop, operator, rows):
        set_arguments(operator, {"axis": 2})
        return [operator]

    with leaving_no_trace():
        assert separate_rows._stay_apart(operators, (4, 3))


@pytest.mark.parametrize("way, parts", [(way, parts) for parts in (1, 3) for way in onednn.ways_of(parts)])
@pytest.mark.parametrize("inner, outer", [(1, 4), (3, 16), (16, 16), (100, 33)])
def test_what_is_said_of_steps_is_so(way, parts, inner, outer):
    """With other numbers of rows and other weights than it was tried with."""
    if not separate_rows.in_steps(way, inner, outer, parts):
        return
    random = np.random.RandomState(0)
    for rows in (4, 7, 16):
        x = random.uniform(-1, 1, (1, rows, inner)).astype(np.float32)
        x[:, 1::3] = [[[np.inf]]]
        weights = random.uniform(-1, 1, (parts, outer, inner)).astype(np.float32)
        values = {"x": x, "w": weights if parts > 1 else weights[0], "b": np.ones(outer, "f")}
        loop = trial.lone_loop(["x", "w", "b", "y"])
        bias = None if parts > 1 else "b"
        product = Product("x", None, "w", bias, "y", rows, inner, outer, parts=parts)
        step = product_ways.emit(way, loop, product, loop.forward).operators
        found = result([*loop.before, *step], values, "y")
        kept = [row for row in range(rows) if row % 3 != 1]
        expected = np.einsum("nk,pmk->pnm", x[0, kept], weights) + (bias is not None)
        np.testing.assert_allclose(found[:, kept], expected, rtol=1e-4, atol=1e-5)


def test_several_matrices_are_what_is_tried(monkeypatch):
    """A neighbour in each of them is found."""

    def emit(way, loop, product, operator):
        assert product.parts == 3 and product.bias is None
        operator.type, operator.input[:] = "BatchMatMul", ["x", "w"]
        set_arguments(operator, {"broadcast": 1, "trans_b": 1})
        emitter = Emitter(loop, operator, "y")
        emitter.operators.append(operator)
        if spreading:
            operator.output[:] = ["product"]
            shifted = emitter.aten("roll", ["product"], "shifted", shifts=[1], dims=[1])
            emitter.add("Sum", ["product", shifted], "y")
        return emitter

    monkeypatch.setattr(product_ways, "emit", emit)
    for spreading in (False, True):
        with leaving_no_trace():
            assert separate_rows.in_steps.__wrapped__(onednn.CONVOLUTION, 3, 4, 3) != spreading


@pytest.mark.parametrize("inner, outer", [(1, 4), (3, 16), (16, 16), (100, 33)])
def test_what_is_said_of_all_steps_is_so(inner, outer):
    """In each layout; with other numbers of rows and other weights than it was tried with."""
    random = np.random.RandomState(0)
    for layout in filter(separate_rows.over_steps, layouts("FC", inner, outer)):
        for rows in (4, 7, 16):
            x = random.uniform(-1, 1, (1, rows, inner)).astype(np.float32)
            x[:, 1::3] = [[[np.inf]]]
            values = {"x": x, "w": random.uniform(-1, 1, (outer, inner)).astype(np.float32), "b": np.ones(outer, "f")}
            operator = core.CreateOperator("FC", ["x", "w", "b"], ["y"], axis=2)
            loop = trial.lone_loop(["x", "w", "b", "y"])
            found = result(onednn_over_steps.in_a_net(loop, operator, layout, layout), values, "y")
            kept = [row for row in range(rows) if row % 3 != 1]
            np.testing.assert_allclose(found[0, kept], x[0, kept] @ values["w"].T + 1, rtol=1e-4, atol=1e-5)


def test_products_of_steps_in_which_they_spread_stay(monkeypatch):
    monkeypatch.setattr(separate_rows, "in_steps", lambda way, *_: False)
    model, _ = support.lstm()
    report = optimize(model, [PACKED], even_if_slower=True)
    assert report.total == 0 and on_onednn(support.step(model.net).op) == []
    expected = "in oneDNN's products with [4, 16] what is no number would spread to other rows"
    assert [refusal.reason for refusal in report.refusals] == [expected]


@pytest.mark.parametrize("batch_is_known", [True, False])
def test_the_other_way_is_taken(batch_is_known, monkeypatch):
    if len(onednn.ways()) == 1:
        return
    monkeypatch.setattr(separate_rows, "in_steps", lambda way, *_: way == onednn.CONVOLUTION)
    model, _ = support.lstm(gradients=False, forward_only=True)
    if not batch_is_known:
        for blob in ("x", "h0", "c0"):
            workspace.C.Workspace.current.remove_blob(blob)
    assert optimize(model, [PACKED], even_if_slower=True).total == 1
    assert "Conv" in on_onednn(support.step(model.net).op)


def test_products_over_steps_in_which_they_spread_stay(monkeypatch):
    """Those of the gradient have zeros where a sequence has ended."""
    monkeypatch.setattr(separate_rows, "over_steps", lambda layout: False)
    model, _ = support.lstm()
    report = optimize(model, [OVER_STEPS], even_if_slower=True)
    assert [operator.type for operator in in_ifs(model.net) if operator.type != "Free"].count("FC") == 0
    assert [rewrite.what for rewrite in report.rewrites] == [
        "FCGradient -> 'layer/i2h_w_grad', 'layer/i2h_b_grad', 'x_grad'"
    ]
    expected = "in oneDNN's products with [2, 16] what is no number would spread to other rows"
    assert [refusal.reason for refusal in report.refusals] == [expected]
