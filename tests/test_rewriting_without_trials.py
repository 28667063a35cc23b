"""`optimize(trials=False)`: nothing is timed, and the same net comes out whatever the clock would say."""

import random

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import LSTM, MILSTM, install, optimize
from caffe2_recurrent.rewriting.trials import timing, trial
from cells import CELLS

SHAPES = {"x": (20, 16, 8), "h0": (1, 16, 64), "c0": (1, 16, 64)}
# What they decide is decided by the clock alone.
BY_TRIAL = {
    "transposed_weights",
    "activations",
    "gates_first",
    "joined_sequence",
    "packed_products",
    "products_over_steps",
    "gradient_products",
}


@pytest.fixture
def no_clock(monkeypatch):
    monkeypatch.setattr(trial, "prepared", lambda subject: pytest.fail("something is timed"))
    trial.forget()
    yield
    trial.forget()


@pytest.fixture
def any_clock(monkeypatch):
    """Each trial says something else."""
    draw = random.Random(5)
    monkeypatch.setattr(timing, "_time", lambda net, runs: draw.uniform(1e-6, 1e-3))
    yield
    trial.forget()


def built(builder=LSTM):
    workspace.ResetWorkspace()
    model = ModelHelper("model")
    outputs = builder(model, "x", None, ("h0", "c0"), 8, 64, "layer")
    model.AddGradientOperators([model.net.AveragedLoss(outputs[0], "loss")])
    workspace.RunNetOnce(model.param_init_net)
    return model


def optimised(net, **options):
    copy = caffe2_pb2.NetDef()
    copy.CopyFrom(net.Proto())
    optimize(copy, shapes=SHAPES, **options)
    return copy


@pytest.mark.parametrize("builder", [LSTM, MILSTM])
def test_what_only_a_trial_can_tell_stays(builder, no_clock):
    report = optimize(built(builder), shapes=SHAPES, trials=False)
    done = {rule for rule, count in report.counts.items() if count}
    assert not done & BY_TRIAL and {"parameter_gradients", "lstm_unit", "forward_links"} <= done, str(report)
    reasons = {refusal.reason for refusal in report.refusals if refusal.rule == "products_over_steps"}
    assert reasons == {"for [320, {0}] x [{0}, 256] oneDNN is not faster".format(inner) for inner in (8, 64)}


def test_the_report_says_so(no_clock):
    line = "nothing was tried out: what only a trial can tell counts as no faster"
    report = optimize(built(), shapes=SHAPES, trials=False)
    assert not report.trials and str(report).splitlines()[1] == line


def test_with_trials_the_report_does_not(any_clock):
    report = optimize(built(), shapes=SHAPES)
    assert report.trials and "tried out" not in str(report)


def test_the_same_net_comes_out(any_clock):
    net = built().net
    expected = optimised(net, trials=False)
    for _ in range(5):
        trial.forget()
        assert optimised(net, trials=False) == expected


def test_with_trials_another_net_comes_out(any_clock):
    """Else the test above would say nothing."""
    net, found = built().net, []
    for _ in range(5):
        trial.forget()
        found.append(optimised(net))
    assert any(other != found[0] for other in found)


def test_trials_before_and_after_make_no_difference(any_clock):
    net = built().net
    expected = optimised(net, trials=False)
    trial.forget()
    with_trials = optimised(net)
    assert optimised(net, trials=False) == expected
    assert optimised(net) == with_trials


@pytest.mark.parametrize("even_if_slower", [True, False], ids=["all", "faster"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, even_if_slower, no_clock):
    with support.optimising(trials=False, even_if_slower=even_if_slower) as lines:
        cell.assert_right(False)
    assert sum(lines.counts.values())


def test_install_passes_it_on(no_clock):
    model, _ = support.lstm()
    reports = []
    with install(optimize=True, trials=False, on_report=reports.append):
        workspace.RunNetOnce(model.net)
    assert [report.trials for report in reports] == [False]
