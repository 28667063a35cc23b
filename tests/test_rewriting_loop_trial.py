"""`loop_trial`: what is timed when a loop is, in the forms that it may get. Never how long it takes."""

import numpy as np
import pytest
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from attention_support import ENCODED, SIZES, decoder
from caffe2_recurrent import GRU, LSTM, MILSTM, optimize
from caffe2_recurrent.operator_arguments import integer, net
from caffe2_recurrent.rewriting import calling_thread, loop_trial
from caffe2_recurrent.rewriting.rules.executor_threads import OFF, ON
from caffe2_recurrent.rewriting.rules.joined_sequence import JoinedSequence
from caffe2_recurrent.rewriting.rules.sequence_bias import SequenceBias
from caffe2_recurrent.rewriting.rules.unrolled_steps import UNROLLED
from caffe2_recurrent.rewriting.trials import threads, timing, trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, prepared

RULES = ["executor_threads", "unrolled_steps"]


@pytest.fixture
def tried(monkeypatch, unrolled_steps):
    """The subjects of each trial by the name of the candidate; the last one wins."""
    trial.forget()
    found = []

    def in_turn(candidates, one_by_one):
        found.append({name: candidate() for name, candidate in candidates.items()})
        return {name: Seconds(0.0, 9.0 - index) for index, name in enumerate(candidates)}

    monkeypatch.setattr(loop_trial.trial, "in_turn", in_turn)
    yield found
    trial.forget()


def without_executor(model):
    for operator in model.net.Proto().op:
        for given in operator.arg:
            if given.name == "enable_rnn_executor":
                given.i = 0


def loops(operators):
    """The loops among operators, those of the branch of an If included."""
    for operator in operators:
        if operator.type == support.LOOP:
            yield operator
        yield from loops(net(operator, "else_net").op if operator.type == "If" else ())


# `sequence_bias` puts another product into the place of the one that the net had.
@pytest.mark.parametrize("before", [[], ["sequence_bias"]], ids=str)
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward only"])
def test_what_makes_the_sequence_is_timed_with_the_loop(before, gradients, tried, trials_by_name):
    model, _ = support.lstm(gradients=gradients)
    optimize(model, ["parameter_gradients", *before, *RULES], dry_run=True)
    timed = [subject for candidates in tried for subject in candidates.values()]
    # Written out or not, and with the executor or so.
    assert len(timed) == 4
    for subject in timed:
        product, *others = subject.step
        assert product.type == "FC"
        (loop,) = loops(others)
        assert loop.input[0] in product.output and loop.input[0] not in subject.shapes
        assert set(product.input) <= set(subject.shapes)
        assert subject.shapes["x"] == (support.T, support.N, support.DIM_IN)
        # And no other product around the loop.
        assert all(operator.type != "FC" for operator in others)


def test_what_makes_the_sequence_of_what_is_not_known_is_not_timed(tried, trials_by_name):
    """Its result is there instead."""
    model, _ = support.lstm(gradients=False)
    sequence = (support.T, support.N, 4 * support.D)
    # Nothing is known of its input: the net is all that there is.
    parameters = {name: workspace.FetchBlob(name).shape for name in ("layer/gates_t_w", "layer/gates_t_b")}
    workspace.ResetWorkspace()
    states = dict.fromkeys(("h0", "c0"), (1, support.N, support.D))
    optimize(model.net, RULES, shapes={"layer/i2h": sequence, **states, **parameters}, dry_run=True)
    assert tried
    for candidates in tried:
        for subject in candidates.values():
            assert all(operator.type != "FC" for operator in subject.step)
            assert subject.shapes["layer/i2h"] == sequence


def test_a_sequence_that_the_net_is_given(tried, trials_by_name):
    model, _ = support.lstm(gradients=False)
    product = support.operator(model.net, "FC")
    model.net.Proto().op.remove(product)
    workspace.FeedBlob("layer/i2h", np.ones((support.T, support.N, 4 * support.D), np.float32))
    optimize(model, RULES, dry_run=True)
    assert tried
    assert {operator.type for candidates in tried for operator in candidates[min(candidates)].step} >= {support.LOOP}
    assert all("layer/i2h" in subject.shapes for candidates in tried for subject in candidates.values())


def test_the_usual_time_counts_where_the_executor_takes_part(tried):
    model, _ = support.lstm(gradients=False)
    optimize(model, RULES, dry_run=True)
    (executor,) = [candidates for candidates in tried if set(candidates) == {ON, OFF}]
    on = {name: integer(next(loops(subject.step)), "enable_rnn_executor", 0) for name, subject in executor.items()}
    assert on == {ON: 1, OFF: 0}
    assert all(subject.wakes_threads for subject in executor.values())
    del tried[:]
    trial.forget()
    without_executor(model)
    optimize(model, RULES, dry_run=True)
    (written_out,) = tried
    assert UNROLLED in written_out
    assert not any(subject.wakes_threads for subject in written_out.values())


def test_no_sequence_has_ended(tried, trials_by_name):
    model, _ = support.lstm(lengths=True, gradients=False)
    optimize(model, RULES, dry_run=True)
    assert tried
    for candidates in tried:
        for subject in candidates.values():
            made = timing.result(subject.once, {}, "lengths")
            np.testing.assert_array_equal(made, np.full(support.N, support.T, np.int32))
            assert made.dtype == np.int32


def assert_run(tried):
    for candidates in tried:
        for subject in candidates.values():
            with prepared(subject) as timer:
                assert timer(1.0).step > 0


@pytest.mark.parametrize("options", [{}, {"gradients": False}, {"lengths": True}], ids=str)
@pytest.mark.parametrize("before", [[], ["joined_sequence"]], ids=str)
def test_what_is_timed_runs(before, options, tried, monkeypatch):
    """Also where the step reads what rules have filled in front of the loop, by sizes that are numbers there."""
    for rule in (SequenceBias, JoinedSequence):
        monkeypatch.setattr(rule, "loss", lambda *_: None)
    model, _ = support.lstm(**options)
    report = optimize(model, ["parameter_gradients", "sequence_bias", *before, *RULES], dry_run=True)
    assert report.counts.keys() >= {"sequence_bias", *before}
    assert any(UNROLLED in candidates for candidates in tried)
    assert_run(tried)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_decoder_with_lengths_of_what_is_encoded_can_be_tried(parts, tried):
    """Its steps read them as whole numbers."""
    workspace.GlobalInit(["tests", calling_thread.FLAG])
    model, _ = decoder()
    steps, batch, encoded = SIZES[0]
    of_steps = {"x": support.DIM_IN, "dh": support.D, "dw": ENCODED}
    shapes = {blob: (steps, batch, width) for blob, width in of_steps.items()}
    shapes.update({"h0": (1, batch, support.D), "c0": (1, batch, support.D), "w0": (1, batch, ENCODED)})
    shapes.update({"encoded": (encoded, batch, ENCODED), "encoder_lengths": (batch,)})
    report = optimize(model, RULES, shapes=shapes, batch_parts=parts)
    assert report.counts.get("batch_parts", 0) == parts - 1
    assert any("parts" in candidates for candidates in tried) is (parts > 1)
    assert any(ON in candidates for candidates in tried)
    assert_run(tried)


@pytest.mark.parametrize(
    "rule, is_made_again", [("executor_threads", True), ("unrolled_steps", False)], ids=["with executor", "without"]
)
def test_a_run_that_the_executors_race_fails_is_made_again(rule, is_made_again, tried, monkeypatch):
    model, _ = support.lstm(gradients=False)
    if not is_made_again:
        without_executor(model)
    in_turn, failures = loop_trial.trial.in_turn, [RuntimeError("success. Error running net")]

    def failing_once(*arguments, **options):
        if failures:
            raise failures.pop()
        return in_turn(*arguments, **options)

    monkeypatch.setattr(loop_trial.trial, "in_turn", failing_once)
    report = optimize(model, [rule], dry_run=True)
    assert not failures
    assert bool(tried) is is_made_again
    assert bool(report.refusals) is not is_made_again


# ------------------------------------------------------------------------------------------------------ remembered


DECIDED = ["parameter_gradients", "lstm_unit", "gradient_buffer", "backward_loop", *RULES]


def layers(name, count, size=support.D, builder=LSTM, **options):
    """A model of layers one behind the other, whose blobs are called by its name."""
    model, hidden = ModelHelper(name), name + "/x"
    for layer in range(count):
        scope = "{}_layer_{}".format(name, layer)
        hidden, *_ = builder(model, hidden, None, None, size, size, scope=scope, **options)
    if not options.get("forward_only"):
        model.AddGradientOperators([model.net.AveragedLoss(hidden, name + "_loss")])
    return model


def optimised(model, steps=support.T, size=support.D):
    return optimize(model, DECIDED, shapes={model.name + "/x": (steps, support.N, size)})


@pytest.mark.parametrize("builder", [LSTM, MILSTM, GRU])
@pytest.mark.parametrize("options", [{}, {"forward_only": True}, {"memory_optimization": True}], ids=str)
def test_loops_of_one_size_are_tried_once(options, builder, tried):
    """In whatever net, and whatever their blobs are called."""
    optimised(layers("first", 1, builder=builder, **options))
    count = len(tried)
    assert count
    for name in ("second", "third"):
        optimised(layers(name, 1, builder=builder, **options))
    assert len(tried) == count


def test_layers_of_a_net_are_tried_once(tried):
    """The first has nothing to hand its gradient on to that the others do not have."""
    optimised(layers("first", 2))
    count = len(tried)
    optimised(layers("second", 4))
    assert len(tried) == count


@pytest.mark.parametrize(
    "other",
    [
        lambda: optimised(layers("other", 1), steps=support.T + 1),
        lambda: optimised(layers("other", 1, size=support.D + 1), size=support.D + 1),
        lambda: optimised(layers("other", 1, forget_bias=2.0)),
        lambda: optimised(layers("other", 1, forward_only=True)),
    ],
    ids=["steps", "size", "an argument", "no gradient"],
)
def test_others_are_tried_anew(other, tried):
    optimised(layers("first", 1))
    count = len(tried)
    other()
    assert len(tried) > count


def test_with_other_threads_they_are_tried_anew(tried, monkeypatch):
    optimised(layers("first", 1))
    count = len(tried)
    monkeypatch.setattr(threads, "settings", lambda: (7, 7, 0))
    optimised(layers("second", 1))
    assert len(tried) == 2 * count


def test_what_was_tried_of_another_loop_decides_about_this_one(tried):
    """And the net that comes out names no blob of that one."""
    made = []
    for name in ("first", "second"):
        model = layers(name, 2)
        report = optimised(model)
        made.append((report.counts, str(report).replace(name, "net"), str(model.net.Proto()).replace(name, "net")))
    (counts, *_), second = made
    assert counts["executor_threads"] or counts["unrolled_steps"]
    assert second[0] == counts and second[1] == made[0][1]
    assert "first" not in second[2] and "blob#" not in second[2]
