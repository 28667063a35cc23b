"""The rule `chained_steps`: steps that are written out as one chain, which the thread that calls the net runs."""

import re
import threading

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import rewriting_support as support
from caffe2_recurrent import check_inputs, describe, optimize, step_times
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import LINK
from caffe2_recurrent.rewriting import calling_thread, chains, turning
from caffe2_recurrent.rewriting.rules import executor_threads, unrolled_steps
from caffe2_recurrent.rewriting.rules.unrolled_steps import UnrolledSteps
from caffe2_recurrent.rewriting.trials.timing import Seconds
from caffe2_recurrent.step_workspaces import steps_of_last_run
from cells import CELLS
from test_random_step_nets import seeds
from test_rewriting_random import (
    assert_drawn_cell_right,
    assert_found_in_random_step_nets,
    assert_step_net_right,
    chosen_rules,
)
from test_rewriting_unrolled_steps import ALONE, GRADIENTS, MOST, branches
from workspace_contents import exact

pytestmark = pytest.mark.usefixtures("unrolled_steps", "chained_steps")

RULE = "chained_steps"
FLAG = calling_thread.FLAG
NO_FLAG = FLAG[:-1] + "0"
# But the one that has products of steps by oneDNN, whose operators are not the CPU's, and the one that has the RNN
# executor stay otherwise.
RULES = [name for name in MOST if name not in ("packed_products", "executor_threads")]
WITHOUT = [name for name in RULES if name != RULE]


@pytest.fixture(autouse=True)
def flag():
    """What the flag is in a test, unless that changes it; and what it is without this, behind it."""
    workspace.GlobalInit(["tests", FLAG])
    yield
    workspace.GlobalInit(["tests", NO_FLAG])


def chained(rules=RULES, **options):
    """An LSTM whose steps are one chain, and what must stay what it is."""
    model, blobs = support.lstm(**options)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[RULE] == 1, report
    return model, blobs


# ------------------------------------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell):
    fired, reasons = support.fired_on(cell, RULES, RULE)
    assert fired or cell.name.startswith("attention"), reasons


def test_a_net_without_gradient_operators_is_done_at_once():
    """Its backward step fits the old step, and goes."""
    expected = support.run(*support.lstm(gradients=False))
    workspace.ResetWorkspace()
    model, blobs = chained(gradients=False)
    support.assert_done(model.net, RULES)
    support.assert_same(support.run(model, blobs), expected)


@settings(max_examples=40)
@given(seeds, st.integers(1, 3), chosen_rules)
def test_random_step_nets(seed, sequences, rules):
    assert_step_net_right(seed, sequences, False, None if rules is None else {*rules, "unrolled_steps", RULE})


@settings(max_examples=20)
@given(st.data(), chosen_rules)
def test_random_sizes_lengths_options_and_rules_of_cells(data, rules):
    assert_drawn_cell_right(data, False, None if rules is None else {*rules, *ALONE, RULE})


def test_it_finds_something_to_do_in_random_step_nets():
    assert_found_in_random_step_nets(
        lambda lines: lines.counts[RULE] == lines.counts["unrolled_steps"] >= 7, [*ALONE, RULE], executor=False
    )


@GRADIENTS
def test_it_changes_no_bit_with_the_flag_or_without(gradients):
    def run(flag, rules):
        workspace.ResetWorkspace()
        model, blobs = support.lstm(gradients=gradients)
        optimize(model, rules, even_if_slower=True)
        workspace.GlobalInit(["tests", flag])
        workspace.CreateNet(model.net)
        for _ in range(3):
            workspace.RunNet(model.net)
        outputs, found = support.values(blobs)
        return [exact(output) for output in outputs], {name: exact(gradient) for name, gradient in found.items()}

    expected = run(FLAG, WITHOUT)
    for flag in (FLAG, NO_FLAG):
        assert run(flag, RULES) == expected


@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_nets_of_every_kind(kind):
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = chained()
    model.net.Proto().type = kind
    workspace.CreateNet(model.net)
    for _ in range(20):
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), expected)


@pytest.mark.parametrize("flag", [FLAG, NO_FLAG])
def test_what_fails_in_a_step_is_said_as_before(flag):
    model, _ = chained(gradients=False)
    workspace.GlobalInit(["tests", flag])
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    workspace.FeedBlob("layer/gates_t_w", np.ones((4 * support.D, support.D + 1), np.float32))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Error from operator"):
            workspace.RunNet(model.net)
    workspace.FeedBlob("layer/gates_t_w", np.ones((4 * support.D, support.D), np.float32))
    assert workspace.RunNet(model.net)


# -------------------------------------------------------------------------------------------- steps that stay in a loop

LOOPS = [name for name in support.NAMES if name not in ("unrolled_steps", "executor_threads")]
TRAINED = pytest.mark.parametrize("options", [{}, {"lengths": True}, {"memory_optimization": True}], ids=str)
# Of oneDNN some keep filters.
ALL_TRIALS = pytest.mark.parametrize("packed", [True, False], ids=["oneDNN", "MKL"])


def loops_of(net):
    return [operator for operator in net.Proto().op if operator.type == support.LOOP]


def steps_of(net):
    """The nets of the steps of all loops: each the one operator that runs a chain, or what was there."""
    return [support.argument(operator, "step_net").n for operator in loops_of(net)]


def are_chains(net):
    """The operators of each, with those of links: of a forward loop the engine makes none."""
    found = []
    for loop in loops_of(net):
        (operator,) = support.argument(loop, "step_net").n.op
        (given,) = operator.arg
        assert (operator.type, given.name, given.n.type, given.n.num_workers) == ("If", "then_net", "dag", 1)
        for before, behind in zip(given.n.op, given.n.op[1:]):
            assert behind.control_input[-1] == before.output[0]
        assert all(operator.device_option.device_type == caffe2_pb2.CPU for operator in given.n.op)
        if not loop.is_gradient_op:
            links = [operator.output[0] for operator in given.n.op if operator.type == LINK]
            assert len(links) == len(set(links)) >= 3 and not support.argument(loop, "link_internal").strings
        found.append([operator.type for operator in given.n.op])
    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_loops_of_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, backward_loops):
    fired, reasons = support.fired_on(cell, LOOPS, RULE)
    assert fired or cell.name.startswith("attention"), reasons


@pytest.mark.usefixtures("backward_loops")
@settings(max_examples=40)
@given(seeds, st.integers(1, 3), chosen_rules)
def test_loops_of_random_step_nets(seed, sequences, rules):
    assert_step_net_right(seed, sequences, False, set(LOOPS) if rules is None else {*rules, RULE, "backward_loop"})


@ALL_TRIALS
@TRAINED
@GRADIENTS
def test_an_lstm_in_a_loop(options, gradients, packed, backward_loops):
    rules = [name for name in LOOPS if packed or name != "packed_products"]
    expected = support.run(*support.lstm(gradients=gradients, **options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(gradients=gradients, forward_only=not gradients, **options)
    assert optimize(support.without_executor(model), rules, even_if_slower=True).counts[RULE] == 1 + gradients
    found = are_chains(model.net)
    assert len(found) == 1 + gradients
    assert any("If" in kinds for kinds in found) == packed
    for flag in (FLAG, NO_FLAG):
        workspace.GlobalInit(["tests", flag])
        workspace.CreateNet(model.net, overwrite=True)
        for _ in range(3):
            workspace.RunNet(model.net)
            support.assert_same(support.values(blobs), expected)


@ALL_TRIALS
@pytest.mark.parametrize("flag", [FLAG, NO_FLAG])
def test_what_fails_in_a_step_of_a_loop_is_said_as_before(flag, packed):
    model = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    optimize(model, [RULE, *["packed_products"] * packed], even_if_slower=True)
    assert len(are_chains(model.net)) == 1
    workspace.GlobalInit(["tests", flag])
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    for blob in ("h0", "c0"):
        workspace.FeedBlob(blob, np.ones((support.N, support.D + 1), np.float32))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="could not create a descriptor" if packed else "Error from operator"):
            workspace.RunNet(model.net)
    support.feed()
    assert workspace.RunNet(model.net)


@TRAINED
@GRADIENTS
def test_nobody_turns_the_executor_on_again(options, gradients, backward_loops):
    """It would not know that a step waits for the one before."""
    expected = support.run(*support.lstm(gradients=gradients, **options))
    workspace.ResetWorkspace()
    model, blobs = support.lstm(gradients=gradients, forward_only=not gradients, **options)
    optimize(
        support.without_executor(model),
        [RULE, *["parameter_gradients", "backward_loop"] * gradients],
        even_if_slower=True,
    )
    assert len(are_chains(model.net)) == 1 + gradients
    for operator in model.net.Proto().op:
        for setting in operator.arg:
            if setting.name == "enable_rnn_executor":
                setting.i = 1
    support.assert_same(support.run(model, blobs), expected)


def test_an_error_in_a_chain_is_found(monkeypatch):
    """The last operator of a step reads one of its inputs twice."""
    expected = support.run(*support.lstm(gradients=False))
    workspace.ResetWorkspace()

    def make_chain(net):
        net.op[-1].input[0] = net.op[-1].input[1]

    monkeypatch.setattr(chains, "make_chain", make_chain)
    model, blobs = support.lstm(gradients=False, forward_only=True)
    rules = [name for name in LOOPS if name != "packed_products"]
    optimize(support.without_executor(model), rules, even_if_slower=True, trials=False)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


def test_one_blob_is_true_for_both_loops(backward_loops):
    model = support.without_executor(support.lstm()[0])
    optimize(model, LOOPS, even_if_slower=True)
    conditions = {step.op[0].input[0] for step in steps_of(model.net)}
    (condition,) = conditions
    readers = [operator for operator in model.net.Proto().op if condition in operator.input]
    assert [operator.type for operator in readers] == [support.LOOP] * 2


def test_a_loop_that_is_read_has_its_links():
    model = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    (expected,) = read_loops(model.net.Proto()).values()
    assert optimize(model, [RULE], even_if_slower=True).total == 1
    (found,) = read_loops(model.net.Proto()).values()
    assert found.links == expected.links and len(found.links) == 5
    assert [operator.type for operator in found.operators] == [operator.type for operator in expected.operators]
    assert (found.references, found.written) == (expected.references, expected.written)


def test_a_second_time_it_says_what_runs_the_steps():
    model = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    assert optimize(model, [RULE], even_if_slower=True).total == 1
    assert optimize(model, [RULE], even_if_slower=True).refusals[0].reason == (
        "an earlier `optimize` has made the operators of its steps a chain"
    )


# ------------------------------------------------------------------------------------------------------------ the chain


def asked(names, found):
    """A net of operators that know nothing of each other and say in which thread they run."""

    def answer(name):
        def ask(inputs, outputs):
            found.append((name, threading.get_ident()))
            outputs[0].feed(np.zeros(1, np.float32))

        return ask

    return caffe2_pb2.NetDef(name="asked", op=[core.CreatePythonOperator(answer(name), [], [name]) for name in names])


@pytest.mark.parametrize("flag", [FLAG, NO_FLAG])
def test_operators_of_a_chain_run_in_their_order(flag):
    workspace.GlobalInit(["tests", flag])
    names, found = ["blob_{}".format(index) for index in range(20)], []
    net = asked(names, found)
    calling_thread.make_chain(net)
    for _ in range(3):
        del found[:]
        workspace.RunNetOnce(net)
        assert [name for name, _ in found] == names
        assert ({thread for _, thread in found} == {threading.get_ident()}) == (flag == FLAG)


def test_without_the_chain_they_do_not():
    """What the test before this one would find."""
    names, found = ["blob_{}".format(index) for index in range(20)], []
    net = asked(names, found)
    net.type = calling_thread.CHAIN
    workspace.RunNetOnce(net)
    assert sorted(name for name, _ in found) == sorted(names)
    assert [name for name, _ in found] != names


@GRADIENTS
def test_each_operator_of_the_steps_waits_for_the_one_before(gradients):
    model, _ = chained(gradients=gradients)
    nets = branches(model.net)
    assert len(nets) == 1 + gradients
    for steps, otherwise in nets:
        assert (steps.type, steps.num_workers, otherwise.type) == ("dag", 1, "simple")
        for before, operator in zip(steps.op, steps.op[1:]):
            assert operator.control_input[-1] == before.output[0]


@pytest.mark.parametrize("flag, runs", [(FLAG, True), (NO_FLAG, False), (FLAG, True)])
def test_whose_thread_it_is(flag, runs):
    workspace.FeedBlob("mine", np.zeros(1, np.float32))
    before = workspace.CurrentWorkspace(), workspace.Blobs()
    workspace.GlobalInit(["tests", flag])
    for _ in range(2):
        assert calling_thread.runs_chains() == runs
    assert (workspace.CurrentWorkspace(), workspace.Blobs()) == before


def test_a_caffe2_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(core, "IsOperator", lambda kind: kind != "Python")
    assert not calling_thread.runs_chains()


# --------------------------------------------------------------------------------------------------------- what it says


def reasons(**options):
    report = optimize(support.lstm()[0], RULES, dry_run=True, **options)
    return [refusal.reason for refusal in report.refusals if refusal.rule == RULE]


def test_it_pays_with_the_flag(monkeypatch):
    monkeypatch.setattr(UnrolledSteps, "loss", lambda *_: None)
    assert reasons() == []
    workspace.GlobalInit(["tests", NO_FLAG])
    assert reasons(even_if_slower=True) == []
    assert reasons() == [
        "the net would have a thread of its own; before it is optimised and created, pass "
        "--caffe2_net_async_run_root_tasks_inline=1 to workspace.GlobalInit"
    ]


def loop_reasons(rules=(RULE,), model=None, **options):
    model = model or support.lstm(gradients=False, forward_only=True)[0]
    report = optimize(model, list(rules), dry_run=True, **options)
    return [(refusal.what, refusal.reason) for refusal in report.refusals if refusal.rule == RULE]


def test_loops_that_are_left_alone(backward_loops, monkeypatch):
    model, _ = support.lstm()
    assert loop_reasons(model=support.without_executor(model), even_if_slower=True) == [
        ("steps", "each of its steps has a workspace of its own, and would have such a net")
    ]
    model, _ = support.lstm()
    assert loop_reasons(model=model, even_if_slower=True) == [
        ("steps", "the RNN executor runs its steps, and prepares no lines of log")
    ]
    without = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    assert loop_reasons(model=without) == []
    workspace.GlobalInit(["tests", NO_FLAG])
    ((_, reason),) = loop_reasons(model=without)
    assert reason.endswith("pass {} to workspace.GlobalInit".format(FLAG))


@pytest.mark.parametrize("flag", [FLAG, NO_FLAG])
def test_few_operators_stay_as_they_are(flag, monkeypatch):
    """An FC, a Sum and an LSTMUnit, and five links."""
    workspace.GlobalInit(["tests", flag])
    model = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    monkeypatch.setattr(chains, "FEWEST", 9)
    assert loop_reasons(model=model) == [("steps", "it has too few operators")]
    monkeypatch.setattr(chains, "FEWEST", 8)
    assert loop_reasons(model=model) != [("steps", "it has too few operators")]


def refused(operator):
    """What the rule says of an LSTM that is written out and whose step has an operator more."""
    model, _ = support.lstm(gradients=False)
    (loop,) = read_loops(model.net.Proto()).values()
    sizes = Sizes({"layer/i2h": (support.T, support.N, 16), "h0": (1, support.N, 4), "c0": (1, support.N, 4)})
    written_out = support.rule("unrolled_steps")
    (site,) = written_out.sites(loop)
    written_out.rewrite(loop, site, sizes)
    loop.operators.append(operator)
    (site,) = support.rule(RULE).sites(loop)
    return support.rule(RULE).refusal(loop, site, sizes)


def test_what_is_refused():
    there = core.DeviceOption(caffe2_pb2.IDEEP)
    assert refused(core.CreateOperator("Copy", ["layer/hidden_t"], ["copy"])) is None
    assert refused(core.CreateOperator("Relu", ["a"], ["b"], device_option=there)) == (
        "'Relu' is not the CPU's, and its thread would be another one"
    )
    assert refused(core.CreateOperator("Print", ["layer/hidden_t"], [])) == (
        "the operator behind 'Print' could not wait for it, as it has no outputs"
    )


# ------------------------------------------------------------------------------------------------- looking at the steps

IN_A_CHAIN = "    the operators of a step in a chain, each waiting for the one before\n"


def looked_at(gradients, packed, rules):
    """What `describe` and `step_times` have to say of an LSTM that has run."""
    workspace.ResetWorkspace()
    model, _ = support.lstm(gradients=gradients, forward_only=not gradients)
    unwanted = set() if packed else {"packed_products"}
    chosen = [name for name in rules if name not in unwanted]
    report = optimize(support.without_executor(model), chosen, even_if_slower=True, trials=False)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    # But for the names of nets, and what names have of the operators that they stand for.
    text = re.sub(r"_[0-9a-f]{8}\b|net '.*?'", "", str(describe(model.net)))
    times = [step_times(model.net, loop, runs=1) for loop in range(1 + gradients)]
    return report.counts.get(RULE, 0), text, times


@ALL_TRIALS
@GRADIENTS
def test_steps_look_as_they_do_without_the_chain(gradients, packed, backward_loops):
    chains_made, text, times = looked_at(gradients, packed, LOOPS)
    none_made, expected, times_expected = looked_at(gradients, packed, [name for name in LOOPS if name != RULE])
    assert (chains_made, none_made) == (1 + gradients, 0)
    assert text.count(IN_A_CHAIN) == 1 + gradients
    assert text.replace(IN_A_CHAIN, "") == expected

    def operators(found):
        return [[(time.step, time.position, time.type, time.outputs) for time in of.operators] for of in found]

    assert operators(times) == operators(times_expected)
    assert all(time.microseconds > 0 for of in times for time in of.operators)


@pytest.mark.parametrize("rule", [RULE, "unread_blobs"], ids=["a chain", "none"])
def test_inputs_are_checked_by_what_the_steps_do(rule):
    model = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    assert optimize(model, [rule], even_if_slower=True).total == (rule == RULE)
    check_inputs(model)
    workspace.FeedBlob("c0", np.zeros((support.N, support.D + 1), np.float32))
    with pytest.raises(ValueError, match="'c0' must be .*, as LSTMUnit reads it with 'layer/gates_t'"):
        check_inputs(model)


def test_the_number_of_steps_of_a_backward_pass(backward_loops):
    """Operators of the chain make its links, and nothing else tells: the sequence has been fed anew."""
    model, _ = support.lstm()
    optimize(support.without_executor(model), LOOPS, even_if_slower=True)
    assert len(are_chains(model.net)) == 2
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    support.feed(steps=2)
    loops = list(read_loops(model.net.Proto()).values())
    assert [(bool(loop.states), steps_of_last_run(loop)) for loop in loops] == [(True, support.T), (False, support.T)]


# ------------------------------------------------------------------------------------------------ trials of other rules


def are_in_chains(loop):
    return loop.unrolled.is_chain if loop.unrolled is not None else sorted(loop.chained)


@pytest.mark.parametrize(
    "chosen, ends", [([RULE], (["step_net"], True)), ([], ([], False))], ids=["with it", "without"]
)
def test_steps_are_compared_in_chains_where_they_will_be(chosen, ends, monkeypatch):
    """Written out and in a loop, which it is left then, as it is faster."""
    seen = []
    # Of few operators, too.
    monkeypatch.setattr(chains, "pays", lambda *_: True)

    def seconds(loop, candidates, sizes):
        seen.append(tuple(map(are_in_chains, candidates.values())))
        assert not loop.chained and loop.unrolled is None
        return {unrolled_steps.AS_IT_IS: Seconds(0.0, 1.0), unrolled_steps.UNROLLED: Seconds(0.0, 2.0)}

    monkeypatch.setattr(unrolled_steps.loop_trial, "seconds", seconds)
    model = support.without_executor(support.lstm(gradients=False, forward_only=True)[0])
    report = optimize(model, ["unrolled_steps", *chosen], shapes={"x": (9, support.N, support.DIM_IN)})
    assert seen[0] == ends
    assert report.counts["unrolled_steps"] == 0
    assert [len(step.op) == 1 for step in steps_of(model.net)] == [chosen != []]


@pytest.mark.parametrize("steps, without", [(9, True), (200, ["backward_step_net", "step_net"])], ids=["few", "many"])
def test_the_executor_is_compared_with_chains(steps, without, monkeypatch, backward_loops):
    monkeypatch.setattr(turning, "pays", lambda *_: False)
    monkeypatch.setattr(UnrolledSteps, "loss", lambda *_: None)
    monkeypatch.setattr(chains, "pays", lambda *_: True)
    seen = []

    def seconds(loop, candidates, sizes):
        seen.append({name: are_in_chains(candidate) for name, candidate in candidates.items()})
        return {executor_threads.ON: Seconds(0.0, 1.0), executor_threads.OFF: Seconds(0.0, 0.5)}

    monkeypatch.setattr(executor_threads.loop_trial, "seconds", seconds)
    rules = ["parameter_gradients", "executor_threads", "backward_loop", "unrolled_steps", RULE]
    report = optimize(support.lstm()[0], rules, shapes={"x": (steps, support.N, support.DIM_IN)})
    assert seen == [{executor_threads.ON: [], executor_threads.OFF: without}]
    assert report.counts[RULE] == (1 if steps == 9 else 2)
