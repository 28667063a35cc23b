"""Batches in parts (`optimize(..., batch_parts=2)`): values, gradients, sizes of later runs, threads, and refusals."""

import itertools
import re
import threading

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from google.protobuf import text_format
from hypothesis import example, given, settings
from hypothesis import strategies as st

import comparing
import in_parts
import rewriting_support as support
import step_nets
from attention_support import runs_of_attention
from caffe2_recurrent import (
    LSTM,
    AttentionType,
    check_inputs,
    describe,
    lstm_to_torch,
    optimize,
    prediction_net,
    recurrent_net,
    step_times,
    step_values,
)
from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.rewriting import calling_thread
from caffe2_recurrent.rewriting.batch_parts import parting, regions, side_by_side, worker_threads
from caffe2_recurrent.rewriting.batch_parts.bounds import Layout
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from every_pair import every_pair
from in_parts import EVERY_NUMBER, SIZES, parted
from step_nets import Maker
from test_random_step_nets import seeds
from test_rewriting_encoded import inserted
from test_rewriting_unchanged_weights import assert_runs_see, parameters

RULE = parting.RULE
FLAG = calling_thread.FLAG
NO_FLAG = FLAG[:-1] + "0"
WITH_AND_WITHOUT = pytest.mark.parametrize("later", [FLAG, NO_FLAG], ids=["calling thread", "own threads"])


@pytest.fixture(autouse=True)
def flag():
    workspace.GlobalInit(["tests", FLAG])
    yield
    workspace.GlobalInit(["tests", NO_FLAG])


# ------------------------------------------------------------------------------------------------ values and gradients


@every_pair
@EVERY_NUMBER
@support.EVERY_LSTM
@pytest.mark.parametrize("rules", [None, []], ids=["all rules", "no rules"])
def test_values_and_gradients_stay(options, parts, rules):
    in_parts.assert_right(parts, rules, **options)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell):
    in_parts.assert_right_cell(cell)


@settings(max_examples=40)
@given(seeds, st.integers(1, 3))
@example(13765, 1)  # where what no part may have moves out of the loop
def test_random_step_nets(seed, sequences):
    in_parts.assert_right_step_net(seed, sequences)


@settings(max_examples=20)
@given(st.data())
def test_random_sizes_lengths_and_options_of_cells(data):
    in_parts.assert_right_drawn_cell(data)


# ---------------------------------------------------------------------------------------------------------- later runs


@EVERY_NUMBER
@support.EVERY_LSTM
def test_runs_of_other_sizes(options, parts):
    in_parts.assert_right_in_other_sizes(parts, **options)


@EVERY_NUMBER
@pytest.mark.parametrize("kind", [AttentionType.Regular, AttentionType.Recurrent])
def test_attention_in_runs_of_other_sizes(kind, parts):
    """Each part looks at what is encoded of its own sequences."""
    reports = []
    found = runs_of_attention(
        lambda model: reports.append(optimize(model, even_if_slower=True, batch_parts=parts)), kind=kind
    )
    assert [report.counts[RULE] for report in reports] == [1]
    support.assert_same(found, runs_of_attention(lambda model: None, kind=kind))


@WITH_AND_WITHOUT
def test_runs_see_each_change(later):
    model, blobs = parted(gradients=False, forward_only=True)
    workspace.GlobalInit(["tests", later])
    changes = [None, None, *parameters(), "x", *["sizes"] * 3, *parameters(), *["sizes"] * 2, "x"]
    assert_runs_see(changes, model, blobs, [*SIZES, (0, 4), (9, 3), (9, 1), (9, 3)])


@WITH_AND_WITHOUT
def test_trained_where_the_flag_is_another_one(later):
    """All parts may have to wait for threads of the net's own, which must not wait for each other."""

    def change(model):
        assert optimize(model, even_if_slower=True, batch_parts=2).counts[RULE] == 1
        workspace.GlobalInit(["tests", later])

    expected = support.runs_of_other_sizes(lambda model: None)
    support.assert_same(support.runs_of_other_sizes(change), expected)


def test_a_sequence_of_no_steps():
    expected = support.run_without_steps(lambda model: None)
    found = support.run_without_steps(lambda model: optimize(model, even_if_slower=True, batch_parts=2))
    support.assert_same(found, expected)


def test_beside_the_net_as_it_was():
    """Each writes its results by the same names, where the other one has left views of its states."""
    plain, blobs = support.lstm()
    model, _ = parted(name="parted")
    for net in (plain.net, model.net):
        workspace.CreateNet(net)
    for seed, (steps, batch) in enumerate(SIZES * 2):
        found = []
        for net in (plain.net, model.net, plain.net)[seed % 2 :]:
            support.feed(steps, batch, seed=seed)
            workspace.RunNet(net)
            found.append(support.values(blobs))
        for one in found[1:]:
            support.assert_same(one, found[0])


def test_a_run_that_fails_says_why_and_leaves_the_next_right(capfd):
    model, blobs = parted()
    support.without_executor(model)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    expected = support.values(blobs)
    workspace.FeedBlob("h0", np.zeros((1, support.N, support.D + 1), dtype=np.float32))
    with pytest.raises(RuntimeError):
        workspace.RunNet(model.net)
    support.feed()
    workspace.RunNet(model.net)
    support.assert_same(support.values(blobs), expected)


# -------------------------------------------------------------------------------------------------------------- threads


def _recording(found, barrier):
    def record(inputs, outputs):
        found.append(threading.get_ident())
        barrier.wait(30)
        outputs[0].feed(np.zeros(1, dtype=np.float32))

    return record


@EVERY_NUMBER
def test_parts_run_at_the_same_time_one_of_them_in_the_calling_thread(parts):
    found = [[] for _ in range(parts)]
    barrier = threading.Barrier(parts)
    operators = [
        [core.CreatePythonOperator(_recording(threads, barrier), [], ["result_{}".format(number)])]
        for number, threads in enumerate(found)
    ]
    workspace.FeedBlob("enough", np.array([True]))
    made = side_by_side.run("enough", operators, [], [], Names([]), is_gradient=False)
    net = caffe2_pb2.NetDef(name="parts", op=[made], external_input=["enough"])
    workspace.CreateNet(net)
    workspace.RunNet(net.name, 3)
    (callers, *others) = map(set, found)
    assert callers == {threading.get_ident()}
    assert all(callers.isdisjoint(threads) for threads in others)


def test_there_are_as_many_threads_of_openmp_in_each():
    assert worker_threads.why_not() is None


@pytest.mark.parametrize("callers, workers", [(2, 1), (1, 2)])
def test_another_number_of_threads_is_a_reason(monkeypatch, callers, workers):
    monkeypatch.setattr(worker_threads.threads, "of_openmp", lambda: callers)
    monkeypatch.setattr(worker_threads, "_of_workers", lambda: workers)
    assert reasons() == [
        "the number of OpenMP's threads is {} where the net is called and {} in threads of its own; pass "
        "--caffe2_omp_num_threads=1 and --caffe2_mkl_num_threads=1 to workspace.GlobalInit".format(callers, workers)
    ]


def test_an_unknown_number_of_threads_is_a_reason(monkeypatch):
    monkeypatch.setattr(worker_threads.threads, "library", lambda: None)
    assert reasons() == ["how many threads OpenMP has is not known"]


def test_without_the_flag_nothing_is_parted():
    workspace.GlobalInit(["tests", NO_FLAG])
    (reason,) = reasons()
    assert reason == (
        "all parts would wait for threads of the net's own; before it is optimised and created, pass {} to "
        "workspace.GlobalInit".format(FLAG)
    )


# ------------------------------------------------------------------------------------------------------------- refusals


def reasons(model=None, **options):
    model = model or support.lstm()[0]
    before = model.net.Proto().SerializeToString()
    report = optimize(model, dry_run=True, batch_parts=2, **{"even_if_slower": True, **options})
    assert model.net.Proto().SerializeToString() == before
    return [refusal.reason for refusal in report.refusals if refusal.rule == RULE]


def test_a_dry_run_says_what_would_be_done():
    model, _ = support.lstm()
    before = model.net.Proto().SerializeToString()
    report = optimize(model, even_if_slower=True, dry_run=True, batch_parts=2)
    assert report.counts[RULE] == 1 and "batch_parts: the batch, in 2 parts" in str(report)
    assert model.net.Proto().SerializeToString() == before


@pytest.mark.parametrize("kind", ["dag", "async_scheduling", "simple_refcount"])
def test_other_types_of_nets(kind):
    model, _ = support.lstm()
    model.net.Proto().type = kind
    assert reasons(model) == [
        "a net of type '{}' runs operators in an order of its own, or lets go of blobs".format(kind)
    ]


def test_unknown_sizes():
    model, _ = support.lstm()
    workspace.ResetWorkspace()
    assert reasons(model) == ["the sizes of its sequence are not known; give shapes"]


def test_too_few_sequences():
    model, _ = support.lstm()
    support.feed(batch=1)
    assert reasons(model) == ["there are 2 parts for 1 sequence"]


def test_a_loop_that_has_been_optimised():
    model, _ = support.lstm()
    optimize(model, ["parameter_gradients"], even_if_slower=True)
    assert reasons(model) == ["it has been optimised before; batches are parted in the first call"]


def test_steps_that_are_not_known_to_take_sequences_one_by_one():
    model, _ = support.lstm()
    _change_steps(model, "step_net", lambda step: setattr(step.op[-1], "type", "Unknown"))
    assert reasons(model) == ["its steps have 'Unknown', which is not known to take sequences one by one"]


def test_backward_steps_that_are_not_known_to_take_sequences_one_by_one():
    model, _ = support.lstm()
    _change_steps(model, "backward_step_net", lambda step: setattr(step.op[0], "type", "Unknown"))
    assert reasons(model) == ["its backward steps have 'Unknown', which is not known to take sequences one by one"]


def _change_steps(model, name, change):
    for operator in model.net.Proto().op:
        for argument in operator.arg:
            if argument.name == name and argument.n.op:
                change(argument.n)


@pytest.mark.parametrize("blob, layout", [("layer/i2h_w", Layout(2, 0)), ("x", Layout(3, 0)), ("h0", Layout(1, 0))])
def test_what_is_around_steps_reads_it_otherwise(blob, layout, monkeypatch):
    model, _ = support.lstm()
    for state in ("h0", "c0"):
        workspace.FeedBlob(state, np.zeros(support.D, dtype=np.float32))
    monkeypatch.setattr(regions.batch_axes, "of_references", lambda loop, sizes: {blob: layout})
    assert reasons(model) == ["its steps and what is around them read '{}' in two ways".format(blob)]


def test_operators_that_wait_for_others():
    model, _ = support.lstm()
    support.operator(model.net).control_input.append("x")
    assert reasons(model) == ["its operators wait for others (control_input)"]


@pytest.mark.parametrize("axes", [(1, 1, support.N), (1, support.N + 1), (1,)], ids=str)
def test_an_initial_state_without_a_row_for_each(axes):
    model, _ = support.lstm(gradients=False)
    workspace.FeedBlob("h0", np.zeros((*axes, support.D), dtype=np.float32))
    assert reasons(model) == ["'h0' is not known to have a row for each sequence, or one for all"]


FED_AS = {"[D]": (), "[N, D]": (support.N,), "[1, N, D]": (1, support.N)}


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
@pytest.mark.parametrize("later", FED_AS.values(), ids=list(FED_AS))
@pytest.mark.parametrize("first", FED_AS.values(), ids=list(FED_AS))
def test_initial_states_of_any_number_of_axes(first, later, gradients):
    """In each run they may have others. Gradients have the same: those of `[D]` are sums over all sequences."""
    # As built, a net that has run with others goes on with the gradients that it had.
    expected = [_runs(axes, gradients=gradients) for axes in ([first], [later])]
    found = _runs([first, later], gradients=gradients, even_if_slower=True, batch_parts=2)
    for run, of_run in zip(found, itertools.chain(*expected)):
        assert [value.shape for value in run] == [value.shape for value in of_run]
        support.assert_same((run, {}), (of_run, {}))


def _runs(fed, gradients, **promises):
    """Values of an LSTM in runs of one net, with initial states of these axes in front of the last one."""
    workspace.ResetWorkspace()
    model, blobs = support.lstm(gradients=gradients)
    found = []
    for number, axes in enumerate(fed):
        for seed, name in enumerate(("h0", "c0")):
            value = np.random.RandomState(seed).uniform(-1, 1, (*axes, support.D))
            workspace.FeedBlob(name, value.astype(np.float32))
        if number == 0:
            if promises:
                assert optimize(model, **promises).counts[RULE] == 1
            workspace.CreateNet(model.net)
        workspace.RunNet(model.net)
        found.append(support.values(blobs)[0])
    return found


def test_states_that_go_on():
    """The last ones of a run, `[1, N, D]`, are those with which the next one begins, in place of `[N, D]`."""
    found = [_stream(promises) for promises in ({}, {"even_if_slower": True, "batch_parts": 2})]
    support.assert_same(*found)


def _stream(promises):
    workspace.ResetWorkspace()
    model, (hidden_all, hidden_last, _, cell_last, *gradients) = support.lstm()
    for name, last in (("h0", hidden_last), ("c0", cell_last)):
        workspace.FeedBlob(name, np.zeros((support.N, support.D), dtype=np.float32))
        model.net.Copy(last, name)
    if promises:
        assert optimize(model, **promises).counts[RULE] == 1
    workspace.CreateNet(model.net)
    found = []
    for _ in range(3):
        workspace.RunNet(model.net)
        found += support.values([hidden_all, *gradients])[0]
    return found, {}


@pytest.mark.parametrize("forward_only", [True, False])
def test_an_initial_state_that_steps_read_too(forward_only):
    """In the parts it has the axes then that steps see."""
    make = Maker()
    x, h = make.sequence(), make.state(shape=(1, step_nets.N, step_nets.D))
    initial = make.reference("h_initial", 1, step_nets.N, step_nets.D)
    make.link(h, make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x, initial], "v"), "h_t"))
    with support.optimising(batch_parts=2) as lines:
        comparing.assert_right(recurrent_net, make.done(forward_only=forward_only), executor=False)
    assert [report.counts[RULE] for report in lines.reports] == [1]


def test_states_that_are_seen_outside():
    model, _ = support.lstm()
    (states, _) = [blob.decode() for blob in support.argument(support.operator(model.net), "recurrent_states").strings]
    model.net.Copy([states], ["copy"])
    assert reasons(model) == ["'{}' is seen by 'Copy' outside of it".format(states)]


def test_weights_that_are_written_between_the_passes():
    model, _ = support.lstm()
    operators = list(model.net.Proto().op)
    (position,) = [place for place, operator in enumerate(operators) if operator.type == support.GRADIENT]
    operators.insert(position, core.CreateOperator("Scale", ["layer/i2h_w"], ["layer/i2h_w"], scale=1.0))
    del model.net.Proto().op[:]
    model.net.Proto().op.extend(operators)
    assert reasons(model) == ["'layer/i2h_w' is written between its passes"]


def test_states_that_are_outputs_of_the_net():
    model, _ = support.lstm()
    (states, _) = [blob.decode() for blob in support.argument(support.operator(model.net), "recurrent_states").strings]
    model.net.Proto().external_output.append(states)
    assert reasons(model) == ["'{}' is an output of the net".format(states)]


def test_an_output_that_is_no_state():
    model, _ = support.lstm(gradients=False)
    support.operator(model.net).output.insert(0, "other")
    assert reasons(model) == ["its output 'other' is none of its states"]


def test_lengths_that_the_operator_does_not_name():
    """Steps find blobs by their names alone."""
    model, _ = support.lstm(gradients=False, lengths=True)
    support.operator(model.net).input.remove("lengths")
    assert reasons(model) == ["its steps read 'lengths', of which its operator says nothing"]


def test_a_gradient_operator_that_makes_more():
    model, _ = support.lstm()
    support.operator(model.net, support.GRADIENT).output.append("other")
    assert reasons(model) == ["its gradient operator makes 'other' too"]


def test_gradients_of_what_there_is_for_each_sequence():
    model, _ = support.lstm()
    given = support.argument(support.operator(model.net, support.GRADIENT), "param")
    given.ints[0] = list(support.operator(model.net).input).index("h0")
    assert reasons(model) == ["it has gradients of what there is for each sequence"]


def test_what_takes_no_less_time_stays_one_loop(monkeypatch):
    seconds = {parting.ONE: Seconds(0.0, 1.0), parting.PARTS: Seconds(0.0, 0.99)}
    monkeypatch.setattr(parting.loop_trial, "seconds_of", lambda *_: seconds)
    assert reasons(even_if_slower=False) == ["in parts that run side by side it would take no less time"]
    seconds[parting.PARTS] = Seconds(0.0, 0.9)
    assert reasons(even_if_slower=False) == []


def test_what_cannot_be_tried_stays_one_loop(monkeypatch):
    monkeypatch.setattr(parting.loop_trial, "seconds_of", lambda *_: "why")
    assert reasons(even_if_slower=False) == ["whether that takes less time is not known: why"]


def test_without_trials_nothing_is_parted():
    assert reasons(even_if_slower=False, trials=False) == ["in parts that run side by side it would take no less time"]


@pytest.mark.parametrize("value", [None, "2", 2.0, True], ids=repr)
def test_what_is_no_number_of_parts(value):
    model, _ = support.lstm()
    expected = "batch_parts must be a whole number; got {!r} of type {}".format(value, type(value).__name__)
    with pytest.raises(TypeError, match=re.escape(expected)):
        optimize(model, batch_parts=value)


@pytest.mark.parametrize("value", [0, -1])
def test_too_small_a_number_of_parts(value):
    model, _ = support.lstm()
    with pytest.raises(ValueError, match=re.escape("batch_parts must be 1 or more; got {}".format(value))):
        optimize(model, batch_parts=value)


# --------------------------------------------------------------------------------------------------- what is made of it


def test_products_beside_the_loop_are_parted_with_it():
    model, _ = parted(rules=[])
    kinds = [operator.type for operator in model.net.Proto().op]
    assert kinds.count("If") == 2 and not {"FC", "FCGradient", support.LOOP, support.GRADIENT}.intersection(kinds)


def test_a_sequence_gradient_for_products_behind_stays_in_parts():
    """It has as many numbers as all gates of all steps, and putting it together takes long."""
    model, _ = parted(rules=[])
    gradient = next(operator for operator in reversed(model.net.Proto().op) if operator.type == "If")
    in_parts = next(argument.n for argument in gradient.arg if argument.name == "then_net")
    made = {blob for operator in in_parts.op for blob in operator.output}
    assert {"x_grad", "part_0/layer/i2h_grad", "part_1/layer/i2h_grad"} <= made and "layer/i2h_grad" not in made


@pytest.mark.parametrize(
    "seen, blob",
    [
        (lambda net: net.Copy(["layer/i2h_grad"], ["copy"]), "copy"),
        (lambda net: net.Proto().external_output.append("layer/i2h_grad"), "layer/i2h_grad"),
    ],
    ids=["operator", "external_output"],
)
def test_a_sequence_gradient_that_is_seen_stays_one(seen, blob):
    model, _ = support.lstm()
    seen(model.net)
    expected = support.run(model, [blob])
    workspace.ResetWorkspace()
    model, _ = support.lstm()
    seen(model.net)
    assert optimize(model, [], even_if_slower=True, batch_parts=2).counts[RULE] == 1
    support.assert_same(support.run(model, [blob]), expected)


def add_in_place(net):
    """To what a product makes, so that the loop does not read the product's own result."""
    inserted("Sum", ["layer/i2h", "added"], ["layer/i2h"])(net)
    net.Proto().external_input.append("added")


def make_wait(net):
    """An operator for the product."""
    net.Copy(["h0"], ["copy"], control_input=["layer/i2h"])


@pytest.mark.parametrize("rules", [None, []], ids=["all rules", "no rules"])
@pytest.mark.parametrize("change", [add_in_place, make_wait])
def test_a_product_that_stays_whole_has_its_gradient_whole(change, rules):
    """The blobs of its steps have parts, and what it reads has none."""

    def run(**options):
        workspace.ResetWorkspace()
        model, blobs = support.lstm(gradients=False)
        added = np.random.RandomState(2).uniform(-1, 1, (support.T, support.N, 4 * support.D))
        workspace.FeedBlob("added", added.astype(np.float32))
        change(model.net)
        gradients = model.net.AddGradientOperators({blobs[0]: model.net.AddExternalInput("dh")})
        blobs += [str(gradients[blob]) for blob in ("x", "h0", "c0", *map(str, model.params))]
        if options:
            report = optimize(model, rules, even_if_slower=True, **options)
            assert report.counts[RULE] == 1, report
        return support.run(model, blobs)

    support.assert_same(run(batch_parts=2), run())


@pytest.mark.parametrize("rules", [[], ["unrolled_steps"]], ids=["loops", "unrolled"])
def test_blobs_that_gradient_operators_make_as_they_run_are_there_before(rules, unrolled_steps):
    """Two threads that make blobs in one workspace at once leave it in disorder."""
    model, _ = parted(rules=rules)
    gradients = [
        "part_{}/layer/layer/{}_t_prev_states_grad".format(part, of) for part in "01" for of in ("hidden", "cell")
    ]
    assert not any(map(workspace.HasBlob, gradients))
    workspace.CreateNet(model.net)
    assert all(map(workspace.HasBlob, gradients))


def test_names_that_begin_as_those_of_parts_would():
    model, blobs = support.lstm()
    model.net.Copy(["x"], ["part_0/x"])
    expected = support.run(model, [*blobs, "part_0/x"])
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    model.net.Copy(["x"], ["part_0/x"])
    report = optimize(model, even_if_slower=True, batch_parts=2)
    assert "part_0_1/layer/hidden_t_all" in report.loops
    support.assert_same(support.run(model, [*blobs, "part_0/x"]), expected)


def test_step_nets_that_are_text():
    """As nets made before 2018 have them."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    for operator in model.net.Proto().op:
        for argument in operator.arg:
            if argument.name in ("step_net", "backward_step_net") and argument.n.op:
                argument.s = text_format.MessageToString(argument.n).encode()
                argument.ClearField("n")
    assert optimize(model, [], even_if_slower=True, batch_parts=2).counts[RULE] == 1
    support.assert_same(support.run(model, blobs), expected)


def stack(batch_parts=1, **options):
    """Two LSTMs, the second of which reads what the first one gives."""
    model, _ = support.lstm(gradients=False)
    outputs = LSTM(model, "layer/hidden_t_all", None, ("h0", "c0"), support.D, support.D, "second")
    random = np.random.RandomState(2)
    for name, shape in (("i2h", (4 * support.D, support.D)), ("gates_t", (4 * support.D, support.D))):
        workspace.FeedBlob("second/{}_w".format(name), random.uniform(-1, 1, shape).astype(np.float32))
        workspace.FeedBlob("second/{}_b".format(name), random.uniform(-1, 1, shape[0]).astype(np.float32))
    found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
    names = ["x", *map(str, model.params)]
    report = optimize(model, batch_parts=batch_parts, **{"even_if_slower": True, **options})
    return model, [str(outputs[0]), *(str(found[name]) for name in names)], report


def test_two_loops():
    model, blobs, _ = stack()
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs, report = stack(2)
    assert report.counts[RULE] == 2
    support.assert_same(support.run(model, blobs), expected)


def test_one_of_two_loops(monkeypatch):
    """Where parts of the other one take longer."""
    model, blobs, _ = stack()
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()

    def seconds(loop, made, sizes):
        step = {parting.ONE: 1.0, parting.PARTS: 2.0 if loop.name.startswith("second") else 0.5}
        return {name: Seconds(0.0, step[name]) for name in made}

    monkeypatch.setattr(parting.loop_trial, "seconds_of", seconds)
    model, blobs, report = stack(2, even_if_slower=False)
    assert report.counts[RULE] == 1
    assert [refusal.loop for refusal in report.refusals if refusal.rule == RULE] == ["second/hidden_t_all"]
    support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------ what others see of it


@pytest.mark.parametrize("look", [describe, step_values, step_times])
def test_what_looks_into_loops_says_that_there_are_parts(look):
    model, _ = parted()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    expected = "{}: net 'model' has its batch in parts; optimize it without `batch_parts`".format(look.__name__)
    with pytest.raises(ValueError, match=re.escape(expected)):
        look(model.net)


def test_an_lstm_must_be_read_before():
    model, _ = parted()
    expected = "net 'model' has its batch in parts; it must be read before `optimize` rewrites it"
    with pytest.raises(ValueError, match=re.escape(expected)):
        lstm_to_torch(model, "layer")


def test_a_predictor_is_cut_out_of_it():
    model, blobs = parted()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    expected = support.values(blobs[:1])
    net, found = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    assert sorted(map(str, found)) == sorted(parameters())
    workspace.ResetWorkspace()
    _, blobs = support.lstm()
    workspace.CreateNet(net)
    workspace.RunNet(net, 2)
    support.assert_same(support.values(blobs[:1]), expected)


def test_inputs_are_checked_that_are_missing():
    model, _ = parted()
    with pytest.warns(UserWarning, match="has been optimised"):
        check_inputs(model.net)
    workspace.ResetWorkspace()
    with pytest.raises(ValueError, match="the workspace has no"):
        check_inputs(model.net)
