"""`joined_sequence`: the product that makes the loop's sequence, in the product of the step."""

import functools

import numpy as np
import pytest
from caffe2.python import core, rnn_cell, workspace

import rewriting_support as support
import test_rewriting_sequence_bias as biases
from caffe2_recurrent import LSTM, check_gradients, optimize, prediction_net
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.operators import as_bytes
from caffe2_recurrent.rewriting.products import sigmoids
from caffe2_recurrent.rewriting.products.step_products import COLUMNS, MULTIPLICATION, ROWS
from caffe2_recurrent.rewriting.rules import joined_sequence, products_over_steps
from caffe2_recurrent.rewriting.rules.joined_sequence import Size
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject, result
from caffe2_recurrent.wiring import Link
from every_pair import every_pair
from made_up_clock import make_up_clock
from onednn_support import EVERY_CELL, assert_cell, leaving_no_trace, make_up, make_up_gain
from step_nets import D, N, T
from test_rewriting_onednn import trained, with_other_weights
from test_rewriting_rules import EXECUTOR, loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import EVERY_FORM, SEQUENCE, Net, name_before, plain, writer

RULE = "joined_sequence"
DIM_IN = 4
FORMS = {form: [*rules, RULE] for form, rules in biases.FORMS.items()}
PLAIN, SCALED = FORMS["plain"], FORMS["scaled"]
WITH_ALL = pytest.mark.parametrize("rules", [PLAIN, SCALED, None], ids=["plain", "scaled", "all rules"])
ALONE_AND_ALL = pytest.mark.parametrize("rules", [PLAIN, None], ids=["alone", "all rules"])
LAYOUTS = pytest.mark.parametrize("rules", [PLAIN, FORMS["transposed"], None], ids=["rows", "columns", "all rules"])
# Where the sum takes the place of the product, with what else it adds.
PLACES = {step: [] for step in biases.STEPS if step not in (biases.name_in_between, biases.read_in_between)}
PLACES.update({biases.more_addends: ["h_prev", "v"], name_before: ["v"]})


def assert_fired(report):
    assert report.counts[RULE] == 1 and reasons_in(report, RULE) == [], str(report)


def assert_gone(net, sequence=SEQUENCE):
    """No operator names the sequence, the FC is gone, and the loop runs over what it was made of."""
    operators = list(net.Proto().op)
    names = set().union(*map(biases.mentioned, operators))
    assert names.isdisjoint([sequence, sequence + "_with_bias"])
    assert "FC" not in [operator.type for operator in operators]
    (x,) = names & {"layer/x_and_ended"} or names & {"layer/x_inside"} or {"x"}
    assert support.operator(net).input[0] == x


def assert_joined(net, sequence=SEQUENCE):
    """The step has one product, of three things joined with three others."""
    assert_gone(net, sequence)
    (product,) = biases.products(net)
    assert (product.type, len(product.input)) == (MULTIPLICATION, 2)
    (rows,) = [operator for operator in support.step(net).op if product.input[0] in operator.output]
    _, slice_, ones = rows.input
    loop, weights = support.operator(net), writer(net, product.input[1])
    links = zip(*(support.argument(loop, "link_" + end).strings for end in ("internal", "external")))
    assert (slice_.encode(), loop.input[0].encode()) in links and ones in loop.input
    in_rows = sum(given.i for given in product.arg if given.name == "trans_b")
    if weights.type == "Transpose":
        # What has been transposed for the product is joined before that.
        assert not in_rows
        in_rows, weights = 1, writer(net, *weights.input)
    assert rows.type == weights.type == "Concat" and len(weights.input) == 3
    assert (support.argument(rows, "axis").i, support.argument(weights, "axis").i) == (2, in_rows)
    return product


def assert_blobs(net):
    """Those that are there after a run: `[1, N, 1]` of ones, and bools of the shape of the gradient."""
    loop = support.operator(net)
    (ones,) = [blob for blob in loop.input if blob.endswith("/ones")]
    steps, batch, _ = workspace.FetchBlob("x").shape
    np.testing.assert_array_equal(workspace.FetchBlob(ones), np.ones((1, batch, 1), np.float32))
    for gradient in net.Proto().op:
        if gradient.type == support.GRADIENT:
            name = gradient.input[len(support.argument(gradient, "outputs_with_grads").ints)]
            like = workspace.FetchBlob(name)
            assert name.endswith("/like_sequence") and like.dtype == bool and like.shape[:2] == (steps, batch)
            assert like.shape == workspace.FetchBlob(gradient.output[0]).shape


def assert_kept(rules=PLAIN, executor=True, **options):
    """A net optimised twice gives what it gave; the net."""
    expected = Net(**options).values(executor)
    net = Net(**options)
    rewrite = support.Optimised(rules)
    rewrite(net.net)
    assert_fired(rewrite.report)
    support.assert_same(net.values(executor), expected)
    assert_blobs(net.net)
    return net


# It fires, and what it leaves.


@pytest.mark.parametrize("step", PLACES, ids=lambda step: step.__name__)
@EXECUTOR
@pytest.mark.parametrize("options", [{}, {"outputs_with_grads": "auto"}, {"forward_only": True}], ids=str)
def test_steps(step, executor, options):
    net = assert_kept(step=step, executor=executor, **options).net
    assert list(assert_joined(net).output) == [biases.STEPS[step]]
    sums = [list(operator.input) for operator in support.step(net).op if operator.type == "Sum"]
    assert sums == ([[biases.STEPS[step], *PLACES[step]]] if PLACES[step] else [])


@LAYOUTS
@EXECUTOR
def test_a_scale(rules, executor):
    assert_gone(assert_kept(rules, executor, step=biases.scaled, forward_only=True).net)


@LAYOUTS
@pytest.mark.parametrize("columns", [1, 17])
def test_sizes_of_what_the_sequence_is_made_of(columns, rules):
    assert_gone(assert_kept(rules, shape=(T, N, columns)).net)


@LAYOUTS
def test_weights_that_are_those_of_the_step(rules):
    """One blob is W and V."""
    change = biases.read(1, "u_w", SEQUENCE)
    assert_gone(assert_kept(rules, shape=(T, N, D), change=lambda net: change(net.net), forward_only=True).net)


def test_the_gradient_of_the_sequence_keeps_its_name():
    before, after = Net(), assert_kept()
    assert after.gradients == before.gradients
    gradients = [support.operator(net.net, support.GRADIENT) for net in (before, after)]
    assert gradients[0].output == gradients[1].output
    renamed = [given.name for given in gradients[1].arg if given.name.endswith(".rename")]
    assert renamed == ["loop/like_sequence_grad.rename"]


@ALONE_AND_ALL
def test_a_dry_run_leaves_the_net(rules):
    net = Net().net
    before = net.Proto().SerializeToString()
    assert_fired(optimize(net, rules, dry_run=True, even_if_slower=True))
    assert net.Proto().SerializeToString() == before


@every_pair
@pytest.mark.parametrize("form", [*FORMS, "all rules"])
@EXECUTOR
@pytest.mark.parametrize("options", biases.OPTIONS, ids=str)
def test_an_lstm(form, executor, options):
    """Masks are made of the sequence's shape, of which x has as much as they need."""
    net = biases.assert_lstm_kept(FORMS.get(form), executor, **options).net
    (assert_joined if form in FORMS else assert_gone)(net, "layer/i2h")
    assert_blobs(net)


def test_what_is_joined_has_rows():
    """So that oneDNN may multiply it, if it can."""
    report = optimize(support.lstm()[0], None, even_if_slower=True)
    assert_fired(report)
    assert not any("one row for each sequence" in reason for reason in reasons_in(report, "packed_products"))


@WITH_ALL
def test_an_lstm_that_caffe2_has_built(rules):
    assert_gone(biases.assert_lstm_kept(rules, builder=rnn_cell.LSTM, lengths=True).net, "layer/i2h")


@WITH_ALL
@EVERY_CELL
def test_cells(name, variant, rules):
    rewrite = support.Optimised(rules)
    assert_cell(name, variant, rewrite)
    fires = (variant == "kept" or rules is None) and name.startswith(("lstm", "attention"))
    assert rewrite.report.counts[RULE] == rewrite.report.counts["sequence_bias"] == fires


# Each with its numbers of steps and sequences, in a net that is created once; of two layers the second has for its x
# what the loop of the first gives.
RUNS = {
    "other sizes": support.runs_of_other_sizes,
    "other sizes, with lengths": functools.partial(support.runs_of_other_sizes, lengths=True),
    "no steps": support.run_without_steps,
    "other weights": with_other_weights,
    "layers": lambda change: biases.layers("simple", change),
    "layers, dag": lambda change: biases.layers("dag", change),
    "trained": functools.partial(trained, kind="simple"),
    "trained, dag": functools.partial(trained, kind="dag"),
    "trained, async": functools.partial(trained, kind="async_scheduling"),
}


@WITH_ALL
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_runs(run, rules):
    expected = run(lambda model: None)
    rewrite = support.Optimised(rules)
    support.assert_same(run(rewrite), expected)
    first, *others = [operator for operator in rewrite.net.Proto().op if operator.type == support.LOOP]
    assert rewrite.report.counts[RULE] == 1 + len(others)
    if first.input[0] != "x":
        made = "/x_and_ended" if rewrite.report.counts.get("ended_sequences") else "/x_inside"
        assert all(loop.input[0].endswith(made) for loop in (first, *others))
    else:
        assert all(second.input[0] in first.output for second in others)
    if not others:
        assert_blobs(rewrite.net)


@WITH_ALL
@pytest.mark.parametrize("cut_first", [True, False])
def test_what_predicts(rules, cut_first):
    """The part of the net that does, cut out before it is rewritten or after."""
    model, blobs = support.lstm()
    expected = support.run(model, blobs)[0][:4]
    if not cut_first:
        optimize(model, rules, even_if_slower=True)
    net, _ = prediction_net(model, ["x", "h0", "c0"], blobs[:4])
    if cut_first:
        optimize(net, rules, even_if_slower=True)
    assert_gone(net, "layer/i2h")
    workspace.RunNetOnce(net)
    support.assert_same(support.values(blobs[:4]), (expected, {}))


@ALONE_AND_ALL
@EXECUTOR
@pytest.mark.parametrize("blob, value", [("x", np.nan), ("x", np.inf), ("h_initial", np.nan), ("h_initial", -np.inf)])
def test_rows_that_are_no_numbers(blob, value, executor, rules):
    """They stay in their sequence, as they did; the other one has the values that it had."""

    def values(rewrite):
        net = Net()
        rewrite(net.net)
        planted = workspace.FetchBlob(blob)
        planted[..., 1, 2] = value
        workspace.FeedBlob(blob, planted)
        return net.values(executor)

    found = values(support.Optimised(rules))
    support.assert_same(found, values(lambda net: None))
    assert np.isfinite(found[0][0][:, 0]).all() and np.isfinite(found[1]["x"][:, 0]).all()


# An x that something else reads too.


def second_sequence(make, x, h):
    (y,) = make.cell.AddScopedExternalInputs("y_t")
    make.inputs.append((y, "x"))
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x, make.fc(y, "v", DIM_IN)], "total"), "h_t")


def initial_state(make, x, h):
    """Which is of a sequence of one step."""
    (g,) = make.cell.AddScopedExternalInputs("g_prev")
    make.initial.append((g, "x"))
    make.link(g, make.cell.Tanh(make.cell.Mul([g, h], "gh"), "g_t"))
    return make.cell.Tanh(make.cell.Sum([make.fc(g, "u"), x], "total"), "h_t")


def parameter(make, x, h):
    """A reference with a gradient."""
    make.cell.AddExternalInputs("x")
    make.cell.Mul([h, make.cell.SumElements("x", "of_x")], "v", broadcast=1)
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x, "v"], "total"), "h_t")


TWICE = {
    "second sequence": (second_sequence, (T, N, DIM_IN)),
    "initial state": (initial_state, (1, N, D)),
    "parameter": (parameter, (T, N, DIM_IN)),
    "parameter as wide as X": (parameter, (T, N, D)),
}


@every_pair
@pytest.mark.parametrize("step, shape", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("rules", [["sequence_operators", *PLAIN], None], ids=["alone", "all rules"])
@pytest.mark.parametrize("options", [{}, {"outputs_with_grads": "auto"}, {"forward_only": True}], ids=str)
def test_an_x_that_the_loop_has_for_something_else_too(step, shape, rules, options):
    assert biases.assert_right(step, rules, shape=shape, **options).counts[RULE] == 1


@ALONE_AND_ALL
def test_two_loops_over_one_x(rules):
    def second(make, x, h):
        return make.cell.Tanh(make.cell.Sum([make.fc(h, "v"), x], "total_2"), "h_2")

    def change(net):
        net.net.FC(["x", "w_2", "b_2"], "second/X", axis=2)
        net.shapes.update({"w_2": (D, DIM_IN), "b_2": (D,)})
        net.outputs += net.add_loop(second, "second/X", "second", forward_only=True)[:1]

    assert biases.assert_right(plain, rules, change=change).counts[RULE] == 2


@pytest.mark.parametrize(
    ["name", "rule", "reason"],
    [
        ("h_prev", RULE, "'h_prev' is what a blob of the step is called too"),
        ("v", "all", "its steps write to 'v', which is a blob outside of them too"),
    ],
    ids=["linked", "written"],
)
def test_an_x_whose_name_the_step_has_for_itself(name, rule, reason):
    """Caffe2's builder allows it, and forward alone it does no harm to an FC that runs before the loop."""

    def change(net):
        writer(net.net, SEQUENCE).input[0] = name
        net.net.AddExternalInput(name)
        net.shapes[name] = net.shapes.pop("x")

    options = {"step": name_before, "shape": (T, N, D), "change": change, "forward_only": True}
    expected = Net(**options).values(executor=False)
    net = Net(**options)
    rewrite = support.Optimised(PLAIN)
    rewrite(net.net)
    assert reasons_in(rewrite.report, rule) == [reason]
    support.assert_same(net.values(executor=False), expected)


# Nets that are optimised again, or looked at.


def assert_kept_again(first, second, counts, **options):
    """An LSTM optimised with rules, written to bytes, read back, and optimised with others."""
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(**options)
    found = [optimize(model, first, even_if_slower=True).counts.get(RULE, 0)]
    rewrite = support.Optimised(second)
    rewrite(core.Net(support.as_read_from_a_file(model.net)))
    assert [*found, rewrite.report.counts.get(RULE, 0)] == counts
    workspace.RunNetOnce(rewrite.net)
    support.assert_same(support.values(blobs), expected)


@EVERY_FORM
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "no lengths"])
def test_a_net_that_is_optimised_again(form, lengths):
    assert_kept_again(FORMS[form], None, [1, 0], lengths=lengths)


@EVERY_FORM
def test_a_sequence_that_an_earlier_call_has_made(form):
    """Which FC has made it, and that nobody wants to see it, is not known any more."""
    assert_kept_again(biases.FORMS[form], None, [0, 0], lengths=True)


@pytest.mark.parametrize("second", [["gradient_buffer"], None], ids=["gradient_buffer", "all rules"])
def test_a_gradient_that_holds_what_a_step_keeps_later(second, monkeypatch):
    """It is as wide as X, whatever x is. The engine reallocates slices that are not a fourth as wide as they seem."""
    monkeypatch.setattr(support, "DIM_IN", 4 * 4 * support.D)
    assert_kept_again(PLAIN, second, [1, 0])


@WITH_ALL
def test_a_gradient_that_is_not_lost(rules):
    model, _ = support.lstm()
    check_gradients(model.net, {})
    assert_fired(optimize(model, rules, even_if_slower=True))
    check_gradients(model.net, {})


@EVERY_FORM
def test_sizes_of_what_stands_behind_the_loop(form):
    """Caffe2 infers them through what the rule puts in front of it."""
    model, blobs = support.lstm()
    assert_fired(optimize(model, FORMS[form], even_if_slower=True))
    LSTM(model, model.net.Tanh(blobs[0], "y"), None, None, support.D, support.D, "two")
    assert find_sizes(model.net.Proto(), None, {}).shape("y") == (support.T, support.N, support.D)


# A planted error is seen.


def others_first(operator):
    operator.input[:2] = operator.input[1::-1]


def another_sequence(net):
    support.operator(net).input[0] = "seed"
    linked = support.argument(support.operator(net), "link_external").strings
    linked[list(linked).index(b"x")] = b"seed"


WRONG = {
    "weights in another order": lambda net: others_first(writer(net, "loop/u_w_joined")),
    "rows in another order": lambda net: others_first(support.step(net).op[0]),
    "twos": lambda net: set_argument(writer(net, "loop/ones"), value=2.0),
    "another bias": biases.read(0, "b", "loop/b_with_bias_column"),
    "other weights": biases.read(1, "u_w", "loop/u_w_joined"),
    "another sequence": another_sequence,
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_product_is_seen(change):
    expected = Net(shape=(T, N, D)).values()
    net = Net(shape=(T, N, D))
    assert_fired(optimize(net.net, PLAIN, even_if_slower=True))
    change(net.net)
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(net.values(), expected)


@pytest.mark.parametrize("shape", [(T, N, DIM_IN), (T + 1, N, D)], ids=["as x", "another step"])
def test_a_gradient_of_another_shape_is_seen(shape):
    """Or the gradient of the FC does not take it."""
    expected = Net().values()
    net = Net()
    assert_fired(optimize(net.net, PLAIN, even_if_slower=True))
    workspace.FeedBlob("shape", np.array(shape, np.int64))
    net.net.AddExternalInput("shape")
    writer(net.net, "loop/like_sequence").input[0] = "shape"
    with pytest.raises((AssertionError, RuntimeError), match="gradient of|FCGradient"):
        support.assert_same(net.values(executor=False), expected)


# Refusals.

SHAPES = {"x": (T, N, DIM_IN), "u_w": (D, D), "w": (D, DIM_IN), "loop/b_with_bias": (D,), biases.NEW: (T, N, D)}
NOT_IN_PLACE = "the sum does not take the place of a product with weights that are the same in all steps"
NO_ROWS = "'{}' is not known to have one row for each sequence"
CALLED_SO = "'x' is what a blob of the step is called too"
UNKNOWN = "the size of '{}' is not known; give shapes"


def biased_loop(step=plain, **options):
    """The loop of a net that is ready for the rule: a product, and the sum behind it."""
    loop = loop_of(Net(step, **options).net)
    biases.rewrite(loop)
    return loop


def turned(loop):
    loop.operators[0].input[0] = "turned"
    loop.operators.append(made("Transpose", ["h_t"], ["turned"]))


def by_onednn(loop):
    loop.operators[0].device_option.CopyFrom(core.DeviceOption(core.caffe2_pb2.IDEEP))


REFUSALS = {
    "another place": (lambda loop: loop.operators[1].output.__setitem__(0, "z"), NOT_IN_PLACE),
    "read in between": (lambda loop: loop.operators.insert(1, made("Tanh", ["total"], ["again"])), NOT_IN_PLACE),
    "changed in between": (lambda loop: loop.operators.insert(1, made("Tanh", ["total"], ["total"])), NOT_IN_PLACE),
    "no product": (lambda loop: loop.operators.pop(0), NOT_IN_PLACE),
    "another product": (lambda loop: setattr(loop.operators[0], "type", "FC"), NOT_IN_PLACE),
    "weights of the step": (lambda loop: loop.operators.append(made("Copy", ["w"], ["u_w"])), NOT_IN_PLACE),
    "oneDNN": (by_onednn, NOT_IN_PLACE),
    "a name of the step": (lambda loop: loop.operators.append(made("Copy", ["h_t"], ["x"])), CALLED_SO),
    "a name of a slice": (lambda loop: loop.links.append(Link("x", "others", 0)), CALLED_SO),
    "no rows": (turned, NO_ROWS.format("turned")),
    "rows turned round": (lambda loop: set_argument(loop.operators[0], trans_a=1), NO_ROWS.format("h_prev")),
    "no broadcast": (lambda loop: set_argument(loop.operators[0], broadcast=0), NO_ROWS.format("h_prev")),
}


@pytest.mark.parametrize("plant, expected", REFUSALS.values(), ids=REFUSALS)
def test_refusals(plant, expected):
    loop = biased_loop()
    assert why(RULE, loop, SHAPES) == [None]
    plant(loop)
    assert why(RULE, loop, SHAPES) == [expected]


@pytest.mark.parametrize("missing", [["x"], ["u_w"], ["x", "w"], ["x", "u_w", "w", "loop/b_with_bias"]], ids=str)
def test_sizes_that_are_not_known(missing):
    shapes = {blob: shape for blob, shape in SHAPES.items() if blob not in missing}
    assert why(RULE, biased_loop(), shapes) == [UNKNOWN.format("' and '".join(missing))]


def test_sizes_that_are_given():
    """To an empty workspace."""
    net = Net().net
    workspace.ResetWorkspace()
    report = optimize(net, PLAIN, even_if_slower=True, dry_run=True)
    assert reasons_in(report, RULE) == [UNKNOWN.format("x' and 'u_w' and 'w' and 'loop/b_with_bias")]
    shapes = {"x": (T, N, DIM_IN), "u_w": (D, D), "w": (D, DIM_IN), "b": (D,)}
    assert_fired(optimize(net, PLAIN, shapes, even_if_slower=True))


@pytest.mark.parametrize("blob, shape", [("x", (T, N, 2, 2)), ("w", (D, 2, 2)), ("u_w", (D, D, 1))], ids=str)
def test_numbers_of_dimensions(blob, shape):
    """FC makes matrices of them; for the last, `sequence_bias` says so."""
    expected = ["'{}' has {} dimensions".format(blob, len(shape))]
    assert why(RULE, biased_loop(), {**SHAPES, blob: shape}) == expected
    report = biases.assert_right(plain, PLAIN, change=lambda net: net.shapes.update({blob: shape}))
    assert [refusal.reason for refusal in report.refusals] == expected


def merged(make, x, h):
    """By merged_sums, before it: the sum is one of three."""
    total = make.cell.Sum([make.fc(h, "u"), x], "total")
    return make.cell.Tanh(make.cell.Sum([total, make.cell.Sigmoid(h, "v")], "z"), "h_t")


def other_product(make, x, h, v=None):
    """The sum takes the place of another product, that has no bias."""
    make.cell.BatchMatMul([v or make.cell.Tanh(h, "v"), make.reference("q_w", D, D)], "q", broadcast=1)
    make.cell.Sum(["q", make.fc(h, "u"), x], ["q"])
    return make.cell.Tanh("q", "h_t")


def other_product_of_no_rows(make, x, h):
    return other_product(make, x, h, make.cell.Reshape(h, ["v", "old"], shape=[1, -1, D])[0])


PLACED = {
    "other name": (biases.name_in_between, PLAIN, [NOT_IN_PLACE]),
    "other name, read": (biases.read_in_between, None, [NOT_IN_PLACE]),
    "merged": (merged, None, []),
    "other product": (other_product, PLAIN, []),
    "other product of no rows": (other_product_of_no_rows, PLAIN, [NO_ROWS.format("v")]),
}


@pytest.mark.parametrize("step, rules, expected", PLACED.values(), ids=PLACED)
def test_sums_in_other_places(step, rules, expected):
    report = biases.assert_right(step, rules, forward_only=True)
    assert reasons_in(report, RULE) == expected and report.counts[RULE] == (not expected)


def test_it_follows_sequence_bias():
    """It is no place without that, or where that may not do it."""
    read_elsewhere = biases.inserted(2, "Copy", [SEQUENCE], ["again"])
    for net, rules in ((Net(), [RULE]), (Net(change=read_elsewhere), PLAIN)):
        report = optimize(net.net, rules, even_if_slower=True)
        assert report.total == 0 and reasons_in(report, RULE) == []


# The trial.

SLOWER = "for [2, 3 + 4] x [.., 3] it is not faster"


def make_up_trial(monkeypatch, apart, joined, rule=joined_sequence):
    """The sizes that are tried then."""
    sizes = []
    monkeypatch.setattr(rule, "_tried", lambda size: sizes.append(size) or {False: apart, True: joined})
    return sizes


# As it is, rewritten, and whether that pays.
GAINS = pytest.mark.parametrize(
    "apart, joined, pays",
    [
        (Seconds(0.0, 1.02), Seconds(0.0, 1.0), True),
        (Seconds(0.0, 1.0199), Seconds(0.0, 1.0), False),
        # What is done once has its share in each of 3 steps.
        (Seconds(3.1, 0.0), Seconds(0.0, 1.0), True),
        (Seconds(3.0, 0.0), Seconds(0.0, 1.0), False),
        (Seconds(0.0, 1.03), Seconds(3.0, 0.0), True),
        (Seconds(0.0, 1.01), Seconds(3.0, 0.0), False),
    ],
    ids=str,
)


@GAINS
def test_a_loss(apart, joined, pays, monkeypatch):
    expected = None if pays else SLOWER
    make_up_trial(monkeypatch, apart, joined)
    assert why(RULE, biased_loop(), SHAPES, loss=True) == [expected]
    report = optimize(Net().net, PLAIN, {"x": (3, 50, DIM_IN)})
    assert report.counts == {"sequence_bias": 1, RULE: expected is None}
    assert reasons_in(report, RULE) == ([] if expected is None else [SLOWER.replace("[2", "[50")])


def test_a_loss_where_the_steps_are_not_known():
    """`optimize` does not come as far: `sequence_bias` asks for the same sizes of the same sequence."""
    shapes = {blob: shape for blob, shape in SHAPES.items() if blob != biases.NEW}
    expected = ["the numbers of steps and sequences are not known; give shapes"]
    assert why(RULE, biased_loop(), shapes, loss=True) == expected


SIGMOIDS = {
    "no sigmoid": b"",
    "Sigmoid": as_bytes(made("Sigmoid", ["total"], ["h_t"]), ["y"], ["s"]),
    "ATen": as_bytes(made("ATen", ["total"], ["h_t"], operator="sigmoid"), ["y"], ["s"]),
}
EVERY_SIGMOID = pytest.mark.parametrize("sigmoid", SIGMOIDS)
LAYOUTS_TRIED = pytest.mark.parametrize("layout", [ROWS, COLUMNS])


@LAYOUTS_TRIED
@EVERY_SIGMOID
def test_what_is_tried(sigmoid, layout, monkeypatch):
    """The sizes of the net, and the sigmoid that it takes."""

    def step(make, x, h):
        total = make.cell.Sum([make.fc(h, "u"), x], "total")
        if sigmoid == "ATen":
            return make.cell.Copy(make.cell.ATen(total, "s", operator="sigmoid"), "h_t")
        return (make.cell.Sigmoid if sigmoid == "Sigmoid" else make.cell.Tanh)(total, "h_t")

    sizes = make_up_trial(monkeypatch, Seconds(0.0, 1.0), Seconds(0.0, 1.0))
    loop = biased_loop(step, forward_only=True)
    if layout == COLUMNS:
        set_argument(loop.operators[0], trans_b=0)
    assert why(RULE, loop, SHAPES, loss=True) == [SLOWER]
    assert sizes == [Size(T, N, D, DIM_IN, D, layout, SIGMOIDS[sigmoid])]


@LAYOUTS_TRIED
@EVERY_SIGMOID
def test_both_ways_are_tried(sigmoid, layout):
    """Nobody knows how long that takes."""
    with leaving_no_trace():
        found = joined_sequence._tried(Size(5, 3, 8, 4, 16, layout, SIGMOIDS[sigmoid]))
    assert set(found) == {True, False}
    assert all(seconds.step > 0 and seconds.once > 0 for seconds in found.values())


def test_which_way_takes_how_long(monkeypatch):
    monkeypatch.setattr(joined_sequence, "_subject", lambda size, is_joined: Subject([size, is_joined], {}))
    make_up_clock(monkeypatch, lambda subject: Seconds(subject.step[0].steps, float(subject.step[1])))
    found = joined_sequence._tried.__wrapped__(Size(5, 3, 8, 4, 16, ROWS, b""))
    assert found == {False: Seconds(5, 0.0), True: Seconds(5, 1.0)}


def form_of(size, is_joined):
    """What is tried: the types of what is done once, and in a step; what that gives."""
    subject = joined_sequence._subject(size, is_joined)
    step, shapes, once = subject.step, subject.shapes, subject.once
    random = np.random.RandomState(3)
    own = ["x", "v", "c", "h", "w"]
    values = {blob: random.uniform(-1, 1, shapes[blob]).astype(np.float32) for blob in own}
    (slice_,) = set(shapes) - set(own)
    assert subject.slices == (slice_,) and subject.steps == size.steps
    values[slice_] = (values["x"] if is_joined else result(once, values, "sequence"))[:1]
    assert values[slice_].shape == shapes[slice_]
    types = [[operator.type for operator in operators] for operators in (once, step)]
    return types, result([*once, *step], values, "s" if size.sigmoid else "y")


@LAYOUTS_TRIED
@EVERY_SIGMOID
@pytest.mark.parametrize("packed", [False, True], ids=["as it is", "oneDNN"])
def test_both_ways_give_the_same(packed, sigmoid, layout, monkeypatch):
    """One with a product in the step alone, one with a product over all steps beside it, whoever multiplies."""
    if packed:
        make_up_gain(monkeypatch)
    else:
        make_up(monkeypatch, Seconds(0.0, 1.0))
    monkeypatch.setattr(products_over_steps, "seconds", lambda size, layout: 1.0)
    monkeypatch.setattr(sigmoids, "_is_faster_there", lambda *_: True)
    size = Size(5, 3, 8, 4, 16, layout, SIGMOIDS[sigmoid])
    (before_apart, apart), expected = form_of(size, False)
    (before_joined, joined), found = form_of(size, True)
    assert expected.shape == (1, size.rows, size.outer)
    assert support.difference(found, expected) < support.TOLERANCE
    assert "FC" in before_apart and "FC" not in before_joined and "Sum" in apart and "Sum" not in joined
    if not packed:
        taken = [] if sigmoid == "no sigmoid" else [sigmoid]
        assert apart == ["BatchMatMul", "Sum", *taken] and joined == ["Concat", "BatchMatMul", *taken]
    assert joined[0] == "Concat" and len({"BatchMatMul", "Conv", "FC"} & set(joined)) == 1
