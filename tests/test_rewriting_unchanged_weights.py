"""The rule `unchanged_weights`: what is made of weights alone is made when they have changed, and not in each run."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import caffe2_recurrent
import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import GRU, LSTM, MILSTM, optimize, prediction_net, recurrent_net
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes, find_sizes
from caffe2_recurrent.rewriting import kept_results, same_weights
from caffe2_recurrent.rewriting.products import step_products
from caffe2_recurrent.rewriting.rules import unchanged_weights
from caffe2_recurrent.rewriting.rules.unchanged_weights import IN_EACH_RUN, WHEN_CHANGED
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, prepared
from caffe2_recurrent.scratch_workspace import scratch_workspace
from cells import CELLS
from every_pair import every_pair
from onednn_support import force
from test_rewriting_onednn import feed_parameters

RULE = "unchanged_weights"
# One that lays out weights, and this one.
TRANSPOSED = ["transposed_weights", RULE]
WEIGHTS = "layer/gates_t_w"
EVERY_CELL = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
EVERY_STEP_NET = pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
RULES = pytest.mark.parametrize("rules", [TRANSPOSED, support.NAMES], ids=["transposed", "all rules"])


@pytest.fixture(params=["number by number", "by distance"], autouse=True)
def ways_to_compare(request, monkeypatch):
    """Small matrices as they are, and all as large ones are."""
    if request.param == "by distance":
        monkeypatch.setattr(same_weights, "LARGE", 0)
        monkeypatch.setattr(same_weights, "LONG_ROW", 0)


def kept(rules=TRANSPOSED, **options):
    """An LSTM that keeps what is made of its weights, and its results."""
    model, blobs = support.lstm(gradients=False, forward_only=True, **options)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[RULE] == 1, report
    return model, blobs


def change(blob, seed):
    """Other numbers for a blob."""
    shape = workspace.FetchBlob(blob).shape
    workspace.FeedBlob(blob, np.random.RandomState(seed).uniform(-1, 1, shape).astype(np.float32))


def laid_out(net):
    """What is kept of weights for a loop: all results and copies."""
    (operator,) = [operator for operator in net.Proto().op if laid_out_when_changed(operator)]
    return list(operator.output)


def as_built(blobs, **options):
    """What the LSTM gives without any rewriting, for the values that are in the workspace."""
    fed = {blob: workspace.FetchBlob(blob) for blob in ["x", "h0", "c0", "lengths", *parameters()]}
    with scratch_workspace("as_built"):
        model, _ = support.lstm(gradients=False, forward_only=True, **options)
        for blob, value in fed.items():
            workspace.FeedBlob(blob, value)
        return support.run(model, blobs)


def assert_runs_see(changes, model, blobs, sizes=(), **options):
    """Runs of the net, each behind a change of a blob, of the `sizes` in turn, or of nothing, are as those of the LSTM
    as it was built with such options.
    """
    workspace.CreateNet(model.net)
    sizes = iter(sizes)
    for seed, blob in enumerate(changes):
        if blob == "sizes":
            support.feed(*next(sizes), seed=seed)
        elif blob is not None:
            change(blob, seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs, **options))


def assert_other_weights_are_seen_when_created_anew(model, blobs):
    """By a net that keeps what it has made of weights for good."""
    for seed in range(2):
        for blob in parameters():
            change(blob, seed)
        workspace.CreateNet(model.net, overwrite=True)
        workspace.RunNet(model.net, 2)
        support.assert_same(support.values(blobs), as_built(blobs))


def assert_a_predictor_needs_the_weights_alone(model, blobs):
    """Cut out of a net that has been optimised, whatever that makes in its first run."""
    net, found = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    assert sorted(map(str, found)) == sorted(parameters())
    right = as_built(blobs[:1])
    workspace.CreateNet(net)
    workspace.RunNet(net, 2)
    support.assert_same(support.values(blobs[:1]), right)


def parameters():
    return ["layer/" + name for name in ("i2h_w", "i2h_b", "gates_t_w", "gates_t_b")]


# ------------------------------------------------------------------------------------------------------------- values


@EVERY_CELL
@RULES
def test_cells_have_the_values_of_a_numpy_loop(cell, rules):
    with support.optimising(rules) as lines:
        support.assert_right_forwards(cell, [cell.steps, 1])
    assert lines.counts[RULE] == 2, lines.reasons


@EVERY_STEP_NET
@RULES
def test_step_nets_have_the_values_of_a_numpy_loop(make, rules):
    step_net = make()
    with support.optimising(rules):
        outputs, _ = comparing.run(recurrent_net, step_net, forward_only=True)
    comparing.assert_outputs_and_gradients(step_net, outputs, {}, forward_only=True)


@every_pair
@RULES
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change_of_a_weight(rules, kind, lengths):
    model, blobs = kept(rules, lengths=lengths)
    model.net.Proto().type = kind
    support.without_executor(model)
    changes = [None, None, *parameters(), "x", *parameters(), None, "h0"]
    assert_runs_see(changes, model, blobs, lengths=lengths)


def test_runs_of_other_sizes():
    def keep(model):
        assert optimize(model, support.NAMES, even_if_slower=True).counts[RULE] == 1

    options = {"gradients": False, "forward_only": True}
    expected = support.runs_of_other_sizes(lambda model: None, **options)
    support.assert_same(support.runs_of_other_sizes(keep, **options), expected)


LAYERS = pytest.mark.parametrize("layer", [LSTM, GRU, MILSTM], ids=lambda layer: layer.__name__)


@LAYERS
def test_two_layers_keep_weights_of_their_own(layer):
    assert two_layers(layer).counts[RULE] == 2


def two_layers(layer):
    """Two layers of a kind are right whatever their weights have become; the report of `optimize`."""
    reports = []

    def run(rewrite):
        workspace.ResetWorkspace()
        model = ModelHelper("model")
        outputs = layer(model, "x", None, None, 3, [4, 4], "layers", forward_only=True)
        workspace.FeedBlob("x", np.random.RandomState(3).uniform(-1, 1, (5, 2, 3)).astype(np.float32))
        workspace.RunNetOnce(model.param_init_net)
        rewrite(model)
        workspace.CreateNet(model.net)
        found = []
        for seed in range(3):
            feed_parameters(model, seed)
            workspace.RunNet(model.net, 2)
            found.append(workspace.FetchBlob(str(outputs[0])))
        return found, {}

    found = run(lambda model: reports.append(optimize(model, even_if_slower=True)))
    support.assert_same(found, run(lambda model: None))
    return reports[0]


def test_weights_that_are_not_numbers_are_laid_out_in_each_run():
    model, blobs = kept()
    workspace.CreateNet(model.net)
    weights = workspace.FetchBlob(WEIGHTS)
    broken = weights.copy()
    broken[0, 0] = np.nan
    for value in (weights, broken, broken, weights):
        workspace.FeedBlob(WEIGHTS, value)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


# -------------------------------------------------------------------------------------------------------- what is kept


def transposed(net):
    """The weights that the loop reads."""
    (found,) = [blob for blob in laid_out(net) if "transposed" in blob]
    return found


def planted():
    """An LSTM that has run, its results, their values, and other numbers in what is kept of its weights."""
    model, blobs = kept()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    right = support.values(blobs)
    change(transposed(model.net), 5)
    return model, blobs, right


def test_a_sequence_that_is_filled_as_weights_are():
    """What is made of it has a name of its own, which the links of the loop have to say as well."""
    hiddens = []
    for rules in ([], ["sequence_bias", RULE]):
        model = ModelHelper("model")
        model.param_init_net.GaussianFill([], "x", shape=[9, 4, 6])
        hidden, *_ = LSTM(model, "x", None, None, 6, support.D, "layer", forward_only=True)
        if not hiddens:
            workspace.RunNetOnce(model.param_init_net)
        report = optimize(model, rules, even_if_slower=True)
        assert all(report.counts.values()), report
        workspace.CreateNet(model.net)
        hiddens.append([])
        for seed in range(3):
            change("x", seed)
            workspace.RunNet(model.net)
            hiddens[-1].append(workspace.FetchBlob(hidden))
    support.assert_same(*((values, {}) for values in hiddens))


def test_nothing_is_made_anew_of_the_same_weights():
    model, blobs, right = planted()
    workspace.RunNet(model.net)
    assert support.difference(workspace.FetchBlob(blobs[0]), right[0][0]) > support.TOLERANCE
    # What has been planted is gone once they change, and stays so when they change back.
    weights = workspace.FetchBlob(WEIGHTS)
    workspace.FeedBlob(WEIGHTS, 2 * weights)
    workspace.RunNet(model.net)
    workspace.FeedBlob(WEIGHTS, weights)
    workspace.RunNet(model.net)
    support.assert_same(support.values(blobs), right)


def test_a_net_that_is_created_anew_makes_all_anew():
    model, blobs, right = planted()
    workspace.CreateNet(model.net, overwrite=True)
    workspace.RunNet(model.net)
    support.assert_same(support.values(blobs), right)


def test_nets_that_lay_out_the_same_weights_otherwise_do_not_meet():
    """As a model has them that is optimised for several sizes."""
    models = []
    for number, rules in enumerate([TRANSPOSED, support.NAMES, ["scaled_weights", "lstm_unit", *TRANSPOSED]]):
        model, blobs = kept(rules, name="model_{}".format(number))
        models.append(model)
        workspace.CreateNet(model.net)
    kept_by = [set(laid_out(model.net)) for model in models]
    assert all(one.isdisjoint(other) for one in kept_by for other in kept_by if one is not other)
    for seed in range(4):
        change(WEIGHTS, seed)
        for model in [*models, *models]:
            workspace.RunNet(model.net)
            support.assert_same(support.values(blobs), as_built(blobs))


def test_nets_whose_steps_differ_in_what_they_read_alone():
    """One of them has seen other weights meanwhile, and their steps are in the same workspaces."""
    nets = []
    for name, rules in (("one", TRANSPOSED), ("other", ["sequence_bias", *TRANSPOSED])):
        model, blobs = kept(rules, name=name)
        support.without_executor(model)
        workspace.CreateNet(model.net)
        nets.append(model.net)
    weights = [workspace.FetchBlob(WEIGHTS), -workspace.FetchBlob(WEIGHTS)]
    for net, which in ((0, 0), (1, 0), (0, 1), (1, 0), (0, 0), (1, 1), (0, 0)):
        workspace.FeedBlob(WEIGHTS, weights[which])
        workspace.RunNet(nets[net])
        support.assert_same(support.values(blobs), as_built(blobs))


def test_a_net_that_trains_the_weights_runs_beside():
    model, blobs = kept(support.NAMES)
    workspace.CreateNet(model.net)
    trained, _ = support.lstm(name="trained")
    optimize(trained, even_if_slower=True)
    for parameter in parameters():
        trained.net.WeightedSum([parameter, trained.net.ConstantFill([], shape=[1], value=1.0)], parameter)
        one, rate = (trained.net.ConstantFill([], shape=[1], value=value) for value in (1.0, -0.5))
        trained.net.WeightedSum([parameter, one, parameter + "_grad", rate], parameter)
    workspace.CreateNet(trained.net)
    for _ in range(3):
        workspace.RunNet(trained.net)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


@pytest.mark.parametrize("runs_before", [0, 2])
def test_a_run_that_fails_leaves_nothing_behind(runs_before):
    assert_failure_leaves_nothing(*kept(support.NAMES), runs_before)


def assert_failure_leaves_nothing(model, blobs, runs_before):
    """A run with weights that do not fit ends in an error, and the next ones are right."""
    workspace.CreateNet(model.net)
    if runs_before:
        workspace.RunNet(model.net, runs_before)
    weights = workspace.FetchBlob(WEIGHTS)
    workspace.FeedBlob(WEIGHTS, np.ones((4 * support.D, support.D + 3), dtype=np.float32))
    with pytest.raises(RuntimeError):
        workspace.RunNet(model.net)
    workspace.FeedBlob(WEIGHTS, weights)
    workspace.RunNet(model.net, 2)
    support.assert_same(support.values(blobs), as_built(blobs))


def test_weights_of_doubles_are_refused_in_later_runs_too():
    model, blobs = kept()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    workspace.FeedBlob(WEIGHTS, workspace.FetchBlob(WEIGHTS).astype(np.float64))
    with pytest.raises(RuntimeError):
        workspace.RunNet(model.net)


def test_a_planted_change_that_is_not_seen_shows():
    """The tests above would see weights that are laid out but once."""
    model, blobs = kept()
    for operator in model.net.Proto().op:
        if operator.type == "If" and not laid_out_when_changed(operator):
            never = support.argument(operator, "else_net").n
            del never.op[:]
            is_changed = operator.output[0]
            never.op.extend(
                [core.CreateOperator("ConstantFill", [], [is_changed], shape=[1], value=False, dtype=5)],
            )
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    support.assert_same(support.values(blobs), as_built(blobs))
    change(WEIGHTS, 7)
    workspace.RunNet(model.net)
    assert support.difference(workspace.FetchBlob(blobs[0]), as_built(blobs)[0][0]) > support.TOLERANCE


# ----------------------------------------------------------------------------------------------- what others see of it


def test_it_is_done_at_once_and_said():
    model, _ = support.lstm(gradients=False, forward_only=True)
    inputs, outputs = list(model.net.Proto().external_input), list(model.net.Proto().external_output)
    optimised = support.Optimised(TRANSPOSED)
    optimised(model)
    assert list(model.net.Proto().external_input) == inputs
    assert list(model.net.Proto().external_output) == outputs
    assert optimised.report.counts == {"transposed_weights": 1, RULE: 1}


def test_its_results_have_known_sizes():
    model, _ = kept(["scaled_weights", "lstm_unit", *TRANSPOSED])
    (weights,) = [blob for blob in laid_out(model.net) if blob.startswith(WEIGHTS) and "seen" not in blob]
    found = find_sizes(
        model.net.Proto(), None, {parameter: workspace.FetchBlob(parameter).shape for parameter in parameters()}
    )
    assert found.shape(weights) == (support.D, 4 * support.D)


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_predictor_needs_the_weights_alone(cut):
    model, blobs = support.lstm(gradients=False, forward_only=True)
    if cut == "after":
        optimize(model, even_if_slower=True)
    net, found = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    if cut == "before":
        optimize(net, even_if_slower=True)
    assert laid_out(net)
    assert sorted(map(str, found)) == sorted(parameters())
    workspace.CreateNet(net)
    for seed in range(3):
        change(WEIGHTS, seed)
        workspace.RunNet(net, 2)
        support.assert_same(support.values(blobs[:1]), as_built(blobs[:1]))


@pytest.mark.parametrize("way", ["convolution", "inner product"])
def test_steps_whose_products_are_onednns_can_be_timed(monkeypatch, way):
    force(monkeypatch, way)
    model, _ = kept(["packed_products", RULE])
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 2)
    assert "step 0" in str(caffe2_recurrent.step_times(model.net, runs=1))


# ------------------------------------------------------------------------------------------------------------ refusals


def reason(model, rules=TRANSPOSED, **options):
    report = optimize(model, rules, dry_run=True, **{"even_if_slower": True, **options})
    (found,) = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    return found


def forward(**options):
    return support.lstm(gradients=False, forward_only=True, **options)[0]


def test_a_loop_that_is_trained():
    assert reason(support.lstm()[0]) == "it is trained, and its weights change from run to run"


def test_a_loop_that_may_be_trained():
    model, _ = support.lstm(gradients=False)
    assert reason(model) == "its step has a backward step: it may be trained"


def test_a_net_that_frees_its_blobs():
    model = forward()
    model.net.Proto().type = "simple_refcount"
    assert reason(model) == "a net of this type lets go of blobs that nothing reads any more"


@pytest.mark.parametrize("kind", ["ATen", "AccumulateHistogram", "IsMemberOf", "L1Distance"])
def test_a_caffe2_without_an_operator(monkeypatch, kind):
    is_operator = core.IsOperator
    monkeypatch.setattr(kept_results.core, "IsOperator", lambda name: name != kind and is_operator(name))
    assert reason(forward()) == "this Caffe2 has no '{}'".format(kind)


def test_weights_that_the_net_changes():
    model = forward()
    model.net.Scale([WEIGHTS], WEIGHTS, scale=1.0)
    assert reason(model) == "nothing in front of it is known to depend on weights alone"


def test_a_blob_with_a_size_for_each_sequence():
    """Of parameters it is known that they are none."""
    support.lstm(gradients=False, forward_only=True)
    batch = 4 * support.D
    support.feed(batch=batch)
    model = forward()
    support.feed(batch=batch)
    proto = support.as_read_from_a_file(model.net)
    assert reason(proto) == "nothing in front of it is known to depend on weights alone"
    assert optimize(model, TRANSPOSED, dry_run=True, even_if_slower=True).counts[RULE] == 1


@pytest.fixture
def place():
    """The rule, and a loop with something in front of it for the rule."""
    model = forward()
    (loop,) = read_loops(model.net.Proto()).values()
    loop.add_before("Transpose", [WEIGHTS], "transposed")
    trial.forget()
    yield support.rule(RULE), loop, find_sizes(model.net.Proto(), model.param_init_net.Proto(), {})
    trial.forget()


@pytest.mark.parametrize("times, is_better", [((1.0, 1.0), False), ((1.0, 0.95), False), ((1.0, 0.5), True)])
def test_a_trial_decides(monkeypatch, place, times, is_better):
    rule, loop, sizes = place
    found = dict(zip((IN_EACH_RUN, WHEN_CHANGED), (Seconds(0.0, time) for time in times)))
    monkeypatch.setattr(trial, "in_turn", lambda subjects: {name: found[name] for name in subjects})
    (site,) = rule.sites(loop)
    assert rule.refusal(loop, site, sizes) is None
    expected = "to see whether weights have changed takes as long as what is made of weights"
    assert rule.loss(loop, site, sizes) == (None if is_better else expected)


def test_what_is_made_of_weights_of_one_size_is_tried_once(monkeypatch, place):
    """In whatever net, and whatever the weights are called."""
    tried = []

    def in_turn(subjects):
        tried.append({name: subject() for name, subject in subjects.items()})
        return dict(zip(subjects, (Seconds(0.0, 2.0), Seconds(0.0, 1.0))))

    monkeypatch.setattr(trial, "in_turn", in_turn)

    def seconds(weights, shape, may_keep=Keeping.WEIGHTS):
        made = [core.CreateOperator("Transpose", [weights], [weights + "_made"])]
        return unchanged_weights.seconds(made, [weights], Sizes({weights: shape}, [weights]), may_keep)

    found = seconds("a", (3, 4))
    assert seconds("b/c", (3, 4)) == found == {IN_EACH_RUN: (0.0, 2.0), WHEN_CHANGED: (0.0, 1.0)}
    assert len(tried) == 1
    for subject in tried[0].values():
        with prepared(subject) as timer:
            assert timer(1.0).step > 0
    seconds("a", (4, 3))
    seconds("a", (3, 4), Keeping.WEIGHTS | Keeping.FOR_GOOD)
    assert len(tried) == 3


def test_what_cannot_be_tried(monkeypatch, place):
    rule, loop, sizes = place

    def fail(subjects):
        raise RuntimeError

    monkeypatch.setattr(trial, "in_turn", fail)
    (site,) = rule.sites(loop)
    assert rule.loss(loop, site, sizes) == "what is made of weights cannot be tried with arbitrary numbers"


def test_what_something_else_changes_in_its_place(place):
    """Made once, it would be changed in each run."""
    rule, loop, sizes = place
    (transposed,) = loop.before[0].output
    loop.before.append(core.CreateOperator("Sum", [transposed, "x"], [transposed]))
    (site,) = rule.sites(loop)
    assert rule.refusal(loop, site, sizes) == "nothing in front of it is known to depend on weights alone"


@pytest.mark.parametrize("others, comparing, is_taken", [(False, 0.0, True), (False, 9.0, False), (True, 9.0, True)])
def test_to_compare_weights_is_a_price_of_transposing_them(monkeypatch, others, comparing, is_taken):
    """Unless others have them compared already; its share of nine steps is as much as there is to gain by one."""
    monkeypatch.setattr(step_products, "tried", lambda size, way: Seconds(0.0, 1.0 if way == "FCTransposed" else 2.0))
    monkeypatch.setattr(unchanged_weights, "seconds", lambda *_: {WHEN_CHANGED: Seconds(0.0, comparing)})
    model = forward()
    (loop,) = read_loops(model.net.Proto()).values()
    loop.may_keep = Keeping.WEIGHTS
    if others:
        loop.add_before("Scale", [WEIGHTS], "scaled", scale=2.0)
    rule, sizes = support.rule("transposed_weights"), find_sizes(model.net.Proto(), model.param_init_net.Proto(), {})
    (site,) = rule.sites(loop)
    expected = "for [3, 4] x [4, 16] it is not faster"
    assert rule.loss(loop, site, sizes) == (None if is_taken else expected)
