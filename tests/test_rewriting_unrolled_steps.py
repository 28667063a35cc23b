"""The rule `unrolled_steps`: steps one behind the other, for the number of steps that a net is optimised for."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import caffe2_recurrent
import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import GRU, LSTM, optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import LINK
from caffe2_recurrent.rewriting import loop_trial, unrolled
from caffe2_recurrent.rewriting.rules.unrolled_steps import AS_IT_IS, UNROLLED
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, prepared
from cells import CELLS
from every_pair import every_pair
from test_random_step_nets import seeds
from test_rewriting_onednn import feed_parameters
from test_rewriting_random import (
    assert_drawn_cell_right,
    assert_found_in_random_step_nets,
    assert_step_net_right,
    chosen_rules,
)

pytestmark = pytest.mark.usefixtures("unrolled_steps")

RULE = "unrolled_steps"
# What has to be out of a loop that trains before it.
ALONE = ["parameter_gradients", RULE]
EVERY_CELL = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
EVERY_STEP_NET = pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
# But those that keep blobs in the slices of sequences, and of their gradients, which small steps do without.
MOST = [name for name in support.NAMES if name not in ("sequence_in_place", "gradient_buffer")]
ALL = list(support.NAMES)
IN_MEMORY = pytest.mark.parametrize("rules", [MOST, ALL], ids=["most rules", "all rules"])
RULES = pytest.mark.parametrize("rules", [ALONE, MOST, ALL], ids=["alone", "most rules", "all rules"])
GRADIENTS = pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
KINDS = pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])


def written_out(rules=MOST, **options):
    """An LSTM whose steps are written out, and what must stay what it is."""
    model, blobs = support.lstm(**options)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[RULE] == 1, report
    return model, blobs


def branches(net):
    """The `then_net` and `else_net` of what stands for loops."""
    nets = [{given.name: given.n for given in operator.arg if given.HasField("n")} for operator in net.Proto().op]
    return [(of["then_net"], of["else_net"]) for of in nets if "then_net" in of and of["then_net"].name == unrolled.NET]


# ------------------------------------------------------------------------------------------------ values and gradients


@EVERY_CELL
@RULES
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, rules):
    fired, reasons = support.fired_on(cell, rules, RULE)
    assert fired or cell.name.startswith("attention"), reasons


@every_pair
@EVERY_STEP_NET
@RULES
@pytest.mark.parametrize("forward_only", [True, False], ids=["forward", "training"])
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make, rules, forward_only):
    step_net = make()
    with support.optimising(rules):
        if forward_only:
            comparing.assert_right(recurrent_net, step_net, executor=False, forward_only=True)
        else:
            comparing.assert_right(recurrent_net, step_net, executor=False)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), st.booleans(), chosen_rules)
def test_random_step_nets(seed, sequences, executor, rules):
    assert_step_net_right(seed, sequences, executor, None if rules is None else {*rules, RULE})


@settings(max_examples=25)
@given(st.data(), st.booleans(), chosen_rules)
def test_random_sizes_lengths_options_and_rules_of_cells(data, executor, rules):
    assert_drawn_cell_right(data, executor, None if rules is None else {*rules, *ALONE})


def test_it_finds_something_to_do_in_random_step_nets():
    assert_found_in_random_step_nets(lambda lines: lines.counts[RULE] >= 7, ALONE, executor=False)


def plant_an_error(monkeypatch):
    """Steps see the sequence from its end."""
    right = unrolled._split
    monkeypatch.setattr(unrolled, "_split", lambda loop, blob, rows: right(loop, blob, rows[::-1]))


def test_an_error_in_the_forward_pass_is_found(monkeypatch):
    model, blobs = support.lstm(gradients=False)
    expected = support.run(model, blobs)
    plant_an_error(monkeypatch)
    model, blobs = written_out(gradients=False)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


def test_an_error_in_the_backward_pass_is_found(monkeypatch):
    """Gradients from outside come to other steps."""
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    right = unrolled._last
    monkeypatch.setattr(unrolled, "_last", lambda *arguments: right(*arguments[:-1], arguments[-1][::-1]))
    model, blobs = written_out()
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------------------- its nets


@every_pair
@pytest.mark.parametrize("options", [{}, {"lengths": True}, support.RECOMPUTED], ids=["built", "lengths", "recomputed"])
@GRADIENTS
@RULES
def test_an_lstm(options, gradients, rules):
    model, blobs = support.lstm(gradients=gradients, **options)
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs = written_out(rules, gradients=gradients, **options)
    assert read_loops(model.net.Proto()) == {}
    support.assert_done(model.net, rules)
    support.assert_same(support.run(model, blobs), expected)
    assert len(branches(model.net)) == 1 + gradients
    for steps, otherwise in branches(model.net):
        assert steps.type == "simple"
        assert not {operator.type for operator in steps.op} & {support.LOOP, support.GRADIENT}
        assert [operator.type in (support.LOOP, support.GRADIENT) for operator in otherwise.op] == [True]


def test_an_lstm_of_the_engine_has_the_same_bits():
    model, blobs = support.lstm(gradients=False)
    expected = support.run(model, blobs)[0]
    workspace.ResetWorkspace()
    model, blobs = written_out([RULE], gradients=False)
    assert all(map(np.array_equal, support.run(model, blobs)[0], expected))


@GRADIENTS
@IN_MEMORY
@pytest.mark.parametrize("lengths", [False, True])
def test_runs_of_other_sizes(gradients, lengths, rules):
    """T as written out, and others, by turns in one workspace: the loop runs then."""

    def change(model):
        assert optimize(model, rules, even_if_slower=True).counts[RULE] == 1

    options = {"gradients": gradients, "lengths": lengths}
    expected = support.runs_of_other_sizes(lambda model: None, **options)
    support.assert_same(support.runs_of_other_sizes(change, **options), expected)


@GRADIENTS
@RULES
def test_runs_of_as_many_steps_again(gradients, rules):
    """What the loop leaves shows its states, and what is written out must not write there."""

    def change(model):
        assert optimize(model, rules, even_if_slower=True).counts[RULE] == 1

    sizes = [(steps, support.N) for steps in (2, support.T, 14, 3, support.T, support.T, 1, support.T)]
    expected = support.runs_of_other_sizes(lambda model: None, sizes, gradients=gradients)
    support.assert_same(support.runs_of_other_sizes(change, sizes, gradients=gradients), expected)


@GRADIENTS
@RULES
def test_a_run_behind_one_of_the_net_as_it_was_with_fewer_steps(gradients, rules):
    plain, blobs = support.lstm(name="plain", gradients=gradients)
    expected = support.run(plain, blobs)
    support.feed(steps=2)
    support.run(plain, blobs)
    model, blobs = written_out(rules, name="plain", gradients=gradients)
    support.assert_same(support.run(model, blobs), expected)


def test_the_loop_runs_when_the_number_of_steps_is_another_one(monkeypatch):
    """What is written out is wrong; it must not have run."""
    model, blobs = support.lstm(gradients=False)
    support.feed(steps=5)
    expected = support.run(model, blobs)
    plant_an_error(monkeypatch)
    model, blobs = written_out(gradients=False)
    support.feed(steps=5)
    support.assert_same(support.run(model, blobs), expected)


@pytest.mark.parametrize("batch", [support.N, 1])
@RULES
def test_an_initial_state_that_is_one_row_for_all_later(batch, rules):
    """A loop takes both."""

    def build():
        workspace.ResetWorkspace()
        model, blobs = support.lstm(gradients=False, forward_only=True)
        support.feed(batch=batch)
        return model, blobs

    def run(model, blobs):
        workspace.CreateNet(model.net)
        found = []
        for shape in ((1, batch, support.D), (support.D,), (batch, support.D)):
            for blob in ("h0", "c0"):
                workspace.FeedBlob(blob, np.random.RandomState(3).randn(*shape).astype(np.float32))
            workspace.RunNet(model.net)
            found += support.values(blobs)[0]
        return found, {}

    expected = run(*build())
    model, blobs = build()
    assert optimize(model, rules, even_if_slower=True).counts[RULE] == 1
    support.assert_same(run(model, blobs), expected)


@pytest.mark.parametrize("shape", [(1, support.D), (support.N - 1, support.D)], ids=str)
@pytest.mark.parametrize("blob", ["h0", "c0"])
@RULES
def test_an_initial_state_of_other_numbers_of_rows_is_refused_as_before(rules, blob, shape):
    model, _ = support.lstm(gradients=False, forward_only=True)
    optimize(support.without_executor(model), rules, even_if_slower=True)
    workspace.RunNetOnce(model.net)
    workspace.FeedBlob(blob, np.ones(shape, np.float32))
    with pytest.raises(RuntimeError, match="== batchSize"):
        workspace.RunNetOnce(model.net)


def squeezed(blob):
    return core.CreateOperator("Squeeze", [blob], [blob], dims=[0])


@GRADIENTS
@RULES
def test_rows_that_steps_write_in_another_shape(gradients, rules):
    """The engine does not mind, and the next step sees them in the shape of a slice."""

    def build():
        workspace.ResetWorkspace()
        model, blobs = support.lstm(gradients=gradients)
        if gradients:
            assert optimize(model, ALONE[:1]).total == 1
            support.backward_step(model.net).op.extend(
                map(squeezed, ["layer/hidden_t_prev_grad", "layer/gates_t_grad"])
            )
        support.step(model.net).op.extend(map(squeezed, ["layer/hidden_t", "layer/cell_t"]))
        return model, blobs

    model, blobs = build()
    expected = support.run(model, blobs)
    shapes = [workspace.FetchBlob(blob).shape for blob in blobs]
    model, blobs = build()
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[RULE] == 1, report
    support.assert_same(support.run(model, blobs), expected)
    assert [workspace.FetchBlob(blob).shape for blob in blobs] == shapes


def two_sequences(**options):
    make = step_nets.Maker()
    x, other, h = make.sequence(), make.sequence("other_t"), make.state()
    make.link(h, make.cell.Tanh(make.cell.Sum([x, other, h], "sum"), "h_t"))
    step_net = make.done()
    net, outputs = comparing.build(recurrent_net, step_net, **options)
    comparing.feed(step_net)
    return step_net, net, outputs


def test_another_sequence_that_is_longer():
    """The engine goes by the first one, and leaves the rest of the other."""

    def run(rules, rest):
        workspace.ResetWorkspace()
        step_net, net, outputs = two_sequences(forward_only=True)
        if rules:
            assert optimize(net, rules, even_if_slower=True).counts[RULE] == 1
        longer = np.concatenate([step_net.outer["OTHER"]] * (1 + rest))
        workspace.FeedBlob("OTHER", longer)
        workspace.RunNetOnce(net)
        return [workspace.FetchBlob(str(outputs[0]))], {}

    for rest in (0, 1):
        support.assert_same(run([RULE], rest), run([], rest))


def test_a_run_without_steps():
    expected = support.run_without_steps(lambda model: None)

    def change(model):
        assert optimize(model, ALONE, even_if_slower=True).counts[RULE] == 1

    support.assert_same(support.run_without_steps(change), expected)


@KINDS
@IN_MEMORY
def test_layers_in_nets_that_run_operators_side_by_side(kind, rules):
    def build():
        workspace.ResetWorkspace()
        model = ModelHelper("layers")
        below, *_ = LSTM(model, "x", None, ("h0", "c0"), support.DIM_IN, support.D, "below")
        beside, *_ = GRU(model, "x", None, ("h0",), support.DIM_IN, support.D, "beside")
        summed = model.net.Sum([below, beside], "sum")
        above, *_ = LSTM(model, summed, None, ("h0", "c0"), support.D, support.D, "above")
        found = model.AddGradientOperators({above: model.net.AddExternalInput("dh")})
        workspace.RunNetOnce(model.param_init_net)
        support.feed()
        feed_parameters(model, 5)
        return model, [str(above), *(str(found[name]) for name in ("x", "h0", "c0", *map(str, model.params)))]

    # As built it would be the engine that fails now and then: its gradient operators make blobs as they first run.
    expected = support.run(*build())
    model, blobs = build()
    model.net.Proto().type = kind
    assert optimize(model, rules, even_if_slower=True).counts[RULE] == 3
    support.assert_done(model.net, rules)
    for _ in range(5):
        support.assert_same(support.run(model, blobs), expected)


def test_a_layer_behind_one_that_is_written_out_knows_its_sizes():
    model = ModelHelper("layers")
    below, *_ = LSTM(model, "x", None, ("h0", "c0"), support.DIM_IN, support.D, "below", forward_only=True)
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    assert optimize(model, MOST, even_if_slower=True).counts[RULE] == 1
    LSTM(model, below, None, ("h0", "c0"), support.D, support.D, "above", forward_only=True)
    workspace.RunNetOnce(model.param_init_net)
    assert optimize(model, MOST, even_if_slower=True).counts[RULE] == 1


def test_gradients_of_all_values_and_of_the_last():
    """And of the state that nobody looks at."""

    def build():
        workspace.ResetWorkspace()
        model = ModelHelper("model")
        outputs = LSTM(model, "x", None, ("h0", "c0"), support.DIM_IN, support.D, "layer", outputs_with_grads="auto")
        addends = [model.net.SumElements(model.net.Mul([outputs[0], "dh"])), model.net.SumElements(outputs[1])]
        found = model.AddGradientOperators([model.net.Sum(addends, "loss")])
        support.feed()
        workspace.RunNetOnce(model.param_init_net)
        feed_parameters(model, 5)
        return model, [str(outputs[0]), *(str(found[name]) for name in ("x", "h0", "c0", *map(str, model.params)))]

    expected = support.run(*build())
    model, blobs = build()
    assert optimize(model, MOST, even_if_slower=True).counts[RULE] == 1
    support.assert_same(support.run(model, blobs), expected)


@GRADIENTS
@IN_MEMORY
def test_it_runs_beside_the_net_as_it_was(gradients, rules):
    """In the same workspace under the same name, before and after it."""
    plain, blobs = support.lstm(name="plain", gradients=gradients)
    expected = support.run(plain, blobs)
    nets = [plain, written_out(rules, name="plain", gradients=gradients)[0]]
    nets.append(written_out([RULE] if not gradients else ALONE, name="plain", gradients=gradients)[0])
    for first in nets:
        for second in nets:
            support.run(first, blobs)
            support.assert_same(support.run(second, blobs), expected)


@pytest.mark.parametrize("reader", [None, "operator", "operator in a net", "result"])
def test_all_values_of_a_state_are_there_if_something_reads_them(reader):
    states = "layer/layer/hidden_t_prev_states"
    model, blobs = support.lstm(gradients=False)
    proto = model.net.Proto()
    copying = core.CreateOperator("Copy", [states], ["copied"])
    if reader == "operator":
        proto.op.extend([copying])
    elif reader == "operator in a net":
        copies = caffe2_pb2.NetDef(name="copies", op=[copying], external_input=[states])
        proto.op.extend([core.CreateOperator("If", ["is_read"], ["copied"], then_net=copies)])
        proto.external_input.append("is_read")
        workspace.FeedBlob("is_read", np.array([True]))
    elif reader == "result":
        proto.external_output.append(states)
    if reader:
        # The engine's operator does not say that it writes to them.
        proto.external_input.append(states)
        workspace.CreateBlob(states)
    expected = support.run(model, [*blobs, states])[0]
    workspace.FeedBlob(states, np.zeros(0, np.float32))
    assert optimize(model, [RULE], even_if_slower=True).counts[RULE] == 1
    found = support.run(model, [*blobs, states])[0]
    if reader is None:
        expected[-1] = np.zeros(0)
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("rules", [ALONE, ALL], ids=["alone", "all rules"])
def test_what_a_loop_has_left_views_of_is_not_written_to(rules):
    """Its states may be gone by then, as behind a run that has failed; its outputs show them until the next run."""
    options = {"gradients": False, "forward_only": True}
    model, blobs = written_out(rules, **options)
    plain, _ = support.lstm(name="plain", **options)
    for net in (plain.net, model.net):
        workspace.CreateNet(net)
    workspace.RunNet(plain.net)
    states = [str(blob) for blob in workspace.Blobs() if str(blob).endswith("_prev_states")]
    assert len(states) == 2
    left = support.values(states)
    support.feed(seed=5)
    workspace.RunNet(model.net)
    found = support.values(blobs)
    support.assert_same(support.values(states), left)
    workspace.RunNet(plain.net)
    support.assert_same(found, support.values(blobs))


@GRADIENTS
def test_it_goes_on_behind_a_loop_that_has_failed(gradients):
    """Of other numbers of steps it is the loop that runs."""
    model, blobs = written_out(gradients=gradients, forward_only=not gradients)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    expected = support.values(blobs)
    for more in (1, 500):
        support.feed(steps=support.T + 1)
        workspace.RunNet(model.net)
        workspace.FeedBlob("h0", np.ones((1, support.N, support.D + more), np.float32))
        with pytest.raises(RuntimeError):
            workspace.RunNet(model.net)
        support.feed()
        for _ in range(2):
            workspace.RunNet(model.net)
            support.assert_same(support.values(blobs), expected)


@pytest.mark.parametrize("written", range(4))
@pytest.mark.parametrize("how", ["in place", "by another name", "in a net"])
def test_outputs_that_something_else_writes_to(how, written):
    """All values of a state and the last one are views of one tensor, so that both change."""
    model, blobs = support.lstm(gradients=False, forward_only=True)
    blob = blobs[written]
    if how == "in place":
        model.net.Tanh(blob, blob)
    elif how == "by another name":
        model.net.Alias(model.net.Alias(blob, "shown"), "shown_again")
        model.net.Tanh("shown_again", "shown_again")
    else:
        inner = caffe2_pb2.NetDef(name="inner", op=[core.CreateOperator("Tanh", [blob], [blob])])
        inner.external_input.append(blob)
        workspace.FeedBlob("always", np.array([True]))
        model.net.Proto().external_input.append("always")
        model.net.Proto().op.extend([core.CreateOperator("If", ["always", blob], [blob], then_net=inner)])
    expected = support.run(model, blobs)
    assert support.reasons(model.net, RULE) == ["an operator writes to '{}' in its place".format(blob)]
    optimize(model, even_if_slower=True)
    support.assert_same(support.run(model, blobs), expected)


def test_a_loop_that_reads_all_values_of_another_writes_to_nothing_of_it():
    model, _ = support.lstm(gradients=False, forward_only=True)
    step = core.Net("above")
    x_t, h_prev = step.AddExternalInput("x_t", "h_prev")
    h_t = step.Mul([x_t, h_prev], "h_t")
    step.AddExternalOutput(h_t)
    below = core.BlobReference("layer/hidden_t_all")
    blobs = recurrent_net(model.net, step, [(x_t, below)], [(h_prev, "h0")], {h_prev: h_t}, forward_only=True)
    expected = support.run(model, [below, *blobs])
    assert optimize(model, [RULE], even_if_slower=True).counts[RULE] == 2
    support.assert_same(support.run(model, [below, *blobs]), expected)


def test_outputs_of_which_something_else_changes_the_shape():
    model, blobs = support.lstm(gradients=False, forward_only=True)
    model.net.Squeeze(blobs[1], blobs[1], dims=[0])
    model.net.Reshape(blobs[0], [blobs[0], "old_shape"], shape=[-1, support.D])
    expected = support.run(model, blobs)
    assert optimize(model, MOST, even_if_slower=True).counts[RULE] == 1
    support.assert_same(support.run(model, blobs), expected)


def test_memory_optimization_shares_what_it_shared():
    """What steps compute again is one blob for all of them."""
    model, _ = written_out(ALONE, **support.RECOMPUTED)
    (forward, _), *_ = branches(model.net)
    gates = {operator.output[0] for operator in forward.op if operator.type == "FC"}
    assert len(gates) == 1
    (forward, _), *_ = branches(written_out(ALONE)[0].net)
    assert len({operator.output[0] for operator in forward.op if operator.type == "FC"}) == support.T


@pytest.mark.parametrize("options", [{}, support.RECOMPUTED], ids=["kept", "recomputed"])
def test_what_lies_in_the_memory_of_the_sequences_gradient_stays_there(options):
    """Nothing is copied to it or from it, and steps keep no gates of their own."""
    model, blobs = written_out(ALL, **options)
    (forward, loop), (backward, gradient) = branches(model.net)
    memory = gradient.op[0].output[0]
    support.run(model, blobs)
    for net in (forward, backward):
        shown = [operator.output[0] for operator in net.op if operator.type == LINK and operator.input[1] == memory]
        assert len(shown) == support.T
        assert np.array_equal(np.concatenate([workspace.FetchBlob(row) for row in shown]), workspace.FetchBlob(memory))
        assert not any(operator.type == "Concat" and memory in operator.output for operator in net.op)
    outer, inner = (
        [blob.decode() for blob in given.strings]
        for name in ("link_external", "link_internal")
        for given in loop.op[0].arg
        if given.name == name
    )
    gates = dict(zip(outer, inner))[memory].split("/")[-1]
    assert not any("unrolled_{}_".format(gates) in blob for operator in forward.op for blob in operator.output)


def test_an_error_in_what_shows_that_memory_is_found(monkeypatch):
    model, blobs = support.lstm(**support.RECOMPUTED)
    expected = support.run(model, blobs)
    right = unrolled._shown
    monkeypatch.setattr(unrolled, "_shown", lambda loop, blob, rows: right(loop, blob, rows[::-1]))
    model, blobs = written_out(ALL, **support.RECOMPUTED)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


def test_what_looks_at_steps(tmp_path):
    model, blobs = written_out()
    support.run(model, blobs)
    text = "{}: net '{}' has its steps written out; optimize it without the rule 'unrolled_steps'"
    for name in ("step_times", "step_values", "retrieve_step_blobs", "describe", "draw"):
        with pytest.raises(ValueError) as caught:
            getattr(caffe2_recurrent, name)(model, *([tmp_path / "net.dot"] if name == "draw" else []))
        assert str(caught.value) == text.format(name, model.net.Name())
    prediction = caffe2_recurrent.prediction_net(model, ["x"], ["layer/hidden_t_all"])
    assert len(branches(prediction.net)) == 1


# --------------------------------------------------------------------------------------------------------- what it says


def reasons(model_or_net, rules=(RULE,), **options):
    report = optimize(model_or_net, list(rules), dry_run=True, **{"even_if_slower": True, **options})
    return [refusal.reason for refusal in report.refusals if refusal.rule == RULE]


def test_numbers_of_steps():
    model, _ = support.lstm(gradients=False)
    assert reasons(model, shapes={"x": (1, 3, 2)}) == ["there is one step"]
    assert reasons(model, shapes={"x": (600, 3, 2)}) == ["4800 operators and links of all steps are many"]
    # Of large states fewer are, and without trials.
    assert reasons(model, shapes={"x": (200, 3, 2)}, trials=False) == ["1600 operators and links of all steps are many"]
    large = {"x": (200, 3, 2), "h0": (1, 3, 400)}
    assert reasons(model, shapes=large) == ["1600 operators and links of all steps are many"]
    workspace.ResetWorkspace()
    assert reasons(model) == ["the number of steps is not known; give shapes"]
    assert reasons(model, shapes={"x": (9, 3, 2)}) == [
        "the initial state 'h0' is not known to have a row for each sequence; give shapes"
    ]


def test_what_a_trial_cannot_tell():
    model, _ = support.lstm(gradients=False)
    assert reasons(model, even_if_slower=False, trials=False) == ["only a trial could tell that it is faster"]
    workspace.ResetWorkspace()
    shapes = {"layer/i2h": (9, 3, 16), "h0": (3, 4), "c0": (3, 4)}
    assert reasons(model.net, even_if_slower=False, shapes=shapes) == [
        "the shapes of what its steps read are not all known; give shapes"
    ]


@pytest.mark.parametrize("gain, made", [(1.04, 0), (1.06, 1)])
@pytest.mark.parametrize("options", [{}, {"gradients": False}, {"lengths": True}], ids=str)
def test_a_trial_decides(monkeypatch, gain, made, options):
    trial.forget()
    names = []

    def in_turn(candidates, one_by_one):
        for candidate in candidates.values():
            subject = candidate()
            # It has to run: all that it reads is there.
            with prepared(subject) as timer:
                timer(1.0)
        names.append(list(candidates))
        return {AS_IT_IS: Seconds(0, gain), UNROLLED: Seconds(0, 1.0)}

    monkeypatch.setattr(loop_trial.trial, "in_turn", in_turn)
    model, _ = support.lstm(**options)
    for _ in range(2):
        report = optimize(model, ALONE[options.get("gradients") is False :], dry_run=True)
        assert report.counts[RULE] == made
        left = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
        assert left == ([] if made else ["for 9 steps it is not faster"])
    assert names == [[AS_IT_IS, UNROLLED]]
    trial.forget()


def test_slices_that_steps_write_to():
    model, _ = support.lstm(memory_optimization=True)
    assert reasons(model, ALONE) == ["the step writes over 'layer/input_t'"]
    model, _ = support.lstm(memory_optimization=True)
    assert reasons(model, [name for name in ALL if name != "sequence_in_place"]) == [
        "the step writes over 'layer/input_t'"
    ]
    assert reasons(model, ALL) == []


def test_gradients_that_are_added_up_in_the_loop():
    model, _ = support.lstm()
    assert reasons(model) == ["steps add up the gradient of 'layer/gates_t_w'"]


def test_a_backward_pass_that_is_a_loop(backward_loops):
    model, _ = support.lstm()
    assert reasons(model, ["parameter_gradients", "backward_loop", RULE]) == ["its backward pass is a loop of its own"]


def test_threads_that_somebody_has_given():
    model, _ = support.lstm()
    for operator in model.net.Proto().op:
        if operator.type in (support.LOOP, support.GRADIENT):
            caffe2_recurrent.set_rnn_executor_config(operator, num_threads=2)
    assert reasons(model, ALONE) == ["the RNN executor runs its steps, with 2 threads"]


def refused(change, **options):
    """What the rule says of the loop of an LSTM without parameters' gradients, after `change`."""
    model, _ = support.lstm(**options)
    if options.get("gradients") is not False:
        optimize(model, ALONE[:1])
    (loop,) = read_loops(model.net.Proto()).values()
    change(loop)
    sizes = Sizes({"layer/i2h": (support.T, support.N, 16), "h0": (1, support.N, 4), "c0": (1, support.N, 4)})
    unrolling = support.rule(RULE)
    (site,) = unrolling.sites(loop)
    return unrolling.refusal(loop, site, sizes)


def test_what_is_refused_of_a_forward_pass():
    def other_slice(loop):
        loop.links[-1] = loop.links[-1]._replace(offset=1)

    def no_new_value(loop):
        del loop.links[1]

    def other_part(loop):
        loop.aliases[0] = loop.aliases[0]._replace(offset=0)

    def another_name(loop):
        loop.operators.append(core.CreateOperator("Alias", ["layer/hidden_t"], ["shown"]))

    states = "layer/layer/hidden_t_prev_states"
    for change, reason in [
        (lambda loop: None, None),
        (other_slice, "'layer/input_t' is linked to another slice of 'layer/i2h' than that of the step"),
        (no_new_value, "a step does not write one new value of '{}'".format(states)),
        (other_part, "'layer/hidden_t_all' is another part of '{}' than all values or the last one".format(states)),
        (another_name, "a step shows a blob under another name"),
    ]:
        assert refused(change, gradients=False) == reason


def test_what_is_refused_of_a_backward_pass():
    def not_passed_on(loop):
        loop.gradient.backward_links[:] = [link for link in loop.gradient.backward_links if link.offset == 1]

    def other_slice(loop):
        loop.gradient.backward_links[-1] = loop.gradient.backward_links[-1]._replace(offset=1)

    def not_written(loop):
        del loop.gradient.backward_links[-1]

    def written_again(loop):
        loop.gradient.operators.append(core.CreateOperator("Copy", ["layer/hidden_t"], ["layer/cell_t"]))

    states = "layer/layer/hidden_t_prev_states"
    for change, reason in [
        (lambda loop: None, None),
        (not_passed_on, "the backward step does not pass on the gradient of '{}'".format(states)),
        (other_slice, "'layer/gates_t_grad' is not what a step writes to its slice of 'layer/layer/i2h_grad'"),
        (
            not_written,
            "no step writes to its slice of 'layer/layer/i2h_grad', which the gradient operator makes",
        ),
        (written_again, "the backward step writes to 'layer/cell_t'"),
    ]:
        assert refused(change) == reason


def test_a_gradient_whose_shape_nothing_tells():
    _, net, outputs = two_sequences()
    net.AddGradientOperators({outputs[0]: net.AddExternalInput("dh")})
    (loop,) = read_loops(net.Proto()).values()
    (inner,) = [link.inner for link in loop.gradient.backward_links if link.outer in loop.gradient.others]
    loop.gradient.operators.append(squeezed(inner))
    unrolling = support.rule(RULE)
    (site,) = unrolling.sites(loop)
    shapes = {blob: workspace.FetchBlob(blob).shape for blob in loop.inputs}
    reason = "'{}' is not known to be a row for each sequence".format(inner)
    assert unrolling.refusal(loop, site, Sizes(shapes)) == reason


def test_steps_that_may_run_side_by_side():
    step_net = step_nets.two_states()
    net, _ = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    (reason,) = reasons(net)
    assert reason.startswith("it would take the RNN executor off: ")


def test_large_products():
    model, _ = support.lstm(gradients=False)
    assert optimize(model, ["packed_products"], even_if_slower=True).total == 1
    assert reasons(model, even_if_slower=False) == [
        "its products are large enough for oneDNN, and links take little of the time"
    ]


def test_a_step_that_asks_for_certain_numbers():
    """Which those of a trial are not: here, the rows that it takes."""
    make = step_nets.Maker()
    x, h, rows = make.sequence(), make.state(), make.reference("rows", 1)
    make.outer[rows] = np.zeros(1, np.int32)
    make.link(h, make.cell.Sum([make.cell.Gather([x, rows], "row"), h], "h_t"))
    step_net = make.done()
    net, _ = comparing.build(recurrent_net, step_net, forward_only=True)
    comparing.feed(step_net)
    assert reasons(net, even_if_slower=False) == ["its steps cannot be tried with arbitrary numbers"]
