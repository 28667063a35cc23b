"""The rule `filters_over_steps`: the product that makes a sequence of a loop that serves, with filters that stay."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import GRU, LSTM, optimize
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.operator_arguments import nets_of
from caffe2_recurrent.operators import opened
from caffe2_recurrent.rewriting.products import fixed_rows, kept_filters, onednn, thread_numbers
from caffe2_recurrent.rewriting.products.fixed_rows import NET, Size
from caffe2_recurrent.rewriting.rules import filters_over_steps
from caffe2_recurrent.rewriting.rules.filters_over_steps import AS_IT_IS, WITH_FILTERS
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from every_pair import every_pair
from test_rewriting_packed_products import assert_rows_stay_apart
from test_rewriting_unchanged_weights import (
    as_built,
    assert_a_predictor_needs_the_weights_alone,
    assert_other_weights_are_seen_when_created_anew,
    assert_runs_see,
    change,
    parameters,
)

RULE = "filters_over_steps"
ALONE = [RULE, "unchanged_weights"]
# These would have the product before it.
ALL = [name for name in support.NAMES if name not in ("joined_sequence", "gates_first")]
RULES = pytest.mark.parametrize("rules", [ALONE, ALL], ids=["alone", "all rules"])
FORWARD = {"gradients": False, "forward_only": True}
PROMISED = {"constant_weights": True, "constant_threads": True}
T, N = support.T, support.N


def with_filters(rules=ALONE, name="model", **options):
    """An LSTM whose sequence is made with filters, and its results."""
    model, blobs = support.lstm(name=name, **FORWARD, **options)
    report = optimize(model, rules, even_if_slower=True, **PROMISED)
    assert report.counts[RULE] == 1, report
    return model, blobs


def convolving(net):
    """The operators of the product, where rows are as many as they should be."""
    return next(inner.op for operator in opened(net.op) for inner in nets_of(operator) if inner.name == NET)


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_of_a_numpy_loop(cell, weights_by_name):
    with support.optimising(ALL, **PROMISED) as lines:
        support.assert_right_forwards(cell, [cell.steps, 1])
    assert lines.counts[RULE] >= 2, lines.reasons


@every_pair
@RULES
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change_of_what_is_no_weight(rules, kind, lengths):
    """Also of the numbers of steps and sequences, to more, to fewer, and back."""
    model, blobs = with_filters(rules, lengths=lengths)
    model.net.Proto().type = kind
    support.without_executor(model)
    sizes = [(2, 1), (T, N), (14, 17), (N, T), (T, N), (1, 2)]
    changes = [None, None, "x", "sizes", "sizes", "x", "h0", *["sizes"] * 4, None]
    assert_runs_see(changes, model, blobs, sizes, lengths=lengths)


def test_no_steps():
    model, blobs = with_filters()
    support.without_executor(model)
    workspace.CreateNet(model.net)
    for steps in (T, 0, T):
        support.feed(steps=steps)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs[1::2]), as_built(blobs[1::2]))


def test_rows_that_are_no_numbers():
    model, blobs = with_filters(ALL)
    assert_rows_stay_apart(model, blobs, as_built(blobs))


@pytest.mark.parametrize("planted", ["no bias", "old rows", "any rows"])
def test_a_wrong_product_is_seen(planted):
    """What the tests above compare would not pass over these."""
    model, blobs = with_filters()
    for operator in list(opened(model.net.Proto().op)):
        if planted == "no bias" and kept_filters.keeps_filters(operator):
            operator.input.pop()
        if planted == "old rows" and operator.type == "Scale":
            operator.input[0] = operator.output[0]
        if planted == "any rows" and any(net.name == NET for net in nets_of(operator)):
            support.argument(operator, "else_net").n.CopyFrom(support.argument(operator, "then_net").n)
    change("layer/i2h_b", 3)
    with pytest.raises((RuntimeError, AssertionError)):
        assert_runs_see([None, "x", "sizes"], model, blobs, [(14, 17)])


def test_rows_of_other_numbers_are_refused_as_the_product_refuses_them():
    model, _ = with_filters()
    for value in (np.zeros((T, N, support.DIM_IN), np.int32), np.zeros((T, N, support.DIM_IN + 1), np.float32)):
        support.feed()
        workspace.FeedBlob("x", value)
        with pytest.raises(RuntimeError):
            workspace.RunNetOnce(model.net)


def test_two_nets_of_a_workspace():
    """One of them optimised for another number of steps."""
    nets = []
    for steps in (T, 5, T):
        support.feed(steps=steps)
        model, blobs = support.lstm(name="for_{}_{}".format(steps, len(nets)), **FORWARD)
        support.feed(steps=steps)
        assert optimize(model, ALL, even_if_slower=True, **PROMISED).counts[RULE] == 1
        support.without_executor(model)
        workspace.CreateNet(model.net)
        nets.append(model.net)
    for seed, (number, steps) in enumerate([(0, T), (1, T), (1, 5), (0, T), (2, T), (0, 5), (2, 5), (0, T)]):
        support.feed(steps=steps, seed=seed)
        workspace.RunNet(nets[number])
        support.assert_same(support.values(blobs), as_built(blobs))


# ------------------------------------------------------------------------------------------------------------ the net


@RULES
def test_what_it_reads_is_made_in_the_first_run(rules):
    model, _ = with_filters(rules)
    (operator,) = filter(kept_filters.keeps_filters, convolving(model.net.Proto()))
    made = {blob for guard in model.net.Proto().op if laid_out_when_changed(guard) for blob in guard.output}
    assert set(operator.input) <= made
    # The FC is there for other rows alone.
    assert "FC" not in [made.type for made in model.net.Proto().op]


def test_other_weights_are_seen_by_a_net_that_is_created_anew():
    assert_other_weights_are_seen_when_created_anew(*with_filters())


def test_a_predictor_needs_the_weights_alone():
    assert_a_predictor_needs_the_weights_alone(*with_filters(ALL))


@RULES
def test_nothing_is_left_for_a_second_time(rules):
    model, _ = with_filters(rules)
    before = model.net.Proto().SerializeToString()
    assert optimize(model, rules, even_if_slower=True, **PROMISED).total == 0
    assert model.net.Proto().SerializeToString() == before


@pytest.mark.parametrize("layer", [LSTM, GRU], ids=lambda layer: layer.__name__)
def test_two_layers(layer):
    model = ModelHelper("model")
    layer(model, "x", None, None, support.DIM_IN, [4, 4], "layers", forward_only=True)
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    assert optimize(model, ALL, even_if_slower=True, **PROMISED).counts[RULE] == 2


def test_the_number_of_threads_is_set_where_it_matters(monkeypatch):
    for matters in (True, False):
        workspace.ResetWorkspace()
        monkeypatch.setattr(thread_numbers, "matter", lambda matters=matters: matters)
        model, blobs = with_filters()
        assert any(map(thread_numbers.sets, convolving(model.net.Proto()))) == matters
        support.assert_same(support.run(model, blobs), as_built(blobs))


# ------------------------------------------------------------------------------------------------------------ refusals


def reason(model, rules=ALONE, **options):
    report = optimize(model, rules, dry_run=True, **{"even_if_slower": True, **PROMISED, **options})
    (found,) = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    return found


def test_a_loop_that_is_trained():
    assert reason(support.lstm()[0]) == "'layer/i2h_w' may be another in a later run"


def test_weights_that_are_not_said_to_stay():
    found = reason(support.lstm(**FORWARD)[0], constant_weights=False)
    assert found == "'layer/i2h_w' may be another in a later run"


def test_a_bias_that_the_net_makes():
    model, _ = support.lstm(**FORWARD)
    model.net.Scale(["layer/i2h_b"], "layer/i2h_b", scale=1.0)
    assert reason(model) == "'layer/i2h_b' may be another in a later run"


def test_threads_that_are_not_said_to_stay(monkeypatch):
    monkeypatch.setattr(thread_numbers, "matter", lambda: True)
    found = reason(support.lstm(**FORWARD)[0], constant_threads=False)
    assert found == "the number of threads may be another in a later run"


def test_where_the_number_of_threads_does_not_matter_nobody_has_to_promise_it(monkeypatch):
    monkeypatch.setattr(thread_numbers, "matter", lambda: False)
    model, _ = support.lstm(**FORWARD)
    assert optimize(model, ALONE, even_if_slower=True, constant_weights=True).counts[RULE] == 1


def test_a_sequence_that_others_read():
    model, _ = support.lstm(**FORWARD)
    model.net.Copy(["layer/i2h"], "seen")
    assert reason(model) == "'layer/i2h' is not made for this loop alone"


def test_a_caffe2_without_onednn(monkeypatch):
    monkeypatch.setattr(onednn, "is_missing", lambda: True)
    assert reason(support.lstm(**FORWARD)[0]) == "this Caffe2 has no oneDNN"


def test_weights_of_unknown_size():
    model, _ = support.lstm(**FORWARD)
    proto = support.as_read_from_a_file(model.net)
    workspace.ResetWorkspace()
    assert reason(proto) == "the size of its weights 'layer/i2h_w' is not known; give shapes"


def test_a_number_of_rows_that_is_not_known():
    model, _ = support.lstm(**FORWARD)
    weights = {name: workspace.FetchBlob(name).shape for name in parameters()}
    workspace.ResetWorkspace()
    assert reason(model, shapes=weights) == "the numbers of steps and sequences are not known; give shapes"


def test_rows_of_more_dimensions():
    model, _ = support.lstm(**FORWARD)
    workspace.FeedBlob("x", np.zeros((T, N, support.DIM_IN, 1), np.float32))
    assert reason(model) == "'x' does not have a row of {} for each step and sequence".format(support.DIM_IN)


def test_rows_that_would_not_stay_where_they_lie(monkeypatch):
    monkeypatch.setattr(fixed_rows, "are_right", lambda _: False)
    found = reason(support.lstm(**FORWARD)[0])
    assert found == "oneDNN does not keep rows of {} by 16 where they lie".format(support.DIM_IN)


@pytest.mark.parametrize("planted", ["nothing", "no bias", "rows that touch", "an error"])
def test_whether_products_are_right_is_found_out(planted, monkeypatch):
    make = fixed_rows.in_place_of

    def make_wrongly(operator, loop, size):
        made = make(operator, loop, size)
        for inner in opened(made.each):
            if planted == "no bias" and kept_filters.keeps_filters(inner):
                inner.input.pop()
            if planted == "rows that touch" and inner.type == "Scale":
                inner.CopyFrom(core.CreateOperator("ATen", inner.input[:], inner.output[:], operator="softmax", dim=1))
            if planted == "an error" and inner.type == "Alias":
                inner.input[0] = "nothing"
        return made

    monkeypatch.setattr(fixed_rows, "in_place_of", make_wrongly)
    trial.forget()
    assert fixed_rows.are_right(Size(3, 4, 5, 6)) == (planted == "nothing")
    trial.forget()


@pytest.mark.parametrize(
    "seconds, others, is_taken", [(2.0, 1.0, False), (1.0, 1.0, True), (1.0, 0.4, False), (1.9, 1.0, False)]
)
def test_a_trial_decides(monkeypatch, seconds, others, is_taken):
    """Beside MKL's product, and beside those of rules that are to follow."""
    times = {AS_IT_IS: Seconds(0.0, 2.0), WITH_FILTERS: Seconds(0.0, seconds)}
    monkeypatch.setattr(trial, "in_turn", lambda ways: {way: times.get(way, Seconds(0.0, 1.0)) for way in ways})
    monkeypatch.setattr(filters_over_steps, "_share_of_others", lambda *_: others)
    model, _ = support.lstm(**FORWARD)
    trial.forget()
    report = optimize(model, ALONE, dry_run=True, **PROMISED)
    assert report.counts[RULE] == is_taken
    found = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    assert found == ([] if is_taken else ["for [27, 2] x [2, 16] filters are not faster"])
    trial.forget()


@pytest.mark.usefixtures("nnpack_products")
@pytest.mark.parametrize("share, is_taken", [(0.4, False), (0.6, True)])
@pytest.mark.parametrize("other", ["NNPACK", "oneDNN"])
def test_what_others_take_is_asked(monkeypatch, share, is_taken, other):
    of_nnpack, of_onednn = (share, 1.0) if other == "NNPACK" else (1.0, share)
    monkeypatch.setattr(filters_over_steps.NNPACKOverSteps, "share", lambda *_: of_nnpack)
    monkeypatch.setattr(filters_over_steps.products_over_steps, "share", lambda _: of_onednn)
    times = {AS_IT_IS: Seconds(0.0, 2.0), WITH_FILTERS: Seconds(0.0, 1.0)}
    monkeypatch.setattr(trial, "in_turn", lambda ways: {way: times.get(way, Seconds(0.0, 1.0)) for way in ways})
    model, _ = support.lstm(**FORWARD)
    trial.forget()
    assert optimize(model, ALONE, dry_run=True, **PROMISED).counts[RULE] == is_taken
    trial.forget()
