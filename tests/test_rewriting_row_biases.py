"""Rows as the biases of products, in the steps of one sequence that the rule `unrolled_steps` writes out."""

import collections
import random

import numpy as np
import pytest
from caffe2.python import core, workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import unrolled
from caffe2_recurrent.rewriting.products import row_biases
from cells import CELLS
from every_pair import every_pair
from test_rewriting_unrolled_steps import ALL, EVERY_STEP_NET, RULE, branches

pytestmark = pytest.mark.usefixtures("unrolled_steps")

# Until nothing is added to the gradient of a state in the step, it is no product.
BEFORE = ["parameter_gradients", "zero_gradients"]
ALONE = [*BEFORE, RULE]
RULES = pytest.mark.parametrize("rules", [ALONE, ["sequence_bias", *ALONE], ALL], ids=["alone", "bias", "all rules"])
GRADIENTS = pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
UNROLLED = [cell for cell in CELLS if not cell.inputs]
EVERY_CELL = pytest.mark.parametrize("cell", UNROLLED, ids=lambda cell: cell.name)


@pytest.fixture
def one_sequence(monkeypatch):
    """In the batch of all step nets."""
    monkeypatch.setattr(step_nets, "N", 1)


def lstm(rules=(), **options):
    """An LSTM for one sequence, rewritten, and what must stay what it is."""
    model, blobs = support.lstm(**options)
    support.feed(batch=1)
    if rules:
        report = optimize(model, rules, even_if_slower=True)
        assert report.counts[RULE] == 1, report
    return model, blobs


def kinds(model):
    """How many operators there are of each type, in what is written out of each pass."""
    return [collections.Counter(operator.type for operator in steps.op) for steps, _ in branches(model.net)]


# ------------------------------------------------------------------------------------------------ values and gradients


@EVERY_CELL
@RULES
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, rules):
    fired = 0
    for lengths in (None, [cell.steps - 1]):
        for rank in (2, 3):
            workspace.ResetWorkspace()
            with support.optimising(rules) as lines:
                cell.but(batch=1, lengths=lengths, rank=rank).assert_right(executor=False)
            fired += lines.counts[RULE]
    assert fired, lines.reasons


@every_pair
@EVERY_STEP_NET
@RULES
@pytest.mark.parametrize("forward_only", [True, False], ids=["forward", "training"])
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make, rules, forward_only, one_sequence):
    step_net = make()
    options = {"forward_only": True} if forward_only else {}
    with support.optimising(rules):
        comparing.assert_right(recurrent_net, step_net, executor=False, **options)


def drawn_step_net(seed):
    """Products of one or two states, with slices of sequences, some of them seen twice, added to them, or to others."""
    draw = random.Random(seed)
    make = step_nets.Maker(seed)
    states = [make.state(name) for name in "ab"[: draw.randint(1, 2)]]
    sequences = [make.sequence(name) for name in ["x_t", "y_t", "z_t"][: draw.randint(1, 3)]]
    for name, state in zip("ab", states):
        value = make.fc(draw.choice(states), "u" + name)
        for count in range(draw.randint(0, 2)):
            addends = [value, draw.choice(sequences)]
            draw.shuffle(addends)
            value = make.cell.Sum(addends, "s{}{}".format(name, count))
        if draw.random() < 0.5:
            value = make.cell.Tanh(value, "t" + name)
        if draw.random() < 0.3:
            value = make.cell.Mul([value, draw.choice(sequences)], "m" + name)
        make.link(state, value)
    return make.done(outputs_with_grads=tuple(range(draw.randint(1, 2 * len(states)))))


def assert_drawn_right(seed, rules):
    workspace.ResetWorkspace()
    with pytest.MonkeyPatch.context() as patch, support.optimising(rules) as lines:
        patch.setattr(step_nets, "N", 1)
        comparing.assert_right(recurrent_net, drawn_step_net(seed), executor=False)
    return lines


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from([ALONE, ["sequence_bias", *ALONE], None]))
def test_drawn_step_nets(seed, rules):
    assert_drawn_right(seed, rules)


def test_there_are_biases_in_drawn_step_nets(monkeypatch):
    """The property above would say little without."""
    found, find = [], row_biases.found
    monkeypatch.setattr(row_biases, "found", lambda *arguments: found.append(find(*arguments)) or found[-1])
    for seed in range(40):
        assert_drawn_right(seed, ALONE)
    assert sum(bool(biases.added) for biases in found) >= 5, found
    assert sum(bool(biases.outgoing) for biases in found) >= 5, found


def steps_in_another_order(function):
    """What a function of `unrolled` makes of rows, with these from the last one to the first."""
    return lambda *arguments: function(*arguments[:-1], arguments[-1][::-1])


@GRADIENTS
def test_rows_in_the_wrong_order_are_found(gradients, monkeypatch):
    """Those of the sequence in the forward pass, and, of it, of what comes from outside in the backward pass."""
    model, blobs = lstm(gradients=gradients)
    expected = support.run(model, blobs)
    monkeypatch.setattr(unrolled, "_vectors", steps_in_another_order(unrolled._vectors))
    model, blobs = lstm(ALONE if gradients else [RULE], gradients=gradients)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


def test_gradients_from_outside_that_are_not_added_are_found(monkeypatch):
    model, blobs = lstm()
    expected = support.run(model, blobs)
    monkeypatch.setattr(row_biases, "gradient_operators", lambda loop, rows: loop.gradient.operators)
    model, blobs = lstm(ALONE)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------------------- its nets


@RULES
def test_an_lstm_that_trains(rules):
    model, blobs = lstm()
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs = lstm(rules)
    support.assert_done(model.net, rules)
    support.assert_same(support.run(model, blobs), expected)
    forward, backward = kinds(model)
    if rules is ALL:
        # Products are oneDNN's then, whatever their size.
        return
    assert forward["FC"] + forward["FCTransposed"] == support.T
    assert forward["Add"] == ("sequence_bias" not in rules)
    # Nothing is added to the gradient of the initial state.
    assert (backward["FC"] + backward["FCTransposed"], backward["BatchMatMul"]) == (support.T - 1, 1)


def test_an_lstm_that_does_not_train():
    model, blobs = lstm(gradients=False)
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs = lstm([RULE], gradients=False)
    support.assert_same(support.run(model, blobs), expected)
    (forward,) = kinds(model)
    assert (forward["FC"], forward["Sum"], forward["Add"]) == (support.T, 0, 1)


@GRADIENTS
@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@RULES
def test_runs_of_other_sizes(gradients, lengths, rules):
    """T and one sequence as written out, and other numbers of either, by turns in one workspace."""
    options = {"gradients": gradients, "lengths": lengths}
    sizes = [(support.T, 1), (support.T, 3), (2, 1), (support.T, 1), (1, support.T), (14, 2), (support.T, 1)]
    expected = support.runs_of_other_sizes(lambda model: None, sizes, **options)

    def change(model):
        support.feed(batch=1)
        assert optimize(model, rules, even_if_slower=True).counts[RULE] == 1

    support.assert_same(support.runs_of_other_sizes(change, sizes, **options), expected)


@GRADIENTS
@pytest.mark.parametrize("rows", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_initial_states_of_several_rows_are_refused(gradients, rows):
    """The engine refuses them, too; steps would take them for several sequences."""
    model, _ = lstm(ALONE, gradients=gradients)
    for blob, count in zip(("h0", "c0"), rows):
        workspace.FeedBlob(blob, np.ones((1, count, support.D), np.float32))
    with pytest.raises(RuntimeError, match="{} != {}".format(2 * support.D, support.D)):
        workspace.RunNetOnce(model.net)


def test_gradients_of_all_values_and_of_the_last():
    """And of a state that nobody looks at."""
    make = CELLS[0].but(batch=1)
    for outputs_with_grads in [(0,), (1,), (0, 1), (2,), (0, 1, 2, 3), "auto"]:
        with support.optimising(ALONE) as lines:
            make.but(options={"outputs_with_grads": outputs_with_grads}).assert_right(executor=False)
        assert lines.counts[RULE] == 1


def test_the_step_number_is_one_for_all_where_there_are_no_lengths():
    """Neither LSTMUnit nor its gradient looks at it then."""
    for lengths, numbers in ((False, 0), (True, 1)):
        workspace.ResetWorkspace()
        model, _ = lstm(ALONE, lengths=lengths)
        forward, backward = kinds(model)
        assert (forward["GivenTensorIntFill"], backward["GivenTensorIntFill"]) == (numbers, 0)


# -------------------------------------------------------------------------------------------------- where there is none


def biases(change=lambda loop: None, batch=1, **options):
    """What there is for the loop of an LSTM whose parameters' gradients are outside of it, after `change`."""
    model, _ = support.lstm(**options)
    optimize(model, BEFORE)
    (loop,) = read_loops(model.net.Proto()).values()
    change(loop)
    states = dict.fromkeys(("h0", "c0", "dh"), (1, batch, support.D))
    weights = {"layer/gates_t_w": (4 * support.D, support.D), "layer/gates_t_b": (4 * support.D,)}
    sequence = {"layer/i2h": (support.T, batch, 4 * support.D)}
    found = row_biases.found(loop, Sizes({**sequence, **states, **weights}))
    return bool(found.added), bool(found.outgoing)


def test_products_that_have_one():
    assert biases() == (True, True)
    assert biases(gradients=False) == (True, False)
    assert biases(batch=2) == (False, False)


def test_sequences_that_something_else_sees():
    def read_twice(loop):
        loop.operators.append(core.CreateOperator("Copy", ["layer/input_t"], ["copied"]))

    def linked_twice(loop):
        loop.links.append(loop.link("layer/input_t")._replace(inner="seen"))

    def read_in_the_backward_step(loop):
        loop.gradient.operators.append(core.CreateOperator("Copy", ["layer/input_t"], ["copied"]))

    def a_state(loop):
        adding = next(operator for operator in loop.operators if operator.type == "Sum")
        adding.input[:] = ["layer/cell_t_prev" if blob == "layer/input_t" else blob for blob in adding.input]

    def no_slice(loop):
        adding = next(operator for operator in loop.operators if operator.type == "Sum")
        adding.input[:] = ["outside" if blob == "layer/input_t" else blob for blob in adding.input]

    for change in (read_twice, linked_twice, read_in_the_backward_step, a_state, no_slice):
        added, _ = biases(change, gradients=change is read_in_the_backward_step)
        assert not added, change


def test_products_that_are_not_of_a_row_and_a_matrix():
    def other_axis(loop):
        loop.operators[0].arg[0].i = 1

    def of_something_unknown(loop):
        loop.operators[0].input[0] = "outside"

    def with_weights_of_the_step(loop):
        loop.operators.insert(0, core.CreateOperator("Copy", ["layer/gates_t_w"], ["copied"]))
        loop.operators[1].input[1] = "copied"

    def with_a_bias_of_the_step(loop):
        loop.operators.insert(0, core.CreateOperator("Copy", ["layer/gates_t_b"], ["copied"]))
        loop.operators[1].input[2] = "copied"

    def with_three_addends(loop):
        adding = next(operator for operator in loop.operators if operator.type == "Sum")
        adding.input.append("outside")

    for change in (
        other_axis,
        of_something_unknown,
        with_weights_of_the_step,
        with_a_bias_of_the_step,
        with_three_addends,
    ):
        assert biases(change, gradients=False) == (False, False), change


def test_gradients_of_states_that_are_no_product_in_the_end():
    def read_again(loop):
        loop.gradient.operators.append(core.CreateOperator("Copy", ["layer/hidden_t_prev_grad"], ["copied"]))

    def changed(loop):
        (of,) = [link.inner for link in loop.gradient.backward_links if link.inner == "layer/hidden_t_prev_grad"]
        loop.gradient.operators.append(core.CreateOperator("Scale", [of], [of], scale=2.0))

    def of_a_matrix(loop):
        loop.gradient.operators.insert(
            0, core.CreateOperator("Squeeze", ["layer/gates_t_grad"], ["layer/gates_t_grad"], dims=[0])
        )
        loop.gradient.operators[:] = (
            loop.gradient.operators[1:2] + loop.gradient.operators[:1] + (loop.gradient.operators[2:])
        )

    for change in (read_again, changed, of_a_matrix):
        assert biases(change) == (True, False), change


def test_the_bias_of_the_sequence_is_the_products_where_steps_may_be_written_out():
    model, _ = lstm(gradients=False)
    few = "with {} rows in the sequence it costs as much as it gains"
    assert support.reasons(model.net, "sequence_bias", even_if_slower=False) == [few.format(support.T)]
    both = ["sequence_bias", RULE]
    assert optimize(model, both, dry_run=True).counts["sequence_bias"] == 1
    support.feed(batch=2)
    report = optimize(model, both, dry_run=True)
    assert few.format(2 * support.T) in [refusal.reason for refusal in report.refusals]
