"""`gradient_products`: gradients of weights over all steps, each as products of its own."""

from collections import Counter

import numpy as np
import pytest
from caffe2.python import core, workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.products import gradients_apart, weighted_sums
from caffe2_recurrent.rewriting.products.gradients_apart import SUMS, TRANSPOSED, Apart, Size, Weights
from caffe2_recurrent.rewriting.rules import products_over_steps
from caffe2_recurrent.rewriting.trials.timing import Seconds, result
from net_products_support import GRADIENT, PRODUCT, Net, changed_between, outside, said, without_the_gradient_of_x
from onednn_support import EVERY_CELL, assert_cell
from step_nets import Maker, N, T
from test_rewriting_rules import EVERY_STEP_NET

RULE = "gradient_products"
MOVED = ["sequence_operators", "parameter_gradients", RULE]
OF_LSTM = ["parameter_gradients", RULE]
WAYS = [Apart(), Apart(TRANSPOSED), Apart(SUMS, SUMS)]


def force(monkeypatch, *ways):
    """Have these ways the fastest, in turn; the last of them from then on."""
    left = list(ways)
    monkeypatch.setattr(gradients_apart, "fastest", lambda size: left.pop(0) if len(left) > 1 else left[0])


@pytest.fixture(params=WAYS, ids=lambda way: way.weights)
def way(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


def kinds(net):
    return Counter(operator.type for operator in net.Proto().op)


# Where it fires.


def assert_kept(**options):
    """A net optimised twice gives what it gave, in the same shapes; the net and the report."""
    expected = Net(**options).values()
    made = Net(**options)
    rewrite = support.Optimised([RULE])
    rewrite(made.net)
    support.assert_same(made.values(), expected)
    return made.net, rewrite.report


@pytest.mark.parametrize("shape", [(T, N, 4), (T, N, 2, 2), (T, N, 17)], ids=str)
def test_the_gradient_of_the_product_that_makes_the_sequence(shape, way):
    """Axes, shapes and values stay, whatever X has behind [T, N]."""
    net, report = assert_kept(shape=shape)
    assert [rewrite.what for rewrite in report.rewrites] == ["FCGradient -> 'w_grad', 'b_grad', 'x_grad'"]
    assert outside(net) == [PRODUCT]
    by_sums = 2 * (way.weights == SUMS)
    assert kinds(net)["MatMul"] == 3 - by_sums and kinds(net)[weighted_sums.KIND] == by_sums
    assert kinds(net)["Transpose"] == (way.weights == TRANSPOSED)


def test_a_gradient_operator_of_two_outputs(way):
    made = Net(change=without_the_gradient_of_x)
    del made.gradients["x"]
    support.Optimised([RULE])(made.net)
    expected = Net()
    del expected.gradients["x"]
    found = made.values()
    assert outside(made.net) == [PRODUCT] and kinds(made.net)["MatMul"] == 1 + (way.weights != SUMS)
    support.assert_same(found, expected.values())


def test_two_loops_over_one_result(way):
    net, report = assert_kept(loops=2)
    assert [rewrite.loop for rewrite in report.rewrites] == list(report.loops)
    assert outside(net) == [PRODUCT]


@support.EVERY_LSTM
def test_the_gradients_of_an_lstm(options, way):
    net, report = support.kept(options, OF_LSTM)
    assert [rewrite.what for rewrite in report.rewrites if rewrite.rule == RULE] == [
        "FCGradient -> 'layer/gates_t_w_grad', 'layer/gates_t_b_grad'",
        "FCGradient -> 'layer/i2h_w_grad', 'layer/i2h_b_grad', 'x_grad'",
    ]
    assert GRADIENT not in outside(net)


@EVERY_CELL
def test_cells(name, variant):
    rewrite = support.Optimised(MOVED)
    assert_cell(name, variant, rewrite)
    assert rewrite.report.counts[RULE]
    # The product of the encoder's outputs makes no sequence of the loop.
    assert outside(rewrite.net).count(GRADIENT) <= name.startswith("attention")


@EVERY_STEP_NET
def test_step_nets(make):
    rewrite = support.Optimised(MOVED)
    step_net = make()
    outputs, gradients = comparing.run(recurrent_net, step_net, rewrite=rewrite)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    has_product = any(operator.type == PRODUCT for operator in step_net.cell.Proto().op)
    assert (rewrite.report.counts[RULE] > 0) == (has_product and bool(gradients))
    assert GRADIENT not in outside(rewrite.net)


@pytest.mark.parametrize("kind", ["MatMul", "Copy", "Transpose"])
def test_a_wrong_product_is_seen(kind, monkeypatch):
    """One that reads another blob: what the tests above compare would not pass over it."""
    force(monkeypatch, Apart(TRANSPOSED))
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    assert optimize(model, OF_LSTM, even_if_slower=True).counts[RULE] == 2
    changed = [operator for operator in model.net.Proto().op if operator.type == kind][-1]
    other = {"MatMul": "layer/i2h", "Copy": "layer/gates_t_b", "Transpose": "layer/i2h_w_grad_other"}[kind]
    workspace.FeedBlob("layer/i2h_w_grad_other", np.ones((support.DIM_IN, 4 * support.D), np.float32))
    changed.input[0] = other
    if kind == "Transpose":
        model.net.Proto().external_input.append(other)
    with pytest.raises(AssertionError, match="output [4-9]"):
        support.assert_same(support.run(model, blobs), expected)


def test_other_numbers_of_steps_and_sequences(way):
    expected = support.runs_of_other_sizes(lambda model: None)
    support.assert_same(support.runs_of_other_sizes(support.Optimised(OF_LSTM)), expected)


def test_no_steps_at_all(way):
    """Gradients of 0."""
    expected = support.run_without_steps(lambda model: None)
    support.assert_same(support.run_without_steps(support.Optimised(OF_LSTM)), expected)


def test_nets_of_type_dag(way):
    """The operators wait for each other, the shared gradient of a bias too."""
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    support.Optimised(OF_LSTM)(model)
    model.net.Proto().type, model.net.Proto().num_workers = "dag", 4
    for _ in range(20):
        support.assert_same(support.run(model, blobs), expected)


# Two gradients with the same dY share the sum of its rows.


def sums(net):
    """How often the net adds up rows by a product of its own."""
    return sum(operator.type == "Squeeze" and operator.output[0].endswith("_sums") for operator in net.Proto().op)


def optimised_lstm(change=lambda net: None, loss=None, monkeypatch=None):
    """The net of an LSTM after `change`, which gives what it was without the rule."""
    model, blobs = support.lstm()
    change(model.net)
    expected = support.run(model, blobs)
    if loss is not None:
        rule = support.rule(RULE)
        monkeypatch.setattr(type(rule), "loss", lambda self, loop, site, sizes: "slower" if loss in site.what else None)
    rewrite = support.Optimised(OF_LSTM, even_if_slower=loss is None)
    rewrite(model)
    support.assert_same(support.run(model, blobs), expected)
    return model.net


def test_the_gradient_of_a_bias_is_shared(way):
    assert sums(optimised_lstm()) == 1


def test_a_gradient_that_stays_shares_that_of_its_bias(way, monkeypatch):
    """The first of the two, which adds it up anyway."""
    net = optimised_lstm(loss="gates_t_w_grad", monkeypatch=monkeypatch)
    assert outside(net) == [PRODUCT, GRADIENT] and sums(net) == 0


def test_nothing_is_shared_with_a_gradient_that_stays(way, monkeypatch):
    """The second one, which adds it up again."""
    net = optimised_lstm(loss="i2h_w_grad", monkeypatch=monkeypatch)
    assert outside(net) == [PRODUCT, GRADIENT] and sums(net) == 1


def test_a_gradient_that_is_changed_is_added_up_anew(way):
    assert sums(optimised_lstm(changed_between)) == 2


def changed_gradient_of_a_bias(net):
    """The first one's, in its place, before the second is computed."""
    (position,) = [index for index, operator in enumerate(net.Proto().op) if "layer/i2h_w_grad" in operator.output]
    doubled = core.CreateOperator("Scale", ["layer/gates_t_b_grad"], ["layer/gates_t_b_grad"], scale=2.0)
    operators = [*net.Proto().op[:position], doubled, *net.Proto().op[position:]]
    del net.Proto().op[:]
    net.Proto().op.extend(operators)


@pytest.mark.parametrize("loss", [None, "gates_t_w_grad"])
def test_what_is_shared_is_what_nobody_changes(loss, way, monkeypatch):
    net = optimised_lstm(changed_gradient_of_a_bias, loss, monkeypatch)
    assert sums(net) == (loss is None)


def two_products_of_a_sum():
    """h_t = tanh(FC(x) + FC(h)): both gradients are in the loop, and are moved behind it."""
    make = Maker()
    x, h = make.sequence(), make.state()
    total = make.cell.Sum([make.fc(x, "u"), make.fc(h, "v")], "total")
    make.link(h, make.cell.Tanh(total, "h_t"))
    return make.done()


@pytest.mark.parametrize("loss", [None, "u_w", "v_w"])
def test_gradients_behind_the_loop_share(loss, way, monkeypatch):
    """Whichever of them stays."""
    if loss is not None:
        monkeypatch.setattr(
            type(support.rule(RULE)), "loss", lambda self, loop, site, sizes: "slower" if loss in site.what else None
        )
    step_net = two_products_of_a_sum()
    rewrite = support.Optimised(["parameter_gradients", RULE], even_if_slower=loss is None)
    outputs, gradients = comparing.run(recurrent_net, step_net, rewrite=rewrite)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    assert rewrite.report.counts[RULE] == (2 if loss is None else 1)
    assert sums(rewrite.net) <= 1


# Two that are weighted sums share the columns of dY.


def columns(net):
    """How often the net lays them out."""
    return kinds(net)["Tile"]


@pytest.fixture
def by_sums(monkeypatch):
    force(monkeypatch, Apart(SUMS))


def test_columns_are_shared(by_sums):
    net = optimised_lstm()
    assert kinds(net)[weighted_sums.KIND] == 2 and columns(net) == 1


def test_columns_are_not_shared_with_a_gradient_that_stays(by_sums, monkeypatch):
    """The second has the bias from the first, and nothing else."""
    net = optimised_lstm(loss="gates_t_w_grad", monkeypatch=monkeypatch)
    assert kinds(net)[weighted_sums.KIND] == 1 and columns(net) == 1 and sums(net) == 0


@pytest.mark.parametrize("first, second", [(Apart(SUMS), Apart()), (Apart(), Apart(SUMS))])
def test_one_of_two_is_weighted_sums(first, second, monkeypatch):
    force(monkeypatch, first, second)
    net = optimised_lstm()
    assert kinds(net)[weighted_sums.KIND] == 1 and columns(net) == 1 and sums(net) == 1


def test_columns_of_a_gradient_that_is_changed_are_not_shared(by_sums):
    net = optimised_lstm(changed_between)
    assert kinds(net)[weighted_sums.KIND] == 2 and columns(net) == 2


def test_a_trial_knows_whether_the_columns_are_there(monkeypatch):
    asked = make_up(monkeypatch, as_it_is=3.0, sums=1.0)
    model, _ = support.lstm()
    optimize(model, OF_LSTM)
    assert [size.has_columns for size in asked if size.results == 3][-1]
    assert not any(size.has_columns for size in asked if size.results == 2)


@pytest.mark.parametrize("fastest", ["sums", "direct"])
def test_onednn_is_compared_with_what_finds_the_columns_there(fastest, monkeypatch):
    """What the first gradient will leave there if it stays MKL's, though it has not been rewritten yet."""
    make_up(monkeypatch, **{"as_it_is": 3.0, "direct": 2.0, "sums": 2.0, fastest: 1.0})
    asked = []

    def seconds(size, layout):
        asked.append(size)
        return 2.0 if layout else 1.0

    monkeypatch.setattr(products_over_steps, "seconds", seconds)
    model, _ = support.lstm()
    optimize(model, [*OF_LSTM, "products_over_steps"])
    (second,) = {size for size in asked if size.results == 3}
    assert second.has_bias and second.has_columns == (fastest == "sums")
    assert not any(size.has_bias or size.has_columns for size in asked if size.results != 3)


# Refusals, and what had better stay.


def test_an_lstm_is_no_near_miss():
    assert said(RULE) == [None]


def make_up(monkeypatch, **seconds):
    """Times of the ways: `as_it_is`, `direct`, `transposed`, `sums`; the sizes that were asked about."""
    asked = []
    names = {None: "as_it_is", Apart(): "direct", Apart(TRANSPOSED): "transposed", Apart(SUMS): "sums"}

    def tried(size):
        asked.append(size)
        return {way: Seconds(0.0, seconds[name]) for way, name in names.items() if name in seconds}

    monkeypatch.setattr(gradients_apart, "_tried", tried)
    return asked


@pytest.mark.parametrize("as_it_is, is_faster", [(1.5, True), (1.01, False), (0.9, False)])
def test_a_loss_where_a_trial_finds_one(as_it_is, is_faster, monkeypatch):
    asked = make_up(monkeypatch, as_it_is=as_it_is, direct=1.0)
    assert said(RULE, loss=True) == [None if is_faster else "for [16, 27] x [27, 2] it is not faster"]
    assert set(asked) == {Size(27, Weights(16, 2), 3)}


@pytest.mark.parametrize("fast", ["direct", "transposed", "sums"])
def test_the_fastest_way_is_taken(fast, monkeypatch):
    make_up(monkeypatch, **{"as_it_is": 3.0, "direct": 2.0, "transposed": 2.0, "sums": 2.0, fast: 1.0})
    net = Net().net
    optimize(net, [RULE])
    assert kinds(net)["Transpose"] == (fast == "transposed") and kinds(net)[weighted_sums.KIND] == (fast == "sums")


def test_a_trial_knows_whether_the_gradient_of_the_bias_is_there(monkeypatch):
    asked = make_up(monkeypatch, as_it_is=3.0, direct=1.0)
    model, _ = support.lstm()
    optimize(model, OF_LSTM)
    rows, outer = support.T * support.N, 4 * support.D
    expected = {Size(rows, Weights(outer, support.D), 2), Size(rows, Weights(outer, support.DIM_IN), 3, True)}
    assert set(asked) == expected


def test_a_gradient_is_not_there_because_it_is_to_be_shared(monkeypatch):
    """The first would be faster in parts if it had its own sums from elsewhere."""
    monkeypatch.setattr(
        gradients_apart,
        "_tried",
        lambda size: {None: Seconds(0.0, 2.0), Apart(): Seconds(0.0, 1.0 if size.has_bias else 3.0)},
    )
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    rewrite = support.Optimised(OF_LSTM, even_if_slower=False)
    rewrite(model)
    assert rewrite.report.counts[RULE] == 1 and outside(model.net) == [PRODUCT, GRADIENT] and sums(model.net) == 0
    support.assert_same(support.run(model, blobs), expected)


@pytest.mark.parametrize("rows, tried", [(64000, 1907), (700, 700)])
def test_a_trial_of_many_rows_is_made_with_fewer(rows, tried, monkeypatch):
    asked = make_up(monkeypatch, as_it_is=1.0)
    size = Size(rows, Weights(2048, 512), 3)
    assert gradients_apart.seconds(size) == {None: pytest.approx(rows / tried)}
    assert asked == [size._replace(rows=tried)]


def test_the_transpose_is_for_few_columns():
    assert gradients_apart.ways(Size(999, Weights(512, 128), 3)) == [None, Apart(), Apart(TRANSPOSED)]
    assert gradients_apart.ways(Size(999, Weights(512, 129), 3)) == [None, Apart()]


def test_sums_are_for_few_elements():
    assert gradients_apart.ways(Size(64, Weights(512, 129), 2)) == [None, Apart(), Apart(SUMS)]
    expected = [None, Apart(), Apart(rows=SUMS), Apart(SUMS), Apart(SUMS, SUMS)]
    assert gradients_apart.ways(Size(64, Weights(512, 129), 3)) == expected
    assert gradients_apart.ways(Size(65, Weights(512, 129), 3)) == [None, Apart()]


def test_sums_need_aten(monkeypatch):
    monkeypatch.setattr(weighted_sums, "aten_is_missing", lambda: True)
    assert gradients_apart.ways(Size(9, Weights(512, 129), 3)) == [None, Apart()]


SIZES = [
    Size(6, Weights(7, 5), 2),
    Size(6, Weights(7, 5), 3),
    Size(6, Weights(7, 200), 3, True),
    Size(6, Weights(7, 5), 3, True, True),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_are_tried(size):
    """Each way runs by itself and gives the same; nobody knows how long that takes."""
    found = gradients_apart.seconds(size)
    assert list(found) == gradients_apart.ways(size) and min(found.values()) > 0
    assert found[gradients_apart.fastest(size)] == min(found.values())
    random = np.random.RandomState(0)
    subjects = [gradients_apart.subject(size, way) for way in gradients_apart.ways(size)]
    values = {blob: random.randn(*shape).astype(np.float32) for blob, shape in subjects[-1].shapes.items()}
    values["bias"] = values["dy"].sum(0)
    for blob in ["dw", "db", "dx"][: size.results]:
        expected, *others = [result([*subject.once, *subject.step], values, blob) for subject in subjects]
        for other in others:
            assert other.shape == expected.shape and support.difference(other, expected) < support.TOLERANCE


# By MKL as it is, by oneDNN, rows, and what MKL is to be taken to need. What has a thousand rows is no sum of them.
@pytest.mark.parametrize(
    "by_mkl, by_onednn, rows, expected",
    [
        (3.0, 1.6, 6, 2.0),
        (3.0, 1.6, 10000, 2.0),
        # Not even in parts is it as fast.
        (3.0, 1.4, 10000, 3.0),
        # But weighted sums may be, of what is small.
        (3.0, 1.4, 6, 2.0),
    ],
)
def test_onednn_is_compared_with_the_faster_way(by_mkl, by_onednn, rows, expected, monkeypatch):
    """A gradient that MKL is to have in parts is none for oneDNN to beat as it is."""
    asked = []

    def apart(size):
        asked.append(size)
        return {None: 6.0, Apart(): 4.0}

    def tried(size, safe):
        return {layout: Seconds(0.0, by_mkl if layout is None else by_onednn) for layout in (None, *safe)}

    monkeypatch.setattr(gradients_apart, "seconds", apart)
    monkeypatch.setattr(products_over_steps, "_tried", tried)
    size = products_over_steps.Size(GRADIENT, rows, 5, 7, 3, has_bias=True)
    assert products_over_steps.seconds(size, None) == pytest.approx(expected)
    assert asked == [Size(rows, Weights(7, 5), 3, has_bias=True)] * (expected < by_mkl)
    assert products_over_steps.seconds(size, products_over_steps.fastest(size)) == by_onednn
    del asked[:]
    # A product is had in one way.
    assert products_over_steps.seconds(size._replace(kind=PRODUCT, results=1), None) == by_mkl and not asked
