"""The rule `one_workspace`: steps without a backward step of their own, in one workspace."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import rewriting_support as support
import step_memory
import step_nets
from caffe2_recurrent import describe, optimize, recurrent_net, retrieve_step_blobs, set_rnn_executor_config
from caffe2_recurrent.executor import switch_off
from caffe2_recurrent.rewriting.steps import own_state
from cells import CELLS
from test_random_step_nets import seeds
from test_rewriting_random import assert_step_net_right, chosen_rules

RULE, WORKSPACES = "one_workspace", "num_workspaces"
# Those that make the backward pass a loop, where gradients of parameters are out of it.
OF_TWO = ["parameter_gradients", "backward_loop", RULE]
FORWARD = {"gradients": False, "forward_only": True}
EVERY_CELL = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
EVERY_STEP_NET = pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
backward_loops = pytest.mark.usefixtures("backward_loops")


def numbers(net):
    """In how many workspaces the steps of each loop take turns, where its operator says so."""
    loops = [operator for operator in net.Proto().op if operator.type == support.LOOP]
    return [given.i for operator in loops for given in operator.arg if given.name == WORKSPACES]


def forward(**options):
    return support.lstm(**{**FORWARD, **options})


# ------------------------------------------------------------------------------------------------ values and gradients


def forward_only(cell):
    return cell.but(options={**cell.options, "forward_only": True})


@EVERY_CELL
def test_cells_that_go_forward_only(cell):
    rewrite = support.Optimised([RULE])
    outputs, _, model = forward_only(cell).run(False, lambda model: rewrite(support.without_executor(model)))
    for found, expected in zip(outputs, cell.reference()):
        comparing.assert_close(found, expected, "output")
    assert rewrite.report.counts == {RULE: 1} and numbers(model.net) == [1]
    assert len(step_memory.owned_bytes(model.net)) == 1


@EVERY_CELL
@backward_loops
def test_cells_whose_backward_pass_is_a_loop_of_its_own(cell):
    loops, in_one, _ = support.fired_on(cell, OF_TWO, "backward_loop", RULE)
    assert loops == in_one and bool(loops) == (cell.name in ("lstm", "milstm", "gru_linear"))


@EVERY_STEP_NET
@backward_loops
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make):
    with support.optimising(OF_TWO):
        comparing.assert_right(recurrent_net, make(), executor=False)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), chosen_rules)
@backward_loops
def test_random_step_nets(seed, sequences, rules):
    assert_step_net_right(seed, sequences, False, {*(rules or ()), *OF_TWO})


@pytest.mark.parametrize("options", [FORWARD, {}], ids=["forward only", "trained"])
@backward_loops
def test_runs_of_other_sizes(options):
    def change(model):
        support.without_executor(model)
        report = optimize(model, even_if_slower=True)
        assert report.counts[RULE] == 1
        assert numbers(model.net) == ([1] if options else [1, 1])

    found = support.runs_of_other_sizes(change, **options)
    support.assert_same(found, support.runs_of_other_sizes(lambda model: None, **options))


def test_a_net_as_it_was_built_runs_beside_in_the_same_step_workspaces():
    """It takes turns in two, of which one has been left by the net that has one."""
    expected = support.run(*forward())
    workspace.ResetWorkspace()
    model, blobs = forward()
    optimize(support.without_executor(model), [RULE])
    other, _ = forward(name="other")
    support.without_executor(other)
    for net in (model.net, other.net):
        workspace.CreateNet(net)
    for net in (model.net, other.net, model.net, other.net):
        workspace.RunNet(net)
        support.assert_same(support.values(blobs), expected)


# ------------------------------------------------------------------------------------------------------ where it is not


def test_steps_with_a_backward_step_have_a_workspace_each():
    model, _ = support.lstm()
    reasons = support.reasons(support.without_executor(model).net, RULE)
    assert reasons == ["each of its steps has a workspace of its own"]


def test_the_executor_keeps_its_workspaces():
    model, _ = forward()
    assert support.reasons(model.net, RULE) == ["the RNN executor may run several of its steps at once"]


@pytest.mark.parametrize("kind", ["dag", "async_scheduling"])
def test_steps_that_may_run_side_by_side_keep_theirs(kind):
    model, _ = forward()
    support.step(support.without_executor(model).net).type = kind
    reason = "its steps are nets of type '{}', which may not be done when the next one begins".format(kind)
    assert support.reasons(model.net, RULE) == [reason]


@pytest.mark.parametrize("number", [1, 3])
def test_a_number_that_somebody_has_given_stays(number):
    model, blobs = support.lstm(**FORWARD)
    expected = support.run(model, blobs)
    support.without_executor(model)
    support.operator(model.net).arg.append(core.utils.MakeArgument(WORKSPACES, number))
    report = optimize(model, even_if_slower=True)
    assert report.counts.get(RULE, 0) == 0 and report.total > 0 and numbers(model.net) == [number]
    support.assert_same(support.run(model, blobs), expected)


def test_a_loop_of_one_workspace_has_no_setting_of_the_executor():
    """With it steps would run side by side."""
    model, blobs = forward()
    expected = support.run(model, blobs)
    optimize(support.without_executor(model), [RULE])
    assert "enable_rnn_executor" not in [given.name for given in support.operator(model.net).arg]
    set_rnn_executor_config(support.operator(model.net), num_threads=4)
    support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------------ who looks there


def test_one_step_is_enough_to_look_at_its_blobs():
    model, _ = forward()
    optimize(support.without_executor(model), [RULE])
    support.feed(steps=1)
    workspace.RunNetOnce(model.net)
    names = [name.decode() for name in retrieve_step_blobs(model.net)]
    assert [name for name in names if name.endswith("gates_t0")] == ["rnn_layer/gates_t0"]


def test_describe_says_so():
    model, _ = forward()
    workspace.RunNetOnce(support.without_executor(model).net)
    assert "  the steps take turns in 2 workspaces; each holds\n" in str(describe(model.net))
    optimize(model, [RULE])
    text = str(describe(model.net))
    assert "  the steps share one workspace, which holds\n" in text
    # The four bytes of the step's number, and the gates.
    gates = 4 * 4 * support.N * support.D
    assert "together {} bytes a step, {} bytes in {} steps".format(4 + gates, 4 + gates, support.T) in text


# ------------------------------------------------------------------------------ operators with a state of their own


SHAPE = [1, step_nets.N, step_nets.D]
OF_OPERATOR, OF_NET = "the operator", "the step net"


def noisy(seeded, kind="GaussianFill"):
    """A net with a loop that adds noise to its state in each step, and its output; who has a seed, if anybody has."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    device = core.DeviceOption(0, random_seed=7)
    options = {"device_option": device} if seeded == OF_OPERATOR else {}
    noise = getattr(make.cell, kind)([], "noise", shape=SHAPE, **options)
    make.link(h, make.cell.Sum([make.cell.Tanh(make.cell.Sum([x, h], "both"), "bounded"), noise], "h_t"))
    if seeded == OF_NET:
        make.cell.Proto().device_option.CopyFrom(device)
    return built(make)


def counting():
    """One whose step counts its own runs, with what it adds."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    histogram = {"lower_bound": 0.0, "upper_bound": 1.0, "num_buckets": 1}
    _, runs = make.cell.AccumulateHistogram([x], ["now", "runs"], **histogram)
    total = make.cell.SumElements([make.cell.Cast([runs], "as_floats", to=core.DataType.FLOAT)], "total")
    make.link(h, make.cell.Add([make.cell.Sum([x, h], "both"), total], "h_t", broadcast=1))
    return built(make)


def built(make):
    step_net = make.done(forward_only=True)
    net, outputs = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    switch_off(support.operator(net))
    return net, str(outputs[0])


def ran(net, blob):
    workspace.RunNetOnce(net)
    return workspace.FetchBlob(blob)


def differs(found, expected):
    return bool(np.abs(found - expected).max() > 0.1)


SEEDED = [
    ({"seeded": OF_OPERATOR}, "its step may have GaussianFill draw numbers from a seed of its own"),
    ({"seeded": OF_NET}, "its step may have GaussianFill draw numbers from a seed of its own"),
    ({"seeded": OF_NET, "kind": "UniformFill"}, "its step may have UniformFill draw numbers from a seed of its own"),
]


@pytest.mark.parametrize("options, reason", SEEDED, ids=str)
@pytest.mark.usefixtures("unrolled_steps")
def test_a_seed_of_a_step_gives_the_same_numbers_as_before(monkeypatch, options, reason):
    expected = ran(*noisy(**options))
    workspace.ResetWorkspace()
    net, blob = noisy(**options)
    report = optimize(net, even_if_slower=True)
    (refusal,) = report.refusals
    assert report.total == 0 and (refusal.rule, refusal.reason) == (
        "all",
        reason + ", and what that gives depends on how many operators the steps have",
    )
    np.testing.assert_array_equal(ran(net, blob), expected)
    # Otherwise it would not.
    monkeypatch.setattr(own_state, "found", lambda loop: None)
    for rules in ([RULE], ["unrolled_steps"]):
        workspace.ResetWorkspace()
        net, blob = noisy(**options)
        assert optimize(net, rules, even_if_slower=True).total == 1
        assert differs(ran(net, blob), expected)


@pytest.mark.usefixtures("unrolled_steps")
def test_an_operator_that_counts_its_runs(monkeypatch):
    expected = ran(*counting())
    workspace.ResetWorkspace()
    net, blob = counting()
    report = optimize(net, even_if_slower=True)
    reason = "its step has AccumulateHistogram count its own runs, and what that gives depends on how many operators"
    assert report.total == 0 and [refusal.reason for refusal in report.refusals] == [reason + " the steps have"]
    np.testing.assert_array_equal(ran(net, blob), expected)
    monkeypatch.setattr(own_state, "found", lambda loop: None)
    workspace.ResetWorkspace()
    net, blob = counting()
    assert optimize(net, [RULE], even_if_slower=True).total == 1
    assert differs(ran(net, blob), expected)


def test_without_a_seed_nothing_is_promised():
    net, blob = noisy(seeded=None)
    assert optimize(net, [RULE], even_if_slower=True).counts == {RULE: 1}
    first = ran(net, blob)
    assert differs(ran(net, blob), first)


@EVERY_CELL
@backward_loops
def test_a_seed_for_all_operators_of_a_model_changes_nothing_where_none_draws(cell):
    with core.DeviceScope(core.DeviceOption(0, random_seed=7)):
        fired, reasons = support.fired_on(cell, None, RULE)
    assert not [reason for _, reason in reasons if "seed" in reason]
    assert fired or cell.name.startswith("attention")
