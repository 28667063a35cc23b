"""`packed_products`: values and gradients of nets with products of the steps in each way, oneDNN's and NNPACK's."""

import numpy as np
import pytest
from caffe2.python import core, workspace

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import LSTM, MILSTM, optimize, recurrent_net
from caffe2_recurrent.loops import shape_inference
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.products import onednn, product_ways, step_products
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from caffe2_recurrent.rewriting.steps import step_shapes
from caffe2_recurrent.rewriting.trials.timing import result
from every_pair import every_pair
from numpy_lstm import Case
from onednn_support import EVERY_CELL, assert_cell, force
from step_nets import Maker
from test_rewriting_onednn import CHOSEN, PRODUCTS, RULE, SAFE, adam, optimised, trained, with_other_weights
from test_rewriting_rules import EVERY_STEP_NET, EXECUTOR

pytestmark = pytest.mark.usefixtures("every_size", "nnpack_products")

WAYS = [*SAFE, NNPACK]
# Rows and features that do and do not fill the blocks in which oneDNN lays out tensors.
SIZES = [(1, 5), (1, 16), (2, 40), (17, 5), (17, 33)]
EVERY_WAY = pytest.mark.parametrize("way", WAYS, indirect=True)


@pytest.fixture
def way(request, monkeypatch):
    """The way in which products are done, whatever is faster."""
    force(monkeypatch, request.param)
    return request.param


@every_pair
@EVERY_CELL
@CHOSEN
@EVERY_WAY
def test_cells(name, variant, rules, way):
    rewrite = optimised(rules)
    assert_cell(name, variant, rewrite)
    assert rewrite.report.counts[RULE]


@every_pair
@EVERY_STEP_NET
@CHOSEN
@EXECUTOR
@EVERY_WAY
def test_step_nets(make, rules, executor, way):
    """With the RNN executor off, as the rule leaves it, and switched on again."""
    step_net, rewrite = make(), optimised(rules)
    outputs, gradients = comparing.run(recurrent_net, step_net, executor, rewrite)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    counts = rewrite.report.counts
    has_product = any(operator.type == "FC" for operator in step_net.cell.Proto().op)
    assert (counts[RULE] + counts.get("products_over_steps", 0) > 0) == has_product


@pytest.mark.parametrize("batch", [1, support.N])
@EVERY_WAY
def test_caffe2_is_not_asked_for_what_is_an_error_to_it(batch, way, backward_loops, monkeypatch):
    """It would log that. A 1 is taken for more, and a slice has another shape between two operators than for others."""
    found, infer = [], workspace.InferShapesAndTypes

    def recording(*arguments, **options):
        result = infer(*arguments, **options)
        found.append(result[0])
        return result

    monkeypatch.setattr(workspace, "InferShapesAndTypes", recording)
    # What was asked before is not asked again.
    shape_inference._inferred.cache_clear()
    step_shapes._made.cache_clear()
    model, _ = support.lstm()
    support.feed(batch=batch)
    assert optimize(model, even_if_slower=True).counts[RULE]
    assert found and all(found)


@pytest.mark.parametrize("batch, size", SIZES)
@EVERY_WAY
def test_sizes_of_products(batch, size, way):
    case = Case(steps=4, batch=batch, dim_in=3, dim=size, options={"outputs_with_grads": "auto"})

    def run(rewrite):
        workspace.ResetWorkspace()
        model, outputs = case.build()
        return comparing.run_layer(case, model, outputs, True, rewrite)[:2]

    rewrite = optimised(PRODUCTS)
    found = run(rewrite)
    assert rewrite.report.counts[RULE] == 2
    for index, expected in enumerate(case.reference()):
        comparing.assert_close(found[0][index], expected, index)
    support.assert_same(found, run(None))


def multiplied(linked=False):
    """h_t = tanh(h W + x) without a bias; with `linked`, h_t = (h + x) W."""
    make = Maker()
    x, h = make.sequence(), make.state()
    w = make.reference("w", step_nets.D, step_nets.D)
    if linked:
        output = make.cell.BatchMatMul([make.cell.Sum([h, x], "total"), w], "h_t", broadcast=1)
    else:
        product = make.cell.BatchMatMul([h, w], "hw", broadcast=1)
        output = make.cell.Tanh(make.cell.Sum([product, x], "total"), "h_t")
    make.link(h, output)
    return make.done(forward_only=True)


@pytest.mark.parametrize("linked", [False, True], ids=["own blob", "linked"])
@EVERY_WAY
def test_no_bias(linked, way):
    step_net = multiplied(linked)
    net, outputs = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    rewrite = optimised([RULE])
    rewrite(net)
    assert rewrite.report.counts == {RULE: 1}
    workspace.RunNetOnce(net)
    outer = comparing.doubles(step_net)
    hidden = outer["h_initial"]
    for t, x in enumerate(outer["X"]):
        hidden = (hidden + x) @ outer["w"] if linked else np.tanh(hidden @ outer["w"] + x)
        comparing.assert_close(workspace.FetchBlob(outputs[0])[t], hidden, t)


def linked_product():
    """h_t = FC(x + h, W, b)."""
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.fc(make.cell.Sum([x, h], "total"), "u"))
    return make.done(forward_only=True)


@pytest.mark.parametrize("by", [way for way in WAYS if way != onednn.INNER_PRODUCT])
@pytest.mark.parametrize("faster", [True, False], ids=["ATen faster", "ATen slower"])
@pytest.mark.parametrize("linked", [False, True], ids=["own blob", "linked"])
def test_the_bias(linked, faster, by, monkeypatch):
    """Added by ATen, but for a linked blob, which cannot be a tensor of ATen's."""
    force(monkeypatch, by)
    monkeypatch.setattr(vectorised, "aten_adds_faster", lambda rows, columns: faster)
    step_net = linked_product() if linked else step_nets.reference_read_twice()
    rewrite = optimised([RULE])
    found = comparing.run(recurrent_net, step_net, executor=False, rewrite=rewrite)
    comparing.assert_outputs_and_gradients(step_net, *found)
    biases = [["u_b"]] if linked else [["b"]] * 2
    adding = [operator for operator in support.step(rewrite.net).op if list(operator.input[1:]) in biases]
    assert [operator.type for operator in adding] == ["ATen" if faster and not linked else "Add"] * len(biases)


@EVERY_WAY
def test_rows_that_are_no_numbers(way):
    model, blobs = support.lstm(gradients=False, forward_only=True)
    expected = support.run(model, blobs)
    optimised(PRODUCTS)(model)
    assert_rows_stay_apart(model, blobs, expected)


def assert_rows_stay_apart(model, blobs, expected):
    """Sequences that have ended may hold anything: the others stay as `expected` where one of three does."""
    for name in ("h0", "c0"):
        value = workspace.FetchBlob(name)
        value[:, 1] = [np.nan, np.inf, -np.inf, 0]
        workspace.FeedBlob(name, value)
    found = support.run(model, blobs)
    for ours, theirs in zip(found[0], expected[0]):
        assert np.isnan(ours[:, 1]).any()
        assert support.difference(ours[:, [0, 2]], theirs[:, [0, 2]]) < support.TOLERANCE


@pytest.mark.parametrize("planted", ["rows for columns", "no bias", "another blob"])
@EVERY_WAY
def test_a_wrong_product_is_seen(planted, way, monkeypatch):
    """What the tests above compare would not pass over these."""
    emit = product_ways.emit

    def emit_wrongly(way, loop, product, beside):
        if planted == "rows for columns":
            product = product._replace(columns=product.rows, rows=product.columns)
        elif planted == "no bias":
            product = product._replace(bias=None)
        else:
            product = product._replace(input="x_t")
        return emit(way, loop, product, beside)

    monkeypatch.setattr(product_ways, "emit", emit_wrongly)
    with support.optimising([RULE]), pytest.raises(AssertionError, match="output 0"):
        comparing.assert_right(recurrent_net, step_nets.reference_read_twice())


# Nets: their types, other sizes, other weights.


@pytest.mark.parametrize("builder", [LSTM, MILSTM], ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@EVERY_WAY
def test_training_gives_the_same_parameters(builder, kind, way):
    def train(change):
        return trained(change, kind, builder, adam, runs=25)

    rewrite = optimised([*PRODUCTS, "products_over_steps"])
    found, expected = train(rewrite), train(lambda model: None)
    assert rewrite.report.counts[RULE] and rewrite.report.counts["products_over_steps"]
    for ours, theirs in zip(found[0], expected[0]):
        # Adam divides small gradients by their size, and so magnifies what rounding leaves of them.
        assert support.difference(ours, theirs) < 1e-3


@CHOSEN
@EVERY_WAY
def test_a_net_read_from_a_file(rules, way):
    expected = support.run(*support.lstm(lengths=True))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(lengths=True)
    for change in (lambda net: net, lambda net: support.as_read_from_a_file(core.Net(net))):
        net = change(support.as_read_from_a_file(model.net))
        optimised(rules)(net)
        workspace.RunNetOnce(core.Net(change(net)))
        support.assert_same(support.values(blobs), expected)


@CHOSEN
@pytest.mark.parametrize("memory", [True, False], ids=["recomputed", "kept"])
@EVERY_WAY
def test_other_numbers_of_steps_and_sequences(rules, memory, way):
    options = {"lengths": True, "memory_optimization": memory}
    expected = support.runs_of_other_sizes(lambda model: None, **options)
    support.assert_same(support.runs_of_other_sizes(optimised(rules), **options), expected)


@EVERY_WAY
def test_no_steps(way):
    expected = support.run_without_steps(lambda model: None)
    support.assert_same(support.run_without_steps(optimised()), expected)


@CHOSEN
@EVERY_WAY
def test_other_weights_in_the_second_run(rules, way):
    support.assert_same(with_other_weights(optimised(rules)), with_other_weights(lambda model: None))


@pytest.mark.usefixtures("nnpack_products")
@pytest.mark.parametrize("is_added", [False, True], ids=["", "added"])
def test_in_trials_rows_are_written_and_results_read_by_others(is_added):
    """Of all ways alike: what a core waits for, because another one has it, is what it waits for in a step."""
    size = step_products.Size("FC", 3, 5, 7, True, True, is_added, 1, Keeping.FILTERS | Keeping.WEIGHTS)
    random = np.random.RandomState(0)
    for way in (step_products.AS_IT_IS, step_products.TRANSPOSED, *product_ways.ways_of(1, may_keep=True)):
        subject = step_products._subject(size, way)
        values = {blob: random.uniform(-1, 1, shape).astype(np.float32) for blob, shape in subject.shapes.items()}
        right = values["rows"] @ values["w"].T + values["b"] + (values["a"] if is_added else 0)
        found = result([*subject.kept, *subject.once, *subject.step], values, "result")
        np.testing.assert_allclose(found.reshape(right.shape), right, atol=support.TOLERANCE)
