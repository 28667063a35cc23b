"""The rule `unchanged_weights` with `constant_weights`: what is made of weights is made in the first run alone."""

import numpy as np
import pytest
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import LSTM, install, optimize, prediction_net
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.operators import copied
from caffe2_recurrent.rewriting import same_weights
from caffe2_recurrent.rewriting.products import step_products
from caffe2_recurrent.rewriting.rules import transposed_weights
from caffe2_recurrent.rewriting.rules.unchanged_weights import IN_EACH_RUN, WHEN_CHANGED
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from test_rewriting_unchanged_weights import (
    RULE,
    TRANSPOSED,
    WEIGHTS,
    as_built,
    assert_failure_leaves_nothing,
    assert_runs_see,
    change,
    laid_out,
    parameters,
    transposed,
)

RULES = pytest.mark.parametrize("rules", [TRANSPOSED, support.NAMES], ids=["transposed", "all rules"])


def promised(rules=TRANSPOSED, **options):
    """An LSTM whose weights are said to stay, and its results."""
    model, blobs = support.lstm(gradients=False, forward_only=True, **options)
    report = optimize(model, rules, even_if_slower=True, constant_weights=True)
    assert report.counts[RULE] == 1, report
    return model, blobs


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_of_a_numpy_loop(cell):
    reports = []
    with install(optimize=True, even_if_slower=True, constant_weights=True, trials=False, on_report=reports.append):
        support.assert_right_forwards(cell, [cell.steps, 1])
    assert [report.counts[RULE] for report in reports if report.total] == [1, 1]


@RULES
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change_of_what_is_no_weight(rules, kind, lengths):
    model, blobs = promised(rules, lengths=lengths)
    model.net.Proto().type = kind
    support.without_executor(model)
    assert_runs_see([None, None, "x", "h0", None, "c0"], model, blobs, lengths=lengths)


def test_runs_of_other_sizes():
    def promise(model):
        assert optimize(model, support.NAMES, even_if_slower=True, constant_weights=True).counts[RULE] == 1

    options = {"gradients": False, "forward_only": True}
    expected = support.runs_of_other_sizes(lambda model: None, **options)
    support.assert_same(support.runs_of_other_sizes(promise, **options), expected)


# -------------------------------------------------------------------------------------------------------- what is kept


def test_there_are_no_copies_and_nothing_is_compared():
    model, _ = promised()
    assert [blob for blob in laid_out(model.net) if "seen" in blob] == []
    assert 's: "equal"' not in str(model.net.Proto())
    assert same_weights.DISTANCE not in str(model.net.Proto())


def test_other_weights_are_seen_by_a_net_that_is_created_anew():
    model, blobs = promised()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    before = support.values(blobs)
    change(WEIGHTS, 7)
    workspace.RunNet(model.net, 2)
    support.assert_same(support.values(blobs), before)
    workspace.CreateNet(model.net, overwrite=True)
    workspace.RunNet(model.net, 2)
    assert support.difference(workspace.FetchBlob(blobs[0]), before[0][0]) > support.TOLERANCE
    support.assert_same(support.values(blobs), as_built(blobs))


def test_what_is_made_of_weights_is_made_once():
    model, blobs = promised()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    right = support.values(blobs)
    change(transposed(model.net), 5)
    workspace.RunNet(model.net)
    assert support.difference(workspace.FetchBlob(blobs[0]), right[0][0]) > support.TOLERANCE


@pytest.mark.parametrize("rules", [["sequence_bias", *TRANSPOSED], TRANSPOSED], ids=["other", "same"])
def test_each_net_of_a_workspace_makes_its_own(rules):
    nets = []
    for name, chosen in (("one", TRANSPOSED), ("other", rules)):
        model, blobs = promised(chosen, name=name)
        support.without_executor(model)
        workspace.CreateNet(model.net)
        nets.append(model.net)
    for net in (nets[0], nets[1], nets[0], nets[1]):
        workspace.RunNet(net)
        support.assert_same(support.values(blobs), as_built(blobs))


def test_one_that_compares_runs_beside():
    model, blobs = promised(name="promised")
    other, _ = support.lstm(gradients=False, forward_only=True, name="compares")
    optimize(other, TRANSPOSED, even_if_slower=True)
    for net in (model.net, other.net):
        workspace.CreateNet(net)
        workspace.RunNet(net)
    change(WEIGHTS, 3)
    for net in (other.net, other.net):
        workspace.RunNet(net)
        support.assert_same(support.values(blobs), as_built(blobs))


def test_a_first_run_that_fails_as_they_are_laid_out_is_none():
    assert_failure_leaves_nothing(*promised(support.NAMES), runs_before=0)


def test_it_would_show_if_it_counted_though_it_fails():
    model, blobs = promised(support.NAMES)
    (guard,) = [operator for operator in model.net.Proto().op if laid_out_when_changed(operator)]
    net = support.argument(guard, "then_net").n
    *making, said = [copied(operator) for operator in net.op]
    del net.op[:]
    net.op.extend([said, *making])
    with pytest.raises((RuntimeError, AssertionError)):
        assert_failure_leaves_nothing(model, blobs, runs_before=0)


def test_weights_that_can_be_laid_out_and_do_not_fit_stay_until_the_net_is_created_anew():
    model, blobs = promised()
    workspace.CreateNet(model.net)
    weights = workspace.FetchBlob(WEIGHTS)
    workspace.FeedBlob(WEIGHTS, np.ones((4 * support.D, support.D + 3), dtype=np.float32))
    for value in (workspace.FetchBlob(WEIGHTS), weights):
        workspace.FeedBlob(WEIGHTS, value)
        with pytest.raises(RuntimeError, match="gates_t"):
            workspace.RunNet(model.net)
    workspace.CreateNet(model.net, overwrite=True)
    workspace.RunNet(model.net, 2)
    support.assert_same(support.values(blobs), as_built(blobs))


# ----------------------------------------------------------------------------------------------- what others see of it


def test_nothing_is_left_for_a_second_time():
    model, _ = promised(support.NAMES)
    before = model.net.Proto().SerializeToString()
    for constant_weights in (True, False):
        assert optimize(model, even_if_slower=True, constant_weights=constant_weights).total == 0
    assert model.net.Proto().SerializeToString() == before


def test_a_loop_that_is_trained_is_as_without_the_promise():
    model, _ = support.lstm()
    made = []
    for constant_weights in (False, True):
        net = support.as_read_from_a_file(model.net)
        assert optimize(net, even_if_slower=True, trials=False, constant_weights=constant_weights).total
        made.append(net.SerializeToString())
    assert made[0] == made[1]


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_predictor_needs_the_weights_alone(cut):
    model, blobs = support.lstm(gradients=False, forward_only=True)
    if cut == "after":
        optimize(model, even_if_slower=True, constant_weights=True)
    net, found = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    if cut == "before":
        optimize(net, even_if_slower=True, constant_weights=True)
    assert laid_out(net)
    assert sorted(map(str, found)) == sorted(parameters())
    for seed in range(2):
        change(WEIGHTS, seed)
        workspace.CreateNet(net, overwrite=True)
        workspace.RunNet(net, 2)
        right = as_built(blobs[:1])
        support.assert_same(support.values(blobs[:1]), right)
        # Cut out, too, they are made once.
        change(WEIGHTS, 7)
        kept = {blob: workspace.FetchBlob(blob).tobytes() for blob in laid_out(net)}
        workspace.RunNet(net)
        assert {blob: workspace.FetchBlob(blob).tobytes() for blob in kept} == kept


def test_two_layers_make_what_they_need_of_their_own():
    found = []
    for rewrite in (False, True):
        workspace.ResetWorkspace()
        model = ModelHelper("model")
        outputs = LSTM(model, "x", None, None, 3, [4, 4], "layers", forward_only=True)
        workspace.FeedBlob("x", np.random.RandomState(3).uniform(-1, 1, (5, 2, 3)).astype(np.float32))
        workspace.RunNetOnce(model.param_init_net)
        for number, parameter in enumerate(map(str, model.params)):
            change(parameter, number)
        if rewrite:
            assert optimize(model, even_if_slower=True, constant_weights=True).counts[RULE] == 2
        workspace.CreateNet(model.net)
        workspace.RunNet(model.net, 2)
        found.append(workspace.FetchBlob(str(outputs[0])))
    np.testing.assert_allclose(found[1], found[0], atol=support.TOLERANCE)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("gain, for_good, is_taken", [(1.07, True, True), (1.07, False, False), (1.03, True, False)])
def test_less_is_enough_to_transpose_weights_once(monkeypatch, gain, for_good, is_taken):
    times = {"FCTransposed": Seconds(0.0, 1.0)}
    monkeypatch.setattr(step_products, "tried", lambda size, way: times.get(way, Seconds(0.0, gain)))
    monkeypatch.setattr(transposed_weights, "seconds_of_comparing", lambda *_: 0.0)
    model, _ = support.lstm(gradients=False, forward_only=True)
    report = optimize(model, TRANSPOSED, constant_weights=for_good, dry_run=True)
    assert report.counts["transposed_weights"] == is_taken


@pytest.mark.parametrize("times, is_better", [((1.0, 0.95), False), ((1.0, 0.5), True)])
def test_a_trial_decides(monkeypatch, times, is_better):
    model, _ = support.lstm(gradients=False, forward_only=True)
    (loop,) = read_loops(model.net.Proto()).values()
    loop.add_before("Transpose", [WEIGHTS], "transposed")
    loop.may_keep = Keeping.WEIGHTS | Keeping.FOR_GOOD
    found = dict(zip((IN_EACH_RUN, WHEN_CHANGED), (Seconds(0.0, time) for time in times)))
    monkeypatch.setattr(trial, "in_turn", lambda subjects: {name: found[name] for name in subjects})
    trial.forget()
    rule, sizes = support.rule(RULE), find_sizes(model.net.Proto(), model.param_init_net.Proto(), {})
    (site,) = rule.sites(loop)
    expected = "to see whether this is the first run takes as long as what is made of weights"
    assert rule.loss(loop, site, sizes) == (None if is_better else expected)
    trial.forget()
