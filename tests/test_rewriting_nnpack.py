"""`packed_products` with NNPACK: what it makes and needs; `test_rewriting_packed_products.py` has values of nets."""

import numpy as np
import pytest
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import LSTM, optimize, prediction_net, retrieve_step_blobs
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.engine_blobs import CONVOLUTION_BUFFERS
from caffe2_recurrent.rewriting.products import nnpack, onednn, product_ways, separate_rows, step_products
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from caffe2_recurrent.rewriting.trials import timing, trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from onednn_support import force, leaving_no_trace, make_up
from test_rewriting_onednn import PRODUCTS, RULE, SHAPES, optimised
from test_rewriting_rules import lstm_loop, set_argument, why

THERE = ["ResizeLike", "Conv", "Squeeze"]

pytestmark = pytest.mark.usefixtures("nnpack_products")


@pytest.fixture
def by_nnpack(monkeypatch):
    """Products are NNPACK's, whatever is faster."""
    assert not nnpack.is_missing()
    force(monkeypatch, NNPACK)


def convolving(operators):
    return [operator for operator in operators if operator.type == "Conv" and operator.engine == nnpack.ENGINE]


# Where it fires.


@pytest.mark.parametrize(
    "options", [{}, {"memory_optimization": True}, support.RECOMPUTED], ids=["kept", "in the sequence", "recomputed"]
)
def test_products_of_both_steps(options, by_nnpack):
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    rewrite = optimised(PRODUCTS)
    rewrite(model)
    assert rewrite.report.counts[RULE] == (3 if options == support.RECOMPUTED else 2)
    for step in (support.step(model.net), support.backward_step(model.net)):
        kinds = [operator.type for operator in step.op]
        assert convolving(step.op) and "FC" not in kinds and "FCTransposed" not in kinds and "BatchMatMul" not in kinds
        position = kinds.index("Conv")
        assert kinds[position - 1 : position + 2] == THERE
        assert not any(map(is_on_onednn, step.op))
    support.assert_same(support.run(model, blobs), expected)


def test_the_executor_stays(by_nnpack):
    model, _ = support.lstm()
    optimize(model, PRODUCTS, even_if_slower=True)
    assert support.argument(support.operator(model.net), "enable_rnn_executor").i == 1


@pytest.mark.parametrize("way", [NNPACK, *onednn.ways()])
def test_the_fastest_of_all_ways_is_taken(way, monkeypatch):
    times = {way.replace(" ", "_").lower(): Seconds(0.0, 1.0)}
    make_up(monkeypatch, Seconds(0.0, 2.0), **times)
    monkeypatch.setattr(separate_rows, "in_steps", lambda *_: True)
    model, _ = support.lstm(gradients=False, forward_only=True)
    assert optimize(model, [RULE]).counts == {RULE: 1}
    assert bool(convolving(support.step(model.net).op)) == (way == NNPACK)


def test_weights_that_are_transposed_already_are_not_transposed_again(by_nnpack):
    model, _ = support.lstm(gradients=False, forward_only=True)
    optimize(model, ["transposed_weights", RULE], even_if_slower=True)
    assert [operator.type for operator in model.net.Proto().op].count("Transpose") == 1


# Values and gradients.


@pytest.mark.parametrize("in_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("outer", [8, 33])
def test_what_it_computes(in_rows, parts, rows, outer):
    found, expected = made_by_it(in_rows, parts, rows, outer)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def made_by_it(in_rows, parts, rows, outer, inner=11):
    """What NNPACK makes of one or several matrices, and what numpy makes of them."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (1, rows, inner)).astype(np.float32)
    weights = random.uniform(-1, 1, (parts, inner, outer)).astype(np.float32)
    expected = np.einsum("nk,pkm->pnm", x[0], weights)
    given = weights.transpose(0, 2, 1) if in_rows else weights
    given = np.ascontiguousarray(given if parts > 1 else given[0])
    loop = trial.lone_loop(["x", "w", "y"])
    product = Product("x", None if in_rows else "w", "w" if in_rows else None, None, "y", rows, inner, outer)
    emitter = product_ways.emit(NNPACK, loop, product._replace(parts=parts), loop.forward)
    with leaving_no_trace():
        found = timing.result([*loop.before, *emitter.operators], {"x": x, "w": given}, "y")
    return found, expected


def test_each_of_several_matrices_is_transposed(monkeypatch):
    monkeypatch.setattr(nnpack, "LAST_TWO", [0, 1, 2])
    found, expected = made_by_it(True, 3, 4, 11)
    assert support.difference(found, expected) > 0.1


@pytest.mark.parametrize("size", [(1, 4), (3, 16), (16, 16), (100, 33)], ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_stay_apart(size, parts):
    assert separate_rows.in_steps(NNPACK, *size, parts)


# Nets.


@pytest.mark.parametrize("gradients", [True, False])
def test_what_steps_keep_can_be_looked_at(by_nnpack, gradients):
    """Of the blobs that convolutions share no step has its own, and other loops have others."""
    model, blobs = support.lstm(gradients=gradients)
    optimised(PRODUCTS if gradients else [RULE])(model)
    support.run(model, blobs)
    kept = list(map(bytes.decode, retrieve_step_blobs(model.net, "kept")))
    assert kept and not any("CONV_BUFFER" in name for name in [*kept, *workspace.Blobs()])


def test_a_step_with_a_buffer_of_its_own_is_seen(by_nnpack, monkeypatch):
    monkeypatch.setattr(nnpack, "CONVOLUTION_BUFFERS", ())
    with pytest.raises(ValueError, match="the engine cannot copy what the steps of loop 'layer/hidden_t_all' keep"):
        test_what_steps_keep_can_be_looked_at(None, True)


@pytest.mark.usefixtures("backward_loops")
def test_a_backward_loop_has_its_buffer_too(by_nnpack):
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    optimised([*PRODUCTS, "backward_loop"])(model)
    support.assert_same(support.run(model, blobs), expected)
    loops = [operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork"]
    assert len(loops) == 2 and all(convolving(support.argument(loop, "step_net").n.op) for loop in loops)
    for loop in loops:
        shared = list(map(bytes.decode, support.argument(loop, "recompute_blobs_on_backward").strings))
        assert [shared.count(blob) for blob in CONVOLUTION_BUFFERS] == [1, 1]


def two_lstms(kind="async_scheduling"):
    """A model of two that nothing makes wait for each other, and what it gives."""
    model, outputs = ModelHelper("two"), []
    for scope in ("one", "other"):
        hidden, *_ = LSTM(model, "x", None, ("h0", "c0"), support.DIM_IN, support.D, scope)
        outputs.append(str(hidden))
    of_output = model.net.AddExternalInput("dh")
    gradients = model.AddGradientOperators(dict.fromkeys(outputs, of_output))
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    model.net.Proto().type, model.net.Proto().num_workers = kind, 2
    return model, [*outputs, *(str(gradients[blob]) for blob in map(str, model.params))]


def test_loops_that_run_at_once(by_nnpack):
    """Each has memory of its own for its convolutions: what others share is locked, and made anew with its lock."""
    model, blobs = two_lstms()
    parameters = {blob: workspace.FetchBlob(blob) for blob in map(str, model.params)}
    expected = support.run(model, blobs)
    for _ in range(5):
        workspace.ResetWorkspace()
        model, blobs = two_lstms()
        for blob, value in parameters.items():
            workspace.FeedBlob(blob, value)
        optimised(PRODUCTS)(model)
        support.assert_same(support.run(model, blobs), expected)
        assert not any("CONV_BUFFER" in blob for blob in workspace.Blobs())


@pytest.mark.usefixtures("unrolled_steps")
@pytest.mark.parametrize("kind", ["", "simple", "async_scheduling", "dag"])
@pytest.mark.parametrize("loops", [1, 2])
def test_steps_are_written_out_where_no_other_loop_may_run(kind, loops, by_nnpack):
    model, _ = two_lstms(kind)
    if loops == 1:
        model, _ = support.lstm()
        model.net.Proto().type = kind
    report = optimize(model, [*PRODUCTS, "unrolled_steps"], even_if_slower=True)
    is_alone = loops == 1 or kind in ("", "simple")
    assert report.counts["unrolled_steps"] == (loops if is_alone else 0)
    reasons = [refusal.reason for refusal in report.refusals if refusal.rule == "unrolled_steps"]
    expected = (
        "another loop may run at the same time, and products by NNPACK have no memory of their own outside a loop"
    )
    assert reasons == ([] if is_alone else [expected] * loops)


@pytest.mark.usefixtures("unrolled_steps")
def test_other_products_are_written_out_beside_another_loop():
    model, _ = two_lstms()
    assert optimize(model, ["parameter_gradients", "unrolled_steps"], even_if_slower=True).counts["unrolled_steps"] == 2


def test_a_net_that_predicts(by_nnpack):
    """Cut out of an optimised net, it has its convolution."""
    model, blobs = support.lstm(gradients=False)
    expected = support.run(model, blobs)
    optimised([RULE])(model)
    net, parameters = prediction_net(model, ["x", "h0", "c0"], blobs)
    assert len(convolving(support.step(net).op)) == 1
    given = {blob: workspace.FetchBlob(blob) for blob in ["x", "h0", "c0", *parameters]}
    workspace.ResetWorkspace()
    for blob, value in given.items():
        workspace.FeedBlob(blob, value)
    workspace.RunNetOnce(net)
    support.assert_same(support.values(blobs), expected)


# What it can do without, and cannot.


def refusal(loop, **options):
    (reason,) = why(RULE, loop, SHAPES, **options)
    return reason


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(onednn, "is_missing", lambda: True)
    assert product_ways.ways_of(1) == product_ways.ways_of(3) == [NNPACK]
    assert refusal(lstm_loop()) is None
    monkeypatch.setattr(nnpack, "is_missing", lambda: True)
    assert refusal(lstm_loop()) == "this Caffe2 has neither oneDNN nor NNPACK"


def test_an_executor_with_threads_of_its_own_has_it(monkeypatch):
    loop = lstm_loop()
    set_argument(loop.forward, **{"rnn_executor.num_threads": 3})
    make_up(monkeypatch, Seconds(0.0, 2.0), inner_product=Seconds(0.0, 0.5), nnpack=Seconds(0.0, 1.0))
    assert refusal(loop) is None and refusal(loop, loss=True) is None
    (site,) = support.rule(RULE).sites(loop)
    support.rule(RULE).rewrite(loop, site, Sizes(SHAPES))
    assert convolving(loop.operators)


@pytest.mark.parametrize("failing", ["no engine", "it fails", "it is wrong"])
def test_a_caffe2_without_it(failing, monkeypatch):
    is_missing = nnpack.is_missing.__wrapped__
    with leaving_no_trace():
        assert not is_missing()
    if failing == "no engine":
        monkeypatch.setattr(nnpack.core, "IsOperatorWithEngine", lambda kind, engine: False)
    elif failing == "it fails":

        def fail(name):
            raise RuntimeError("std::exception")

        monkeypatch.setattr(workspace, "RunNet", fail)
    else:
        monkeypatch.setattr(workspace, "FetchBlob", lambda name: np.zeros((2, 3, 1, 5)))
    assert is_missing()


@pytest.mark.parametrize("kind, in_rows", [("FC", True), ("FCTransposed", False), ("BatchMatMul", False)])
@pytest.mark.parametrize("is_added", [False, True], ids=["alone", "added"])
def test_products_are_tried(kind, in_rows, is_added):
    found = step_products.tried(step_products.Size(kind, 3, 5, 7, kind != "BatchMatMul", in_rows, is_added), NNPACK)
    assert found.step > 0 and found.once > 0
