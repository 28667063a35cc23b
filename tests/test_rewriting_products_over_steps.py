"""`products_over_steps`: products before and after a loop, and of the net around it, by oneDNN."""

import itertools

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import comparing
import rewriting_support as support
from attention_support import ENCODED, decoder, runs_of_attention
from caffe2_recurrent import LSTM, optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.products import (
    net_products,
    onednn,
    onednn_convolutions,
    onednn_over_steps,
    separate_rows,
)
from caffe2_recurrent.rewriting.products.onednn_convolutions import IN_BLOCKS, IN_ROWS, ROWS_TRANSPOSED, TRANSPOSED
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout, layouts
from caffe2_recurrent.rewriting.rules import RULES, products_over_steps
from caffe2_recurrent.rewriting.rules.products_over_steps import Size
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, result
from every_pair import every_pair
from net_products_support import (
    GRADIENT,
    PRODUCT,
    Net,
    changed_between,
    outside,
    said,
    without_the_gradient_of_x,
)
from onednn_support import EVERY_CELL, assert_cell, assert_placed, in_ifs, inner_nets, promise_constant_threads
from step_nets import D, Maker, N, T
from test_rewriting_rules import EVERY_STEP_NET, loop_of

RULE = "products_over_steps"
MOVED = ["sequence_operators", "parameter_gradients", RULE]
# All but the one that comes first where two gradients are of the same dY.
ALL_OTHERS = [rule.name for rule in RULES if rule.name != "joined_gradients"]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Also those at which torch 1.7's oneDNN would spread what is no number; here all are numbers."""
    monkeypatch.setattr(separate_rows, "over_steps", lambda layout: True)


# As a trial finds it.
fastest_found = products_over_steps.fastest


@pytest.fixture(autouse=True)
def as_they_are(monkeypatch):
    """In the plain layout, where a test says nothing else: which is the fastest here nobody knows."""
    monkeypatch.setattr(products_over_steps, "fastest", lambda size: Layout(size.inner, size.outer))


def assert_kept(rules=(RULE,), gone=(), **options):
    """A net optimised twice gives what it gave, in the same shapes; the report."""
    expected = Net(**options).values()
    made = Net(**options)
    rewrite = support.Optimised(rules)
    rewrite(made.net)
    assert_placed(made.net)
    products = [operator.type for operator in in_ifs(made.net) if operator.type in (PRODUCT, GRADIENT)]
    assert sorted(products) == sorted(gone) and set(outside(made.net)).isdisjoint(gone)
    assert all(map(is_on_onednn, (operator for operator in in_ifs(made.net) if operator.type in (PRODUCT, GRADIENT))))
    support.assert_same(made.values(), expected)
    return rewrite.report


# The product of the net that makes the loop's sequence.

BOTH = [PRODUCT, GRADIENT]
PLACES = ["FC -> 'X'", "FCGradient -> 'w_grad', 'b_grad', 'x_grad'"]


@pytest.mark.parametrize("shape", [(T, N, 4), (T, N, 2, 2), (T, N, 17)], ids=str)
def test_the_product_that_makes_the_sequence(shape):
    """Axes, shapes and values stay, whatever X has behind [T, N]."""
    report = assert_kept(gone=BOTH, shape=shape)
    assert [rewrite.what for rewrite in report.rewrites] == PLACES


def test_a_gradient_operator_of_two_outputs():
    made = Net(change=without_the_gradient_of_x)
    assert made.gradients.pop("x") == "x_grad"
    rewrite = support.Optimised([RULE])
    rewrite(made.net)
    assert [rewrite.what for rewrite in rewrite.report.rewrites] == ["FC -> 'X'", "FCGradient -> 'w_grad', 'b_grad'"]
    expected = Net()
    del expected.gradients["x"]
    support.assert_same(made.values(), expected.values())


def test_two_loops_over_one_result():
    """Each of them says so, and the net has the product once."""
    report = assert_kept(loops=2, gone=BOTH)
    assert [(rewrite.loop, rewrite.what) for rewrite in report.rewrites] == [
        (loop, place) for loop in report.loops for place in PLACES
    ]


def test_a_product_whose_result_is_no_sequence_of_the_loop():
    """The loop's sequence is made of it, by another operator."""
    report = assert_kept(axis=1, shape=(T * N, 4), gone=[])
    assert report.total == 0 and report.refusals == ()


def test_a_product_beside_the_loop():
    def beside(net):
        net.FC(["x", "w", "b"], "beside", axis=2)

    made = Net(change=beside)
    assert optimize(made.net, [RULE], even_if_slower=True).total == 2
    assert outside(made.net) == [PRODUCT]
    made.values()
    np.testing.assert_allclose(workspace.FetchBlob("X"), workspace.FetchBlob("beside"), rtol=1e-5, atol=1e-6)


@support.EVERY_LSTM
def test_the_product_of_an_lstm(options):
    net, report = support.kept(options, ["parameter_gradients", RULE])
    assert [rewrite.what for rewrite in report.rewrites if rewrite.rule == RULE] == [
        "FCGradient -> 'layer/gates_t_w_grad', 'layer/gates_t_b_grad'",
        "FC -> 'layer/i2h'",
        "FCGradient -> 'layer/i2h_w_grad', 'layer/i2h_b_grad', 'x_grad'",
    ]
    assert outside(net) == []


# Products that other rules have moved out of the loop.


def of_reference(rank):
    """h_t = tanh(v . FC(e) + x + h), where e `[1, 2, 4]` or `[2, 4]` is the same in all steps."""
    make = Maker()
    x, h = make.sequence(), make.state()
    shape = (1, N, 4) if rank == 3 else (N, 4)
    e = make.reference("e", *shape)
    weights, bias = make.reference("w", D, 4), make.reference("b", D)
    product = make.cell.FC([e, weights, bias], "product", axis=rank - 1)
    if rank == 2:
        product = make.cell.ExpandDims(product, "with_steps", dims=[0])
    make.link(h, make.cell.Tanh(make.cell.Sum([product, x, h], "total"), "h_t"))
    return make.done()


@pytest.mark.parametrize("rank", [2, 3])
def test_a_product_that_no_step_changes(rank):
    rewrite = support.Optimised(["invariants", RULE])
    step_net = of_reference(rank)
    outputs, gradients = comparing.run(recurrent_net, step_net, rewrite=rewrite)
    # The gradient of such a product stays in the loop.
    assert rewrite.report.counts[RULE] == 1 and [op.type for op in in_ifs(rewrite.net)].count(PRODUCT) == 1
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)


@EVERY_CELL
def test_cells(name, variant):
    rewrite = support.Optimised(MOVED)
    assert_cell(name, variant, rewrite)
    assert rewrite.report.counts[RULE]
    assert outside(rewrite.net)[:1] != [GRADIENT]


@EVERY_STEP_NET
def test_step_nets(make):
    rewrite = support.Optimised(MOVED)
    step_net = make()
    outputs, gradients = comparing.run(recurrent_net, step_net, rewrite=rewrite)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    report = rewrite.report
    # Not all parameter gradients are made by products.
    moved = [made for made in report.rewrites if made.rule == "sequence_operators" or made.what.startswith(GRADIENT)]
    assert (report.counts[RULE] > 0) == bool(moved)
    assert outside(rewrite.net) == []


WRONG = [(PRODUCT, 0, "other"), (PRODUCT, 2, "u0_b"), (GRADIENT, 0, "other"), (GRADIENT, 2, "X")]


@pytest.mark.parametrize("kind, position, blob", WRONG)
def test_a_wrong_product_is_seen(kind, position, blob, monkeypatch):
    """One that reads another blob: what the tests above compare would not pass over it."""
    in_a_net = onednn_over_steps.in_a_net

    def of_another_blob(loop, operator, *others):
        if operator.type == kind:
            operator.input[position] = blob
        return in_a_net(loop, operator, *others)

    monkeypatch.setattr(onednn_over_steps, "in_a_net", of_another_blob)
    expected = Net().values()
    made = Net(change=lambda net: net.AddExternalInput("other"))
    workspace.FeedBlob("other", np.ones((T, N, 4), dtype=np.float32))
    # A trial would trip over what is not there.
    assert optimize(made.net, [RULE], even_if_slower=True, trials=False).total == 2
    with pytest.raises(AssertionError, match="output 0" if kind == PRODUCT else "gradient of [wbx]"):
        support.assert_same(made.values(), expected)


def test_other_numbers_of_steps_and_sequences():
    expected = support.runs_of_other_sizes(lambda model: None)
    support.assert_same(support.runs_of_other_sizes(support.Optimised(["parameter_gradients", RULE])), expected)


# Refusals, and what had better stay.


def test_an_lstm_is_no_near_miss():
    assert said(RULE) == [None, None]


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(onednn, "is_missing", lambda: True)
    assert said(RULE) == ["this Caffe2 has no oneDNN"] * 2


def test_what_is_around_a_loop():
    """In a copy: the net stays as it is until it has been rewritten."""
    net = Net(loops=2).net
    for loop in read_loops(net.Proto()).values():
        assert sorted(loop.surroundings.products) == [0, len(net.Proto().op) - 1]
        for position, (copy,) in loop.surroundings.products.items():
            assert copy == net.Proto().op[position] and copy is not net.Proto().op[position]


def test_products_that_make_what_steps_read_by_its_name():
    """What is encoded has rows of its own, as many as there are encoded."""
    model, _ = decoder()
    (loop,) = read_loops(model.net.Proto()).values()
    around = loop.surroundings
    found = [(made.type, made.output[0]) for _, (made,) in sorted(around.of_references.items())]
    assert found == [
        ("FC", "layer/weighted_encoder_outputs"),
        ("FCGradient", "layer/weighted_encoder_outputs_w_grad"),
    ]
    assert set(around.products).isdisjoint(around.of_references)
    shapes = {"x": (5, 3, 2), "encoded": (7, 3, ENCODED), "layer/weighted_encoder_outputs_w": (ENCODED, ENCODED)}
    for (operator,), sizes in itertools.product(around.of_references.values(), (shapes, {**shapes, "x": (9, 3, 2)})):
        found = net_products.dimensions(loop, operator, find_sizes(model.net.Proto(), None, sizes))
        assert found == (21, ENCODED, ENCODED)
    del shapes["encoded"]
    assert net_products.dimensions(loop, operator, find_sizes(model.net.Proto(), None, shapes)) is None


@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_what_is_encoded(kind):
    """Of whatever size: outputs and gradients of a decoder stay."""

    def change(model):
        model.net.Proto().type = kind
        rewrite(model)

    rewrite = support.Optimised([RULE])
    support.assert_same(runs_of_attention(change), runs_of_attention(lambda model: None))
    assert outside(rewrite.net) == [] and {
        "FC -> 'layer/weighted_encoder_outputs'",
        "FCGradient -> 'layer/weighted_encoder_outputs_w_grad', 'layer/weighted_encoder_outputs_b_grad', "
        "'encoded_grad'",
    } <= {rewritten.what for rewritten in rewrite.report.rewrites}


def test_products_behind_each_other_around_a_loop():
    """Those that make what another one reads, with their gradients; one alone makes the sequence itself."""
    model = ModelHelper("model")
    model.net.FC(["x", "w", "b"], "first", axis=2)
    model.net.FC(["other", "w", "b"], "apart", axis=2)
    hidden_all, *_ = LSTM(model, "first", None, ("h0", "c0"), 3, 4, "layer")
    model.AddGradientOperators([model.net.SumElements(hidden_all, "loss")])
    (loop,) = read_loops(model.net.Proto()).values()
    found = [(operator.type, operator.output[0]) for _, (operator,) in sorted(loop.surroundings.products.items())]
    assert found == [("FC", "first"), ("FC", "layer/i2h"), ("FCGradient", "layer/i2h_w_grad"), ("FCGradient", "w_grad")]
    assert [model.net.Proto().op[position].output[0] for position in loop.surroundings.sources.values()] == [
        "layer/i2h"
    ]
    assert [model.net.Proto().op[position].output[0] for position in loop.surroundings.sinks] == ["layer/i2h_w_grad"]


@pytest.mark.parametrize(
    "as_it_is, faster",
    [({PRODUCT: 1.2, GRADIENT: 1.2}, [True, True]), ({PRODUCT: 1.05, GRADIENT: 1.2}, [False, True])],
    ids=["faster", "within the error of a trial"],
)
def test_a_loss_where_a_trial_finds_one(as_it_is, faster, monkeypatch):
    monkeypatch.setattr(products_over_steps, "keeps_plans", lambda loop: True)
    seen = []

    def seconds(size, layout):
        seen.append(size)
        return as_it_is[size.kind] if layout is None else 1.0

    monkeypatch.setattr(products_over_steps, "seconds", seconds)
    slower = "for [27, 2] x [2, 16] oneDNN is not faster"
    assert said(RULE, loss=True) == [None if gain else slower for gain in faster]
    assert set(seen) == {Size(PRODUCT, 27, 2, 16, 1, keeps_plans=True), Size(GRADIENT, 27, 2, 16, 3, keeps_plans=True)}


@pytest.mark.parametrize("rows, tried", [(64000, 6675), (700, 700), (6675, 6675)])
def test_a_trial_of_many_rows_is_made_with_fewer(rows, tried, monkeypatch):
    monkeypatch.setattr(products_over_steps, "_tried", lambda size, _: {None: Seconds(0.0, float(size.rows))})
    assert products_over_steps.seconds(Size(PRODUCT, rows, 512, 2048, 1), None) == tried


SIZES = [
    Size(PRODUCT, 6, 5, 7, 1),
    Size(PRODUCT, 6, 5, 7, 1, keeps_plans=True),
    Size(GRADIENT, 6, 5, 7, 2),
    Size(GRADIENT, 6, 5, 7, 3),
    Size(GRADIENT, 6, 5, 7, 3, keeps_plans=True),
    Size(GRADIENT, 6, 256, 64, 2),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_tried(size):
    """Each of them runs by itself, in all layouts; nobody knows how long that takes."""
    ways = layouts(size.kind, size.inner, size.outer, size.keeps_plans)
    found = {layout: products_over_steps.seconds(size, layout) for layout in [None, *ways]}
    assert min(found.values()) > 0
    del found[None]
    assert found[fastest_found(size)] == min(found.values())


# Layouts of gradients.


def test_layouts(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: (onednn.INNER_PRODUCT,))
    assert layouts(PRODUCT, 40, 100) == [Layout(40, 100)]
    assert layouts(GRADIENT, 40, 3200) == [Layout(40, 3200), Layout(48, 3200)]
    assert layouts(GRADIENT, 256, 400) == [Layout(256, 400), Layout(256, 448), Layout(256, 448, 2)]
    assert layouts(GRADIENT, 800, 3200) == [Layout(800, 3200, parts) for parts in (1, 2, 4)]
    assert layouts(GRADIENT, 5, 7) == [Layout(5, 7), Layout(16, 64)]


def test_layouts_without_aten(monkeypatch):
    """Nothing else puts zeros behind columns."""
    monkeypatch.setattr(onednn, "ways", lambda: (onednn.INNER_PRODUCT,))
    monkeypatch.setattr(onednn_over_steps, "aten_is_missing", lambda: True)
    assert layouts(GRADIENT, 300, 100) == [Layout(300, 100), Layout(300, 100, 2)]
    assert layouts(GRADIENT, 5, 7) == [Layout(5, 7)]


def test_layouts_as_convolutions(monkeypatch):
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    assert layouts(PRODUCT, 40, 100) == [Layout(40, 100, convolved=way) for way in (None, IN_BLOCKS, IN_ROWS)]
    ways = (None, IN_BLOCKS, TRANSPOSED, ROWS_TRANSPOSED)
    assert layouts(GRADIENT, 16, 64) == [Layout(16, 64, convolved=way) for way in ways]
    assert layouts(GRADIENT, 16, 64, False) == [Layout(16, 64), Layout(16, 64, convolved=IN_BLOCKS)]
    assert not any(layout.convolved for layout in layouts(GRADIENT, 16, 1))


@every_pair
@pytest.mark.parametrize("outer", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("inner", [1, 2, 17])
@pytest.mark.parametrize("rows", [1, 2, 17, 33])
def test_every_layout_gives_what_numpy_does(rows, inner, outer):
    """By itself, with few rows and columns too: an image of one channel is in two orders at once."""
    random = np.random.RandomState(0)
    x, w, dy, b = (random.randn(*shape) for shape in ((rows, inner), (outer, inner), (rows, outer), (outer,)))
    expected = {"y": x @ w.T + b, "dw": dy.T @ x, "db": dy.sum(axis=0), "dx": dy @ w}
    values = {name: value.astype(np.float32) for name, value in {"x": x, "w": w, "dy": dy, "b": b}.items()}
    plain = Layout(inner, outer)
    for kind, third, outputs in ((PRODUCT, "b", ["y"]), (GRADIENT, "dy", ["dw", "db", "dx"])):
        operator = caffe2_pb2.OperatorDef(type=kind, input=["x", "w", third], output=outputs)
        for layout in layouts(kind, inner, outer):
            loop = trial.lone_loop([*values, *outputs])
            made = onednn_over_steps.in_a_net(loop, operator, plain, layout, rows)
            for blob in outputs:
                found = result(made, values, blob)
                np.testing.assert_allclose(found, expected[blob], rtol=1e-4, atol=1e-4, err_msg=str((layout, blob)))


@pytest.mark.parametrize(
    "layout, widths",
    [
        (Layout(40, 64), [40]),
        (Layout(800, 64, 2), [400, 400]),
        (Layout(800, 64, 4), [192, 208, 192, 208]),
        (Layout(300, 64, 2), [144, 156]),
    ],
    ids=str,
)
def test_parts_are_whole_blocks(layout, widths):
    assert layout.widths == widths and sum(widths) == layout.inner


def laid_out(monkeypatch, beside, below, parts):
    """Have gradients with so many columns and rows of zeros, in parts of one column and the rest.

    In no parts, have them convolved, and products too; with less than none gradients are transposed, and products in
    rows.
    """
    monkeypatch.setattr(Layout, "widths", property(lambda self: [1] * (self.parts - 1) + [self.inner - self.parts + 1]))

    def fastest(size):
        plain = Layout(size.inner, size.outer)
        if parts <= 0:
            ways = (IN_BLOCKS, IN_ROWS, IN_ROWS) if size.kind == PRODUCT else (IN_BLOCKS, TRANSPOSED, ROWS_TRANSPOSED)
            return plain._replace(convolved=ways[-parts])
        return plain if size.kind == PRODUCT else Layout(size.inner + beside, size.outer + below, parts)

    monkeypatch.setattr(products_over_steps, "fastest", fastest)
    monkeypatch.setattr(products_over_steps, "seconds", in_any_layout)


def in_any_layout(size, layout):
    """The seconds of a product, if all of oneDNN's are faster."""
    return 2.0 if layout is None else 1.0


LAYOUTS = [(0, 0, 2), (3, 0, 1), (0, 5, 1), (3, 5, 1), (3, 5, 3), (3, 0, 2), (0, 5, 2)]
# Older Caffe2s cannot.
CONVOLVES = onednn.CONVOLUTION in onednn.ways()
LAYOUTS += [(0, 0, 0), (0, 0, -1), (0, 0, -2)] if CONVOLVES else []
EVERY_LAYOUT = pytest.mark.parametrize("beside, below, parts", LAYOUTS)


@EVERY_LAYOUT
@pytest.mark.parametrize("shape", [(T, N, 4), (T, N, 2, 2), (T, N, 17)], ids=str)
def test_gradients_in_each_layout(shape, beside, below, parts, monkeypatch):
    laid_out(monkeypatch, beside, below, parts)
    assert_kept(gone=[PRODUCT] + [GRADIENT] * parts if parts > 0 else [], shape=shape)


@EVERY_LAYOUT
def test_gradients_of_an_lstm_in_each_layout(beside, below, parts, monkeypatch):
    """Two gradients, one of two outputs, share what they are copied to."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    laid_out(monkeypatch, beside, below, parts)
    model, blobs = support.lstm()
    rewrite = support.Optimised(["parameter_gradients", RULE])
    rewrite(model)
    assert [operator.type for operator in in_ifs(model.net)].count(GRADIENT) == 2 * max(parts, 0)
    support.assert_same(support.run(model, blobs), expected)


@EVERY_LAYOUT
def test_other_sizes_in_each_layout(beside, below, parts, monkeypatch):
    expected = support.runs_of_other_sizes(lambda model: None)
    laid_out(monkeypatch, beside, below, parts)
    found = support.runs_of_other_sizes(support.Optimised(["parameter_gradients", RULE]))
    support.assert_same(found, expected)


# What is large or little stays in oneDNN's memory.


def results_stay(monkeypatch, stay):
    """Have all results of products stay, or none."""
    for name, bytes_ in (("LITTLE", 0), ("LARGE", 1 if stay else 2**30)):
        monkeypatch.setattr(onednn_over_steps, name, bytes_)


def stays(net):
    """The results of products that are not freed."""
    inside = in_ifs(net)
    freed = {blob for operator in inside if operator.type == "Free" for blob in operator.input}
    return {blob for operator in inside for blob in operator.output if "_results" in blob} - freed


BYTES = 9 * 3 * 16 * 4


@pytest.mark.parametrize(
    "little, large, kept",
    [(0, BYTES, 1), (0, BYTES + 1, 0), (BYTES - 1, BYTES + 1, 0), (BYTES, BYTES + 1, 1)],
    ids=["large", "not large", "not little", "little"],
)
def test_large_and_little_results_stay(little, large, kept, monkeypatch):
    """All products of the loop have one blob for them, but for the copy of a gradient that two of them share."""
    monkeypatch.setattr(onednn_over_steps, "LITTLE", little)
    monkeypatch.setattr(onednn_over_steps, "LARGE", large)
    laid_out(monkeypatch, 0, 0, 1)
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    rewrite = support.Optimised(["parameter_gradients", RULE])
    rewrite(model)
    assert rewrite.report.counts[RULE] == 3 and len(stays(model.net)) == 2 * kept
    support.assert_same(support.run(model, blobs), expected)


@EVERY_LAYOUT
def test_other_sizes_where_results_stay(beside, below, parts, monkeypatch):
    expected = support.runs_of_other_sizes(lambda model: None)
    results_stay(monkeypatch, True)
    laid_out(monkeypatch, beside, below, parts)
    found = support.runs_of_other_sizes(support.Optimised(["parameter_gradients", RULE]))
    support.assert_same(found, expected)


# Two gradients share the copy of what both continue from.

GRADIENTS = ["parameter_gradients", RULE]


@pytest.fixture
def faster(monkeypatch):
    monkeypatch.setattr(products_over_steps, "seconds", in_any_layout)


def copies(net):
    """What Ifs copy of a sequence's gradient; the blobs that one leaves for another."""
    ifs = [operator for operator in net.Proto().op if operator.type == "If"]
    aliased = [op.input[0] for op in in_ifs(net) if op.type == "Alias" and op.input[0].endswith("i2h_grad")]
    left = {blob for operator in ifs for blob in operator.output}
    return aliased, [blob for operator in ifs for blob in operator.input if blob in left and "result" in blob]


def shared_copies(change=lambda net: None):
    """What is shared in an LSTM after `change`, which gives what it was without the rule."""
    model, blobs = support.lstm()
    change(model.net)
    expected = support.run(model, blobs)
    rewrite = support.Optimised(GRADIENTS, even_if_slower=False)
    rewrite(model)
    assert rewrite.report.counts[RULE] >= 2
    support.assert_same(support.run(model, blobs), expected)
    return copies(model.net)


@EVERY_LAYOUT
@pytest.mark.parametrize("stay", [True, False], ids=["stays", "freed"])
def test_gradients_share_a_copy(beside, below, parts, stay, monkeypatch):
    results_stay(monkeypatch, stay)
    laid_out(monkeypatch, beside, below, parts)
    copied, shared = shared_copies()
    assert len(copied) == 1
    # The second is to wait for the first, in nets of type dag too.
    assert len(shared) == 1


@pytest.mark.parametrize("stay", [True, False], ids=["stays", "freed"])
def test_other_sizes_share_a_copy(stay, faster, monkeypatch):
    expected = support.runs_of_other_sizes(lambda model: None)
    results_stay(monkeypatch, stay)
    found = support.runs_of_other_sizes(support.Optimised(GRADIENTS, even_if_slower=False))
    support.assert_same(found, expected)


@pytest.mark.parametrize("way", [IN_BLOCKS, TRANSPOSED, ROWS_TRANSPOSED])
@pytest.mark.parametrize("convolved", [2, 3])
@pytest.mark.parametrize("stay", [True, False], ids=["stays", "freed"])
def test_a_convolved_gradient_and_another_share_a_copy(convolved, way, stay, faster, monkeypatch):
    """The first or the second, by its number of results; it leaves the copy in the shape in which it has found it."""
    if not CONVOLVES:
        return

    def fastest(size):
        return Layout(size.inner, size.outer, convolved=way if size.results == convolved else None)

    monkeypatch.setattr(products_over_steps, "fastest", fastest)
    results_stay(monkeypatch, stay)
    copied, shared = shared_copies()
    assert len(copied) == 1 and len(shared) == 1


def test_a_shared_copy_is_freed(faster, monkeypatch):
    """By the gradient that needs it last."""
    results_stay(monkeypatch, False)
    model, _ = support.lstm()
    optimize(model, GRADIENTS)
    _, (blob,) = copies(model.net)
    first, second = [
        inner
        for _, inner in inner_nets(model.net)
        if any(blob in (*operator.input, *operator.output) for operator in inner.op)
    ]
    assert blob not in first.op[-1].input
    assert second.op[-1].type == "Free" and blob in second.op[-1].input


def test_a_gradient_that_is_changed_is_copied_anew(faster):
    """Both names are one tensor: what was in it when the loop ended is gone."""
    copied, shared = shared_copies(changed_between)
    assert len(copied) == 2 and shared == []


def test_gradients_in_other_layouts_share_nothing(faster, monkeypatch):
    plain = products_over_steps.fastest

    def fastest(size):
        return plain(size)._replace(outer=size.outer + (size.results == 3))

    monkeypatch.setattr(products_over_steps, "fastest", fastest)
    copied, shared = shared_copies()
    assert len(copied) == 2 and shared == []


def test_nothing_is_left_for_a_gradient_that_stays(monkeypatch):
    """Where the second product is not faster."""

    def seconds(size, layout):
        return 2.0 if layout is None and size.results != 3 else 1.0

    monkeypatch.setattr(products_over_steps, "seconds", seconds)
    copied, shared = shared_copies()
    assert len(copied) == 1 and shared == []


def test_which_products_continue_from_the_gradient_of_the_sequence():
    model, _ = support.lstm()
    (loop,) = read_loops(model.net.Proto()).values()
    (sink,) = loop.surroundings.sinks
    assert loop.surroundings.products[sink][0].output[0] == "layer/i2h_w_grad"
    changed_between(model.net)
    (loop,) = read_loops(model.net.Proto()).values()
    assert loop.surroundings.sinks == set()
    model, _ = support.lstm(gradients=False, name="forward")
    (loop,) = read_loops(model.net.Proto()).values()
    assert loop.surroundings.sinks == set()


@pytest.mark.parametrize("wrong", [(0, -1), (1, -2)], ids=["parts in the wrong order", "one part twice"])
def test_a_wrong_layout_is_seen(wrong, monkeypatch):
    """Parts that are put together in another way are not passed over."""
    first, last = wrong
    laid_out(monkeypatch, 0, 0, 3)
    bring_back = onednn_over_steps._bring_back

    def bring_back_wrongly(emitter, parts, *others):
        parts = list(parts)
        if len(parts) > 1:
            parts[first], parts[last] = parts[last], parts[first]
            if first:
                parts[1] = parts[0]
        return bring_back(emitter, parts, *others)

    monkeypatch.setattr(onednn_over_steps, "_bring_back", bring_back_wrongly)
    with pytest.raises(AssertionError, match="gradient of [wx]|broadcast|shape"):
        assert_kept(gone=[PRODUCT] + [GRADIENT] * 3)


def test_a_layout_that_spreads_what_is_no_number_is_not_taken(monkeypatch):
    """But for gradients, which are 0 there."""
    monkeypatch.setattr(onednn, "ways", lambda: onednn.WAYS)
    monkeypatch.setattr(separate_rows, "over_steps", lambda layout: layout.convolved)
    monkeypatch.setattr(products_over_steps, "seconds", lambda size, layout: 2.0 if layout.convolved else 1.0)
    size = Size(PRODUCT, 6, 5, 7, 1)
    assert fastest_found(size).convolved
    assert not fastest_found(size._replace(kind=GRADIENT)).convolved


@pytest.mark.parametrize("kind", [PRODUCT, GRADIENT])
def test_a_wrong_convolution_is_seen(kind, monkeypatch):
    """One with the ones in front of the rows."""
    if not CONVOLVES:
        return
    laid_out(monkeypatch, 0, 0, 0)

    def with_ones_in_front(emitter, beside):
        ((blob, width),) = beside
        rows = onednn_convolutions.as_rows(emitter, blob, width)
        both = [emitter.column_of_ones(rows, 1), rows]
        return emitter.concat(both if emitter.beside.type == kind else both[::-1], "with_ones", 1)

    monkeypatch.setattr(onednn_convolutions, "_with_ones", with_ones_in_front)
    with pytest.raises(AssertionError, match="output 0" if kind == PRODUCT else "gradient of [wb]"):
        assert_kept()


def test_a_wrong_image_of_rows_is_seen(monkeypatch):
    """One of rows in another order."""
    if not CONVOLVES:
        return
    laid_out(monkeypatch, 0, 0, -1)
    image_of_rows = onednn_convolutions._image_of_rows

    def the_other_way_round(emitter, rows, width):
        turned = emitter.aten("flip", [rows], "turned", dims=[0])
        return image_of_rows(emitter, turned, width)

    monkeypatch.setattr(onednn_convolutions, "_image_of_rows", the_other_way_round)
    with pytest.raises(AssertionError, match="output 0"):
        assert_kept()


@pytest.mark.parametrize("index", [0, -1], ids=["plain", "last layout"])
@pytest.mark.parametrize("rules", [MOVED, ALL_OTHERS], ids=["moved", "all rules"])
def test_no_steps(rules, index, monkeypatch):
    """Without rows MKL has the product: oneDNN convolves nothing."""
    promise_constant_threads(monkeypatch)
    monkeypatch.setattr(products_over_steps, "fastest", lambda size: layouts(size.kind, size.inner, size.outer)[index])
    expected = support.run_without_steps(lambda model: None)
    rewrite = support.Optimised(rules)
    support.assert_same(support.run_without_steps(rewrite), expected)
    assert rewrite.report.counts[RULE] >= 2, str(rewrite.report)


def test_sizes_of_what_has_been_rewritten():
    """A second call knows as much as the first, also of what a product by oneDNN makes, with a bias that ATen makes."""
    model, _ = support.lstm()
    report = optimize(model, ["scaled_weights", "lstm_unit", "sequence_bias", RULE], even_if_slower=True)
    assert report.counts["sequence_bias"] and report.counts[RULE]
    found = loop_of(model.net)
    sizes = find_sizes(model.net.Proto(), None, {})
    assert found.inputs[0] == "layer/i2h_with_bias"
    assert sizes.shape(found.inputs[0]) == (support.T, support.N, 4 * support.D)
    assert any(operator.type == "If" for operator in model.net.Proto().op)
