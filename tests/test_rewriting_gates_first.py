"""`gates_first`: products whose columns are split, with one matrix for each part."""

import functools

import numpy as np
import pytest
from caffe2.python import workspace

import rewriting_support as support
import test_rewriting_joined_sequence as joined
import test_rewriting_sequence_bias as biases
from caffe2_recurrent import LSTM, optimize
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.elementwise.lstm_forms import (
    FORMS,
    ByHalves,
    ByKind,
    ByTanh,
    WithoutCandidate,
    make_form,
)
from caffe2_recurrent.rewriting.products.step_products import COLUMNS, ROWS, TRANSPOSED_ROWS
from caffe2_recurrent.rewriting.rules import RULES, gates_first, lstm_unit
from caffe2_recurrent.rewriting.rules.gates_first import Size
from caffe2_recurrent.rewriting.steps import columns
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.numbering import Numbering, operators_of
from caffe2_recurrent.rewriting.trials.timing import Seconds
from every_pair import every_pair
from onednn_support import inner_nets, leaving_no_trace, numbers_matter, promise_constant_threads
from step_nets import D, N, T
from test_rewriting_onednn import with_other_weights
from test_rewriting_rules import loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net, writer

RULE = "gates_first"
ALONE = ["sequence_bias", RULE]
LSTM_RULES = ["lstm_unit", "scaled_weights", *ALONE]
ALONE_AND_ALL = pytest.mark.parametrize("rules", [ALONE, None], ids=["alone", "all rules"])
FORWARD = {"gradients": False, "forward_only": True}


# Steps, of the slice of X and of the state; what is split is 3 columns wide, or 6.


def squashed(make, x, h):
    total = make.cell.Sigmoid(make.cell.Sum([make.fc(h, "u"), x], "total"), "squashed")
    p, q, r = make.cell.Split(total, ["p", "q", "r"], axis=2)
    return make.cell.Concat([make.cell.Mul([p, q], "pq"), q, make.cell.Tanh(r, "tanh_r")], ["h_t", "sizes"], axis=2)[0]


def in_place(make, x, h):
    total = make.cell.Sum([make.fc(h, "u"), x], "total")
    make.cell.Tanh(total, [total])
    p, q, r = make.cell.Split(total, ["p", "q", "r"], axis=2, split=[1, 1, 1])
    make.cell.Sigmoid(p, [p])
    return make.cell.Concat([r, q, p], ["h_t", "sizes"], axis=2)[0]


def in_two_steps(make, x, h):
    """Two parts first, and one of them goes on as it is."""
    total = make.cell.Sum([make.fc(h, "u"), x], "total")
    pq, r = make.cell.Split(total, ["pq", "r"], axis=2, split=[2, 1])
    p, q = make.cell.Split(make.cell.Tanh(pq, "squashed"), ["p", "q"], axis=2)
    return make.cell.Concat([make.cell.Mul([p, r], "pr"), q, r], ["h_t", "sizes"], axis=2)[0]


def not_squashed(make, x, h):
    total = make.cell.Sum([make.fc(h, "u"), x], "total")
    return make.cell.Concat(make.cell.Split(total, ["p", "q", "r"], axis=2)[::-1], ["h_t", "sizes"], axis=2)[0]


def no_sequence(make, x, h, **turned):
    """A product without a bias, to which nothing is added."""
    weights = make.reference("m", *((2 * D, D) if turned else (D, 2 * D)))
    p, q = make.cell.Split(make.cell.BatchMatMul([h, weights], "gates", broadcast=1, **turned), ["p", "q"], axis=2)
    return make.cell.Sum([make.cell.Tanh(p, "tanh_p"), make.cell.Mul([x, q], "xq")], "h_t")


rows = functools.partial(no_sequence, trans_b=1)
rows.__name__ = "rows"

JOINED = [squashed, in_place, in_two_steps, not_squashed]
STEPS = pytest.mark.parametrize("step", [*JOINED, no_sequence, rows], ids=lambda step: step.__name__)


def splits(net):
    return [operator for operator in support.step(net).op if operator.type == "Split"]


def assert_first(net):
    """The step splits nothing; its product has one matrix for each part, as wide as the parts. How many, once it ran.

    They may have been laid out for oneDNN.
    """
    assert splits(net) == []
    (product,) = [operator for operator in support.step(net).op if operator.type in ("BatchMatMul", "Conv")]
    if product.type == "Conv":
        (laying_out,) = [inner for where, inner in inner_nets(net) if product.input[0] in inner.external_output]
        return next(support.argument(made, "shape").ints[0] for made in laying_out.op if made.type == "Reshape")
    assert [given.name for given in product.arg] == ["broadcast"]
    weights = writer(net, product.input[1])
    assert weights.type == "Transpose"
    # In place, where only the product has them.
    *_, shaping = [operator for operator in net.Proto().op if weights.input[0] in operator.output]
    assert shaping.type == "Reshape"
    return workspace.FetchBlob(weights.output[0]).shape[0]


def assert_kept(rules=ALONE, **options):
    """A net optimised twice gives what it gave, without the RNN executor; the net."""
    options.setdefault("forward_only", True)
    expected = Net(**options).values()
    net = Net(**options)
    rewrite = support.Optimised(rules)
    rewrite(net.net)
    assert rewrite.report.counts[RULE] == 1, str(rewrite.report)
    assert "enable_rnn_executor" not in [given.name for given in support.operator(net.net).arg]
    support.assert_same(net.values(executor=False), expected)
    return net


# It fires, and what it leaves.


@STEPS
@ALONE_AND_ALL
def test_steps(step, rules):
    net = assert_kept(rules, step=step).net
    assert assert_first(net) == (3 if step in JOINED else 2)
    assert (support.operator(net).input[0] == "x") == (step in JOINED)
    if step not in JOINED:
        # What is given stays as it is.
        assert workspace.FetchBlob("m").ndim == 2


@every_pair
@pytest.mark.parametrize("transposed", [[], ["transposed_weights"]], ids=["rows", "columns"])
@pytest.mark.parametrize("options", [{}, {"forget_bias": -0.5}, {"outputs_with_grads": "auto"}], ids=str)
@pytest.mark.parametrize("following", [[], ["gradient_buffer"], None], ids=["alone", "gradient_buffer", "all rules"])
def test_an_lstm_that_is_trained(transposed, options, following, monkeypatch):
    """What the backward step reads is no view of what the next step computes anew."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByKind)
    before = ["parameter_gradients", *transposed, "lstm_unit", "scaled_weights", "zero_gradients"]
    rules = None if following is None else [*before, *following, *ALONE]
    net = biases.assert_lstm_kept(rules, False, **options).net
    assert splits(net) == []
    operators = support.step(net).op
    (forget,) = [operator.output[0] for operator in operators if operator.type == "Copy"]
    backward = support.backward_step(net).op
    assert any(forget in operator.input for operator in backward)
    assert not any(operator.type == "ATen" and forget in operator.output for operator in operators)


def test_a_linked_part_is_copied():
    """It is a slice of the states, and a view would be something else."""
    loop = split_loop()
    loop.links.append(loop.links[0]._replace(inner="q"))
    assert why(RULE, loop, SHAPES) == [None]
    (rule,) = [rule for rule in RULES if rule.name == RULE]
    (site,) = rule.sites(loop)
    rule.rewrite(loop, site, Sizes(SHAPES))
    splitting, copying_it = loop.operators[3:5]
    assert [operator.type for operator in (splitting, copying_it)] == ["ATen", "Copy"]
    assert list(copying_it.input) == splitting.output[1:2] and list(copying_it.output) == ["q"]
    assert splitting.output[::2] == ["p", "r"]


def test_the_executor_stays_where_it_pays(monkeypatch):
    """Steps that need not wait for each other; or where somebody has said so."""
    make_up_trial(monkeypatch, Seconds(0.0, 2.0), Seconds(0.0, 1.0))
    loop = split_loop()
    set_argument(loop.forward, enable_rnn_executor=1)
    assert why(RULE, loop, SHAPES, loss=True) == [None]
    loop.operators[0].input[0] = "x_2"
    loop.known.rows.add("x_2")
    (reason,) = why(RULE, loop, SHAPES, loss=True)
    assert reason.startswith("it would take the RNN executor off: ")
    set_argument(loop.forward, **{"rnn_executor.num_threads": 2})
    assert why(RULE, loop, SHAPES) == [
        "the RNN executor has been given threads, and would not see that parts share memory"
    ]


@pytest.mark.parametrize("form", [*FORMS, ByKind], ids=lambda form: form.__name__)
@pytest.mark.parametrize("transposed", [[], ["transposed_weights"]], ids=["rows", "columns"])
@pytest.mark.parametrize("forget_bias", [0.0, 1.5])
def test_an_lstm(form, transposed, forget_bias, monkeypatch):
    """With one tanh for all gates, something is done with columns that is not done to all of them."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: form)
    net = biases.assert_lstm_kept([*transposed, *LSTM_RULES], False, forget_bias=forget_bias, **FORWARD).net
    if form is ByTanh:
        assert len(splits(net)) == 1
    else:
        assert_first(net)


def test_rows_are_not_transposed_for_nothing(monkeypatch):
    """Those that `transposed_weights` has transposed."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByKind)
    net = biases.assert_lstm_kept(["transposed_weights", *LSTM_RULES], False, **FORWARD).net
    transposing = [operator for operator in net.Proto().op if operator.type == "Transpose"]
    assert len(transposing) == 1 and not any("transposed" in blob for blob in support.operator(net).input)


WITHOUT_ENDS = [rule.name for rule in RULES if rule.name != "ended_sequences"]


@pytest.mark.parametrize(
    "lengths, rules", [(True, None), (True, WITHOUT_ENDS), (False, None)], ids=["ends", "masks", "no lengths"]
)
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "put aside"])
def test_an_lstm_by_all_rules(is_cut, lengths, rules, monkeypatch):
    """Gates past the end of a sequence may have to be put aside before they are split."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByKind)
    if not is_cut:
        monkeypatch.setattr(lstm_unit, "cut_if_possible", lambda *_: None)
    net = biases.assert_lstm_kept(rules, False, lengths=lengths, **FORWARD).net
    assert bool(splits(net)) == (rules is not None and not is_cut)


RUNS = {
    "other sizes": support.runs_of_other_sizes,
    "no steps": support.run_without_steps,
    "other weights": with_other_weights,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_runs(run, kind, monkeypatch):
    """In a net that is created once."""
    monkeypatch.setattr(support, "lstm", functools.partial(support.lstm, **FORWARD))
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByKind)

    def change(model):
        model.net.Proto().type, model.net.Proto().num_workers = kind, 3

    expected = run(change)
    rewrite = support.Optimised()

    def both(model):
        change(model)
        rewrite(model)

    support.assert_same(run(both), expected)
    assert rewrite.report.counts[RULE] == 1
    assert_first(rewrite.net)


@ALONE_AND_ALL
def test_a_dry_run_leaves_the_net(rules):
    net = Net(squashed, forward_only=True).net
    before = net.Proto().SerializeToString()
    assert optimize(net, rules, dry_run=True, even_if_slower=True).counts[RULE] == 1
    assert net.Proto().SerializeToString() == before


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_no_numbers(value):
    """They stay in their sequence."""

    def values(rewrite):
        net = Net(squashed, forward_only=True)
        rewrite(net.net)
        planted = workspace.FetchBlob("x")
        planted[..., 1, 2] = value
        workspace.FeedBlob("x", planted)
        return net.values(executor=False)

    found = values(support.Optimised(ALONE))
    support.assert_same(found, values(lambda net: None))
    assert np.isfinite(found[0][0][:, 0]).all()


# A planted error is seen.


def other_parts(net):
    found = next(operator for operator in support.step(net).op if len(operator.output) == 3)
    found.output[:] = found.output[::-1]


WRONG = {
    "parts in another order": other_parts,
    "rows for columns": lambda net: set_argument(
        next(operator for operator in net.Proto().op if operator.type == "Reshape"), shape=[3, 1, -1]
    ),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_product_is_seen(change):
    options = {"step": no_sequence if change is not other_parts else squashed, "forward_only": True}
    expected = Net(**options).values(executor=False)
    net = Net(**options)
    optimize(net.net, ALONE, even_if_slower=True)
    change(net.net)
    with pytest.raises((AssertionError, RuntimeError), match="output 0|Reshape|BatchMatMul"):
        support.assert_same(net.values(executor=False), expected)


# Refusals.

SHAPES = {"x": (T, N, 4), "u_w": (D, D), "w": (D, 4), "loop/b_with_bias": (D,), biases.NEW: (T, N, D)}
NOT_SPLIT = "it is not split into parts of one width, or first something else is done with it"
USED = "'{}' is used by {} too"
NEEDED = "'{}' is needed elsewhere too"


def split_loop(step=squashed):
    loop = loop_of(Net(step, forward_only=True).net)
    biases.rewrite(loop)
    return loop


def at(position, change):
    return lambda loop: change(loop.operators[position])


def copying(blob, other):
    return lambda loop: loop.operators.append(made("Copy", [blob], [other]))


def another_kind(operator):
    operator.type = "Exp"


def narrower(operator):
    """Parts of 2 and 1, but of 4 columns."""
    del operator.output[2:]
    set_argument(operator, split=[3, 1])


def turned(loop):
    loop.operators[0].input[0] = "turned"
    loop.operators.append(made("Transpose", ["h_t"], ["turned"]))


# The operators are BatchMatMul, Sum, Sigmoid, Split, Mul, Tanh, Concat.
REFUSALS = {
    "something else first": (at(2, another_kind), NOT_SPLIT),
    "another axis": (at(3, lambda operator: set_argument(operator, axis=1)), NOT_SPLIT),
    "another number of columns": (at(3, narrower), NOT_SPLIT),
    "read": (
        lambda loop: loop.operators.append(made("Copy", ["squashed"], ["again"])),
        USED.format("squashed", "Copy"),
    ),
    "read, unsquashed": (
        lambda loop: loop.operators.append(made("Copy", ["total"], ["u"])),
        USED.format("total", "Copy"),
    ),
    "written": (
        lambda loop: loop.operators.append(made("Copy", ["h_t"], ["squashed"])),
        USED.format("squashed", "Copy"),
    ),
    "an output of the step": (lambda loop: loop.net.external_output.append("squashed"), NEEDED.format("squashed")),
    "no rows": (turned, "'turned' is not known to have one row for each sequence"),
    "rows turned round": (
        lambda loop: set_argument(loop.operators[0], trans_a=1),
        "its weights 'u_w' are laid out in another way",
    ),
    "another addend": (
        lambda loop: loop.operators[1].input.append("h_prev"),
        "more than the slice of a sequence is added to it",
    ),
    "a name of the step": (copying("h_t", "x"), "'x' is what a blob of the step is called too"),
}


@pytest.mark.parametrize("plant, expected", REFUSALS.values(), ids=REFUSALS)
def test_refusals(plant, expected):
    loop = split_loop()
    assert why(RULE, loop, SHAPES) == [None]
    plant(loop)
    assert why(RULE, loop, SHAPES) == [expected]


@pytest.mark.parametrize(
    "widths, parts, blobs",
    [([3, 3], 2, ["y"]), ([2, 3, 1], 6, ["y", "y0", "y1"]), ([4, 2], 3, ["y", "y0"]), ([4, 1, 1], 6, ["y", "y0"])],
    ids=str,
)
def test_parts_of_several_widths(widths, parts, blobs):
    """The narrowest goes into each of them; what is wider is still in blocks."""
    names = ["y{}".format(index) for index in range(len(widths))]
    found = columns.region_behind([made("Split", ["y"], names, axis=2, split=widths)], "y", 6)
    assert (found.parts, found.width, found.blobs) == (parts, min(widths), set(blobs))


@pytest.mark.parametrize("widths", [[4, 3], [2, 3, 2], [7]], ids=str)
def test_parts_that_do_not_go_into_each_other(widths):
    names = ["y{}".format(index) for index in range(len(widths))]
    assert columns.region_behind([made("Split", ["y"], names, axis=2, split=widths)], "y", 7) is None


def test_no_place():
    """Nothing is split, or something else is, or by oneDNN."""
    assert why(RULE, joined.biased_loop(), SHAPES) == []
    loop = split_loop()
    loop.operators[3].input[0] = "h_prev"
    assert why(RULE, loop, SHAPES) == []


@pytest.mark.parametrize(
    "shapes, expected",
    [
        ({**SHAPES, "u_w": None}, "the size of its weights 'u_w' is not known; give shapes"),
        ({**SHAPES, "u_w": (1, D, D)}, "its weights 'u_w' are laid out in another way"),
        ({**SHAPES, "x": None}, "the size of 'x' is not known; give shapes"),
    ],
    ids=str,
)
def test_sizes_that_are_not_known(shapes, expected):
    known = {blob: shape for blob, shape in shapes.items() if shape is not None}
    assert why(RULE, split_loop(), known) == [expected]


def test_no_aten(monkeypatch):
    monkeypatch.setattr(gates_first, "aten_is_missing", lambda: True)
    assert why(RULE, split_loop(), SHAPES) == ["this Caffe2 has no ATen operator"]


@pytest.mark.parametrize("form", [form for form in FORMS if form.of_training is None], ids=lambda form: form.__name__)
def test_a_backward_step_that_sees_the_columns(form, monkeypatch):
    """All in one, so that it makes its factors of them."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: form)
    model, _ = support.lstm()
    report = optimize(model, LSTM_RULES, even_if_slower=True)
    assert reasons_in(report, RULE) == [
        NOT_SPLIT if form is ByTanh else USED.format("layer/cell_t_squashed", "SigmoidGradient")
    ]


def test_columns_that_are_computed_again(monkeypatch):
    """In the backward step."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByKind)
    report = optimize(support.lstm(**support.RECOMPUTED)[0], LSTM_RULES, even_if_slower=True)
    assert report.counts["lstm_unit"] == 1 and RULE in report.counts and report.counts[RULE] == 0


def test_a_product_that_has_been_split_already():
    """Then it is no place any more; and what has one row for each sequence, only the first call has seen."""
    net = assert_kept(step=squashed).net
    report = optimize(net, even_if_slower=True, dry_run=True)
    assert reasons_in(report, RULE) == []
    expected = "'loop/total_rows' is not known to have one row for each sequence"
    assert reasons_in(report, "packed_products") == [expected]


# The trial.

SLOWER = "for [2, 3] x [3, 3] it is not faster"


make_up_trial = functools.partial(joined.make_up_trial, rule=gates_first)


@joined.GAINS
def test_a_loss(apart, joined, pays, monkeypatch):
    sizes = make_up_trial(monkeypatch, apart, joined)
    assert why(RULE, split_loop(), SHAPES, loss=True) == [None if pays else SLOWER]
    (size,) = sizes
    assert size[:6] == (T, N, D, 4, D, ROWS) and len(operators_of(size.region)) == 2


def test_numbers_of_steps_that_are_not_known():
    shapes = {blob: shape for blob, shape in SHAPES.items() if blob != biases.NEW}
    expected = ["the numbers of steps and sequences are not known; give shapes"]
    assert why(RULE, split_loop(), shapes, loss=True) == expected


def test_what_is_tried_has_no_names(monkeypatch):
    """So that loops of one size are tried once."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: ByKind)
    sizes = make_up_trial(monkeypatch, Seconds(0.0, 1.0), Seconds(0.0, 1.0))
    for scope in ("one", "two"):
        model, _ = support.lstm(builder=functools.partial(in_scope, scope), **FORWARD)
        optimize(model, LSTM_RULES, shapes={"x": (50, 200, support.DIM_IN)})
    assert len(sizes) == 2 and len(set(sizes)) == 1


def in_scope(scope, model, *inputs_and_sizes, **options):
    *inputs_and_sizes, _ = inputs_and_sizes
    for name, size in {"i2h": support.DIM_IN, "gates_t": support.D}.items():
        workspace.FeedBlob("{}/{}_w".format(scope, name), np.zeros((4 * support.D, size), np.float32))
        workspace.FeedBlob("{}/{}_b".format(scope, name), np.zeros(4 * support.D, np.float32))
    return LSTM(model, *inputs_and_sizes, scope, **options)


@pytest.mark.parametrize("layout", [ROWS, COLUMNS, TRANSPOSED_ROWS])
@pytest.mark.parametrize("of_sequence", [5, None])
def test_it_is_tried(layout, of_sequence):
    split = made("Split", ["y1"], ["y2", "y3"], axis=2)
    region = Numbering({"y": "y"}).operators([made("Tanh", ["y"], ["y1"]), split])
    seen = []
    with leaving_no_trace(), pytest.MonkeyPatch.context() as patch:
        prepared = trial.prepared

        def spied(subject):
            seen.append([operator.type for operator in subject.step])
            return prepared(subject)

        patch.setattr(trial, "prepared", spied)
        found = gates_first._tried.__wrapped__(Size(6, 3, 4, of_sequence, 8, layout, region))
    assert set(found) == {True, False} and all(seconds.step > 0 for seconds in found.values())
    steps = [kinds for kinds in seen if "Tanh" in kinds]
    first, as_it_is = [kinds for kinds in steps if "Split" not in kinds], [kinds for kinds in steps if "Split" in kinds]
    assert first[0] == ["Concat"] * (of_sequence is not None) + ["BatchMatMul", "Tanh", "ATen"]
    assert as_it_is


# The form of an LSTM behind a product.


@pytest.mark.parametrize("trains, promised", [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize("by_kind, other, taken", [(1.0, 1.02, ByKind), (1.0, 1.019, ByTanh), (2.0, 1.0, ByTanh)])
def test_the_form_behind_a_product(by_kind, other, taken, trains, promised, monkeypatch):
    numbers_matter(monkeypatch, True)
    if promised:
        promise_constant_threads(monkeypatch)
    seen = []

    def tried(product, size, forms, trains):
        seen.append((product, size, set(forms), trains))
        return {form: Seconds(0.0, by_kind if form is ByKind else other) for form in forms}

    form = behind_a_product(tried, trains, monkeypatch)
    assert form is taken
    # Where two step workspaces are enough oneDNN may have the product, and the sigmoid of it.
    filters = Keeping.NOTHING if trains else Keeping.FILTERS
    may_keep = Keeping.PLANS | Keeping.NUMBER | filters if promised else Keeping.NOTHING
    expected = lstm_unit.Behind(support.T, support.N, support.D, support.DIM_IN, ROWS, may_keep)
    forms = {ByTanh, ByKind} if trains else {ByTanh, ByHalves, ByKind, *([WithoutCandidate] if promised else [])}
    assert seen == [(expected, support.D, forms, trains)]


def behind_a_product(tried, trains, monkeypatch, fewest=support.N * support.D):
    """The form that is taken where `ByTanh` is the fastest by itself."""
    taken = []

    def noted(form, *arguments):
        taken.append(form)
        return make_form(form, *arguments)

    monkeypatch.setattr(lstm_unit, "FEWEST_BY_KIND", fewest)
    monkeypatch.setattr(lstm_unit, "_tried_behind", tried)
    monkeypatch.setattr(lstm_unit, "_tried", lambda *_: {ByTanh: Seconds(0.0, 1.0)})
    monkeypatch.setattr(lstm_unit, "make_form", noted)
    model, _ = support.lstm(**({} if trains else FORWARD))
    optimize(model, ["parameter_gradients", *LSTM_RULES], even_if_slower=True)
    (form,) = taken
    return form


def test_gates_that_are_not_opened_may_be_faster_behind_a_product(monkeypatch):
    """Though by themselves they take as long as others, or longer."""

    def tried(product, size, forms, trains):
        return {form: Seconds(0.0, {ByHalves: 1.0, ByKind: 1.5}.get(form, 2.0)) for form in forms}

    assert behind_a_product(tried, False, monkeypatch) is ByHalves


@pytest.mark.parametrize("trains", [True, False])
def test_small_states_have_no_trial_by_kind(trains, monkeypatch):
    promise_constant_threads(monkeypatch)

    def tried(product, size, forms, trains):
        assert not trains and set(forms) == {ByTanh, ByHalves, WithoutCandidate}
        return dict.fromkeys(forms, Seconds(0.0, 1.0))

    assert behind_a_product(tried, trains, monkeypatch, support.N * support.D + 1) is ByTanh


@pytest.mark.parametrize("options", [support.RECOMPUTED, {"lengths": True, **FORWARD}], ids=["recomputed", "lengths"])
def test_forms_that_do_not_depend_on_the_product(options, monkeypatch):
    seen = []
    monkeypatch.setattr(lstm_unit, "_form", lambda *arguments: seen.append(arguments[-1]) or ByTanh)
    model, _ = support.lstm(**options)
    optimize(model, ["lstm_unit"], even_if_slower=True)
    assert seen == [None]


def unknown(blob):
    def change(loop, shapes):
        shapes.pop(blob)

    return change


PRODUCTS = {
    "sizes": unknown("x"),
    "weights": unknown("layer/gates_t_w"),
    "steps": unknown("layer/i2h"),
    "no sum": lambda loop, shapes: setattr(loop.operators[1], "type", "Add"),
    "three addends": lambda loop, shapes: loop.operators[1].input.append("layer/hidden_t_prev"),
    "another sequence": lambda loop, shapes: loop.surroundings.sources.clear(),
}


@pytest.mark.parametrize("change", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_that_is_not_known(change):
    (loop,) = read_loops(support.lstm(**FORWARD)[0].net.Proto()).values()
    shapes = {
        "x": (9, 3, 2),
        "layer/i2h": (9, 3, 16),
        "layer/gates_t_w": (16, 4),
        "h0": (1, 3, 4),
        "c0": (1, 3, 4),
    }
    unit = lstm_unit.read_unit(loop.operators[-1])
    assert lstm_unit._product_of(loop, unit, lstm_unit.Sizes(shapes)) == lstm_unit.Behind(9, 3, 4, 2, ROWS)
    change(loop, shapes)
    assert lstm_unit._product_of(loop, unit, lstm_unit.Sizes(shapes)) is None


@pytest.mark.parametrize("trains", [True, False])
def test_forms_are_tried_behind_a_product(trains):
    with leaving_no_trace():
        behind = lstm_unit.Behind(6, 3, 4, 2, ROWS)
        found = lstm_unit._tried_behind.__wrapped__(behind, 4, (ByTanh, ByKind), trains)
    assert set(found) == {ByKind, ByTanh} and all(seconds.step > 0 for seconds in found.values())


@pytest.mark.parametrize("form, options", [(ByHalves, FORWARD), (ByKind, FORWARD), (ByKind, {})])
def test_a_sequence_without_steps_says_nothing_of_their_number(form, options, monkeypatch):
    """Its time has no share in each of them, and the next one may have some."""
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: form)
    model, blobs = support.lstm(**options)
    support.feed(steps=0)
    report = optimize(model, even_if_slower=True)
    assert report.counts["gates_first"] == 1
    support.feed()
    support.assert_same(support.run(model, blobs), expected)


def test_a_sequence_without_steps_has_no_trial_behind_its_product(monkeypatch):
    monkeypatch.setattr(lstm_unit, "_tried", lambda *_: {ByTanh: Seconds(0.0, 1.0)})
    monkeypatch.setattr(lstm_unit, "_tried_behind", None)
    model, _ = support.lstm(**FORWARD)
    support.feed(steps=0)
    assert optimize(model, even_if_slower=True).counts["lstm_unit"] == 1
