"""`packed_products` with several matrices, as `gates_first` leaves a product, and with weights that were transposed."""

import numpy as np
import pytest
from caffe2.python import workspace

import rewriting_support as support
import test_rewriting_gates_first as first
from caffe2_recurrent import optimize
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.products import onednn, product_ways, separate_rows, step_products
from caffe2_recurrent.rewriting.products.onednn import CONVOLUTION, INNER_PRODUCT
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.products.step_products import AS_IT_IS, Size
from caffe2_recurrent.rewriting.rules import RULES
from caffe2_recurrent.rewriting.trials import timing, trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from onednn_support import THERE, force, in_ifs, leaving_no_trace, make_up, on_onednn
from step_nets import D
from test_rewriting_rules import forward, lstm_loop, made, set_argument, why
from test_rewriting_sequence_bias import Net

RULE = "packed_products"
FIRST = [*first.ALONE, RULE]
PARTS, ROWS, INNER, OUTER = 3, 5, 4, 6
SHAPES = {"layer/gates_t_w": (PARTS, 4, OUTER), "h0": (3, 4), "layer/i2h": (9, 3, 16)}

pytestmark = pytest.mark.usefixtures("every_size")
# Before torch 1.7 oneDNN takes no more than one.
TAKES_SEVERAL = onednn.ways_of(PARTS) == [CONVOLUTION]


def made_there(in_rows=False, sigmoid=False, inner=INNER, rows=ROWS):
    """What oneDNN makes of several matrices, and what numpy makes of them."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (1, rows, inner)).astype(np.float32)
    weights = random.uniform(-1, 1, (PARTS, inner, OUTER)).astype(np.float32)
    expected = np.einsum("nk,pkm->pnm", x[0], weights)
    given = {"x": x, "w": np.ascontiguousarray(weights.transpose(0, 2, 1)) if in_rows else weights}
    loop = trial.lone_loop(["x", "w", "y", "s"])
    product = Product("x", None if in_rows else "w", "w" if in_rows else None, None, "y", rows, inner, OUTER)
    product = product._replace(sigmoid="s" if sigmoid else None, parts=PARTS)
    step = product_ways.emit(CONVOLUTION, loop, product, loop.forward).operators
    found = timing.result([*loop.before, *step], given, "s" if sigmoid else "y")
    return found, 1 / (1 + np.exp(-expected)) if sigmoid else expected


if TAKES_SEVERAL:

    @pytest.mark.parametrize("in_rows", [False, True], ids=["columns", "rows"])
    @pytest.mark.parametrize("sigmoid", [False, True], ids=["plain", "sigmoid"])
    @pytest.mark.parametrize("rows", [1, ROWS, 16])
    def test_what_it_computes(in_rows, sigmoid, rows):
        with leaving_no_trace():
            found, expected = made_there(in_rows, sigmoid, rows=rows)
        assert found.shape == (PARTS, rows, OUTER)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    def test_rows_that_are_taken_for_columns_are_seen(monkeypatch):
        """As many, so that only the numbers tell."""
        monkeypatch.setattr(onednn, "transposed", lambda emitter, there, each: there)
        found, expected = made_there(True, inner=OUTER)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    @first.STEPS
    def test_steps(step):
        """Behind `gates_first`, with and without its sigmoid; nothing is transposed by the CPU."""
        net = first.assert_kept(FIRST, step=step).net
        # Whether its sigmoid is oneDNN's a trial says.
        assert [kind for kind in on_onednn(support.step(net).op) if kind != "Sigmoid"] == THERE[CONVOLUTION]
        if step is not first.no_sequence:
            assert [operator for operator in net.Proto().op if operator.type == "Transpose"] == []
        assert [operator.type for operator in in_ifs(net)].count("Transpose") == int(step is not first.no_sequence)

    @pytest.mark.parametrize("trans_b", [0, 1])
    def test_a_product_that_somebody_else_has_written(trans_b):
        """Weights `[2, D, D]` of the step net's own; both products are added up."""

        def step(make, x, h):
            both = make.cell.BatchMatMul([h, make.reference("m", 2, D, D)], "both", broadcast=1, trans_b=trans_b)
            total = make.cell.ReduceFrontSum(both, "total", num_reduce_dim=1)
            return make.cell.Sum([x, make.cell.ExpandDims(total, "row", dims=[0])], "h_t")

        expected = Net(step, forward_only=True).values(executor=False)
        net = Net(step, forward_only=True)
        report = optimize(net.net, [RULE], even_if_slower=True)
        assert report.counts == {RULE: 1} and "Conv" in on_onednn(support.step(net.net).op)
        support.assert_same(net.values(executor=False), expected)

    @pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
    @pytest.mark.parametrize("in_rows", [False, True], ids=["columns", "rows"])
    @pytest.mark.parametrize("way", [AS_IT_IS, CONVOLUTION])
    def test_they_are_tried(way, in_rows, is_added):
        found = step_products.tried(Size("BatchMatMul", 3, 5, 7, False, in_rows, is_added, PARTS), way)
        assert found.step > 0 and (found.once > 0) == (way != AS_IT_IS)


# Refusals.


def several(**arguments):
    """The loop of an LSTM with a product of three matrices."""
    loop = lstm_loop()
    product = forward(loop, "FC")
    product.type = "BatchMatMul"
    del product.input[2:]
    del product.arg[:]
    set_argument(product, broadcast=1, **arguments)
    return loop


def test_a_caffe2_that_takes_one_matrix(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: (INNER_PRODUCT,))
    expected = "its weights 'layer/gates_t_w' are several matrices, and this Caffe2's oneDNN takes one"
    assert why(RULE, several(), SHAPES) == [expected]
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    assert why(RULE, several(), SHAPES) == [None]


@pytest.mark.parametrize("shape", [(4,), (1, 4, OUTER), (1, PARTS, 4, OUTER)], ids=str)
def test_weights_of_other_dimensions(shape):
    expected = "its weights 'layer/gates_t_w' are laid out in another way"
    assert why(RULE, several(), {**SHAPES, "layer/gates_t_w": shape}) == [expected]


def test_rows_that_would_not_stay_apart(monkeypatch):
    asked = []
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    monkeypatch.setattr(separate_rows, "in_steps", lambda *arguments: asked.append(arguments))
    assert why(RULE, several(), SHAPES) == [separate_rows.why_not(4, OUTER)]
    assert asked == [(CONVOLUTION, 4, OUTER, PARTS)]


# Weights that have been transposed before the loop.


@pytest.mark.parametrize("way", onednn.ways())
def test_transposed_weights_are_laid_out_from_their_rows(way, monkeypatch):
    """By oneDNN, if at all; the CPU transposes nothing for nobody."""
    force(monkeypatch, way)
    options = {"gradients": False, "forward_only": True}
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    rewrite = support.Optimised(["transposed_weights", RULE])
    rewrite(model)
    assert rewrite.report.counts == {"transposed_weights": 1, RULE: 1}
    assert "Transpose" not in [operator.type for operator in model.net.Proto().op]
    laid_out = [operator.type for operator in in_ifs(model.net)]
    assert laid_out.count("Transpose") == int(way == CONVOLUTION)
    support.assert_same(support.run(model, blobs), expected)


def test_what_is_transposed_for_others_too_stays(monkeypatch):
    """Another step operator reads it."""
    force(monkeypatch, INNER_PRODUCT)
    loop = lstm_loop()
    forward(loop, "FC").type = "FCTransposed"
    transposed = loop.add_before("Transpose", ["layer/gates_t_w"], "transposed")
    loop.add_reference(transposed)
    forward(loop, "FCTransposed").input[1] = transposed
    loop.operators.append(made("Copy", [transposed], ["copied"]))
    (rule,) = [rule for rule in RULES if rule.name == RULE]
    sizes = Sizes({"layer/gates_t_w": (16, 4), "h0": (3, 4), "layer/i2h": (9, 3, 16)})
    (site,) = rule.sites(loop)
    assert rule.refusal(loop, site, sizes) is None
    rule.rewrite(loop, site, sizes)
    assert [operator.type for operator in loop.before].count("Transpose") == 1


def test_the_trial_compares_with_what_there_is(monkeypatch):
    """With the transposed weights as they are; oneDNN would lay out the rows."""
    make_up(monkeypatch, Seconds(0.0, 2.0), Seconds(0.0, 1.5), inner_product=Seconds(0.0, 1.0))
    tried, asked = step_products.tried, []
    monkeypatch.setattr(step_products, "tried", lambda size, way: (asked.append((size, way)), tried(size, way))[1])
    model, _ = support.lstm(gradients=False, forward_only=True)
    support.feed()
    assert optimize(model, ["transposed_weights", RULE]).counts == {"transposed_weights": 1, RULE: 1}
    kinds = {way: {(size.kind, size.in_rows) for size, other in asked if other == way} for _, way in asked}
    assert ("FCTransposed", False) in kinds[AS_IT_IS]
    assert all(kinds[way] == {("FC", True)} for way in onednn.WAYS)
