"""The rule `backward_loop`: the backward pass as a loop of its own, and two workspaces for the steps of both."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import caffe2_recurrent
import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import GRU, LSTM, check_gradients, optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import LINK, is_backward_of
from caffe2_recurrent.rewriting import backward_pass
from caffe2_recurrent.rewriting.steps import step_counts
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

pytestmark = pytest.mark.usefixtures("backward_loops")

RULE = "backward_loop"
# What has to be out of the loop, or known, before it.
ALONE = ["parameter_gradients", RULE]
ALL_STEP_NETS = step_nets.AS_CAFFE2 + step_nets.MENDED
EVERY_CELL = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
EVERY_STEP_NET = pytest.mark.parametrize("make", ALL_STEP_NETS, ids=lambda make: make.__name__)
RULES = pytest.mark.parametrize("rules", [ALONE, None], ids=["alone", "all rules"])
OTHERS = [name for name in support.NAMES if name != RULE]


def turned(**options):
    """An LSTM whose backward pass is a loop of its own, and what must stay what it is."""
    model, blobs = support.lstm(**options)
    assert optimize(model, even_if_slower=True).counts[RULE] == 1
    return model, blobs


@pytest.mark.parametrize("batch", [4, 1], ids=["as many sequences as columns", "one sequence"])
def test_blobs_that_are_turned_and_look_as_if_they_were_not(batch):
    """`[1, D, N]`, which is `[1, N, D]` for the sizes at hand alone: it has no place among the rows of all steps."""

    def run(optimised_for):
        net, step = core.Net("net"), core.Net("turned")
        x, h = step.AddExternalInputs("x_t", "h_prev")
        seen = step.Tanh(step.Transpose(step.Softmax(h, "p", axis=2), "q", axes=[0, 2, 1]), "seen")
        product = step.Transpose(step.Mul([seen, step.Sigmoid(seen, "gate")], "gated"), "back", axes=[0, 2, 1])
        out = step.Tanh(step.Sum([product, x, h], "total"), "h_t")
        step.AddExternalOutput(out)
        hidden, _ = recurrent_net(net, step, [(x, "x")], [(h, "h0")], {h: out}, outputs_with_grads="auto")
        gradients = net.AddGradientOperators([net.SumElements(net.Sqr(hidden, "squared"), "loss")])
        comparing.configure(net, False)
        for sequences in (optimised_for, 6):
            random = np.random.RandomState(sequences)
            for blob, shape in {"x": (9, sequences, 4), "h0": (1, sequences, 4)}.items():
                workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
            if optimised_for != 6 and sequences == optimised_for:
                optimize(net, even_if_slower=True, trials=False)
        workspace.RunNetOnce(net)
        return [workspace.FetchBlob(blob) for blob in (hidden, gradients["x"], gradients["h0"])]

    for found, right in zip(run(batch), run(6)):
        np.testing.assert_allclose(found, right, atol=2e-5)


def test_neither_of_its_loops_is_rewritten_again():
    model, _ = turned()
    report = optimize(model, even_if_slower=True)
    assert report.total == 0
    assert [refusal.reason for refusal in report.refusals] == [
        "its backward pass has been made a loop of its own, which fits its steps as they are",
        "it is a backward pass that has been made a loop of its own",
    ]


def kinds(net):
    return [operator.type for operator in net.Proto().op if operator.type in (support.LOOP, support.GRADIENT)]


def test_nothing_is_made_for_a_shape_that_only_the_engines_gradient_operator_needs():
    """With all rules the loop is over x, and no sequence is there that the gradient has the shape of."""
    for rules, is_made in ((OTHERS, True), (support.NAMES, False)):
        workspace.ResetWorkspace()
        model, _ = support.lstm()
        counts = optimize(model, rules, even_if_slower=True).counts
        assert (counts["joined_sequence"], counts.get(RULE, 0)) == (1, 0 if is_made else 1)
        made = [blob for operator in model.net.Proto().op for blob in operator.output]
        assert ("layer/like_sequence" in made) == ("layer/sequence_shape" in made) == is_made


# ------------------------------------------------------------------------------------------------ values and gradients


@EVERY_CELL
@RULES
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, rules):
    fired, reasons = support.fired_on(cell, rules, RULE)
    assert fired or cell.name.startswith("attention") or (rules and "gru" in cell.name), reasons


@every_pair
@EVERY_STEP_NET
@RULES
@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make, rules, executor):
    """Also where somebody turns the executor on for all loops that can have it."""
    with support.optimising(rules):
        comparing.assert_right(recurrent_net, make(), executor=executor)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), st.booleans(), chosen_rules)
def test_random_step_nets(seed, sequences, executor, rules):
    assert_step_net_right(seed, sequences, executor, None if rules is None else {*rules, RULE})


@settings(max_examples=25)
@given(st.data(), st.booleans(), chosen_rules)
def test_random_sizes_lengths_options_and_rules_of_cells(data, executor, rules):
    assert_drawn_cell_right(data, executor, None if rules is None else {*rules, *ALONE})


def test_it_finds_something_to_do_in_random_step_nets():
    assert_found_in_random_step_nets(lambda lines: lines.counts[RULE] >= 5, executor=False)


def test_an_error_in_the_turning_is_found(monkeypatch):
    """Backward steps see what belongs to the step of the same number."""
    right = backward_pass.links
    monkeypatch.setattr(backward_pass, "links", lambda loop: [link._replace(offset=0) for link in right(loop)])
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    model, blobs = turned()
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------------------- its nets


@support.EVERY_LSTM
def test_what_there_is_after_it(options):
    model, blobs = support.lstm(**options)
    expected = support.run(model, blobs)
    model, blobs = turned(**options)
    assert kinds(model.net) == [support.LOOP, support.LOOP]
    support.assert_done(model.net)
    support.assert_same(support.run(model, blobs), expected)
    forward, backward = (operator for operator in model.net.Proto().op if operator.type == support.LOOP)
    assert backward.is_gradient_op and not forward.is_gradient_op
    assert is_backward_of(backward, forward) and not is_backward_of(forward, forward)
    assert "backward_step_net" not in [given.name for given in forward.arg]
    assert "enable_rnn_executor" not in [given.name for given in backward.arg]
    # What the engine would not create: it has a schema for both operators.
    assert set(backward.input).isdisjoint(backward.output)


def test_gradients_that_reach_it_are_not_reported_as_dropped():
    model, _ = turned()
    check_gradients(model, {"layer/hidden_t_all": "dh"})


def test_steps_take_turns_in_two_workspaces():
    model, _ = turned()
    support.run(model, [])
    for loop in read_loops(model.net.Proto()).values():
        workspace.RunOperatorOnce(
            core.CreateOperator("RecurrentNetworkBlobFetcher", [loop.workspaces], ["kept"], prefix="kept")
        )
        assert {name.decode()[-1] for name in workspace.FetchBlob("kept")} <= set("01")


def test_runs_of_other_sizes():
    def change(model):
        assert optimize(model, even_if_slower=True).counts[RULE] == 1

    for options in ({}, {"lengths": True}):
        expected = support.runs_of_other_sizes(lambda model: None, **options)
        support.assert_same(support.runs_of_other_sizes(change, **options), expected)


def test_a_run_without_steps():
    expected = support.run_without_steps(lambda model: None)

    def change(model):
        assert optimize(model, OTHERS[:1] + ALONE, even_if_slower=True).counts[RULE] == 1

    support.assert_same(support.run_without_steps(change), expected)


@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_layers_in_nets_that_run_operators_side_by_side(kind):
    def build():
        workspace.ResetWorkspace()
        model = ModelHelper("layers")
        below, *_ = LSTM(model, "x", None, ("h0", "c0"), support.DIM_IN, support.D, "below")
        beside, *_ = GRU(model, "x", None, ("h0",), support.DIM_IN, support.D, "beside")
        above, *_ = LSTM(model, model.net.Sum([below, beside], "sum"), None, None, support.D, support.D, "above")
        found = model.AddGradientOperators({above: model.net.AddExternalInput("dh")})
        workspace.RunNetOnce(model.param_init_net)
        support.feed()
        feed_parameters(model, 5)
        return model, [str(above), *(str(found[name]) for name in ("x", "h0", "c0", *map(str, model.params)))]

    # As built it would be the engine that fails now and then: its gradient operators make blobs as they first run.
    expected = support.run(*build())
    model, blobs = build()
    model.net.Proto().type = kind
    assert optimize(model, even_if_slower=True).counts[RULE] == 3
    support.assert_done(model.net)
    for _ in range(5):
        support.assert_same(support.run(model, blobs), expected)


def test_gradients_of_all_values_and_of_the_last():
    """And of the state that nobody looks at; initial states of one value for all sequences, one of them shared."""

    def build():
        workspace.ResetWorkspace()
        model = ModelHelper("model")
        outputs = LSTM(model, "x", None, ("h", "h"), support.DIM_IN, support.D, "layer", outputs_with_grads="auto")
        loss = model.net.Sum(
            [model.net.SumElements(model.net.Mul([outputs[0], "dh"])), model.net.SumElements(outputs[3])], "loss"
        )
        found = model.AddGradientOperators([loss])
        support.feed()
        workspace.RunNetOnce(model.param_init_net)
        feed_parameters(model, 5)
        workspace.FeedBlob("h", np.linspace(-1, 1, support.D).astype(np.float32))
        return model, [str(outputs[0]), *(str(found[name]) for name in ("x", "h", *map(str, model.params)))]

    expected = support.run(*build())
    model, blobs = build()
    assert optimize(model, even_if_slower=True).counts[RULE] == 1
    support.assert_same(support.run(model, blobs), expected)


def test_it_runs_beside_the_net_as_it_was():
    """Step workspaces outlive their net, in the same workspace under the same name."""
    plain, blobs = support.lstm(name="plain")
    expected = support.run(plain, blobs)
    nets = [plain, turned(name="plain")[0], support.lstm(name="plain")[0]]
    optimize(nets[2], OTHERS, even_if_slower=True)
    for first in nets:
        for second in nets:
            support.run(first, blobs)
            support.assert_same(support.run(second, blobs), expected)


def test_a_run_behind_one_of_the_net_as_it_was_with_fewer_steps():
    """The engine leaves gradients of initial values as views of memory that the loop lets go of when it needs more."""
    plain, blobs = support.lstm(name="plain")
    expected = support.run(plain, blobs)
    support.feed(steps=2)
    support.run(plain, blobs)
    model, blobs = turned(name="plain")
    support.assert_same(support.run(model, blobs), expected)
    writers = {blob: operator.type for operator in model.net.Proto().op for blob in operator.output}
    # It puts another tensor in the place of the one that was there.
    assert [writers[gradient] for gradient in ("h0_grad", "c0_grad")] == ["Alias", "Alias"]


def test_an_installed_package_makes_them(monkeypatch):
    monkeypatch.setattr(step_counts, "FEW", 1)
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    with caffe2_recurrent.install(optimize=True, trials=False):
        support.assert_same(support.run(model, blobs), expected)


def test_a_sequence_that_is_read_beside_the_loop_too():
    def build():
        workspace.ResetWorkspace()
        random = np.random.RandomState(0)
        net, step = core.Net("net"), core.Net("step")
        net.Proto().type = "dag"
        for name, size in {"x": (6, 2, 3), "h0": (2, 3), "w": (3, 3), "b": (3,)}.items():
            workspace.FeedBlob(name, random.randn(*size).astype(np.float32))
        beside = net.SumElements(net.Sqr("x", "squared"), "beside")
        x_t, h_prev, w, b = step.AddExternalInputs("x_t", "h_prev", "w", "b")
        h_t = step.Tanh(step.Sum([step.FC([h_prev, w, b], "u", axis=2), x_t], "z"), "h_t")
        h_all, _ = recurrent_net(
            net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t}, scope="loop", outputs_with_grads="auto"
        )
        loss = net.Sum([beside, net.SumElements(h_all, "of_loop")], "loss")
        found = net.AddGradientOperators([loss])
        return net, [str(found[name]) for name in ("x", "h0", "w", "b")]

    def values(net, blobs):
        workspace.RunNetOnce(net)
        return support.values(blobs)

    expected = values(*build())
    net, blobs = build()
    assert optimize(net, ALONE, even_if_slower=True).counts[RULE] == 1
    (adding,) = [operator for operator in net.Proto().op if operator.type == "Sum" and "x_grad" in operator.output]
    assert "w_grad" in adding.control_input
    for _ in range(20):
        support.assert_same(values(net, blobs), expected)


def test_a_tensor_of_atens_is_copied_to_a_slice():
    model = ModelHelper("gru")
    outputs = GRU(model, "x", None, ("h0",), support.DIM_IN, support.D, "layer")
    model.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
    shapes = {"x": (support.T, support.N, support.DIM_IN), "h0": (support.N, support.D)}
    assert optimize(model, shapes=shapes, even_if_slower=True).counts[RULE] == 1
    for loop in read_loops(model.net.Proto()).values():
        of_aten = {blob for operator in loop.operators if operator.type == "ATen" for blob in operator.output}
        linked = {link.inner for link in loop.links}
        shown = [operator.output[0] for operator in loop.operators if operator.type == LINK]
        assert of_aten.isdisjoint(linked.union(shown))
    forward, _ = read_loops(model.net.Proto()).values()
    assert [op for op in forward.operators if op.type == "Copy" and op.input[0].endswith("_made")]


def test_what_looks_at_loops():
    model, blobs = turned()
    support.run(model, blobs)
    with pytest.raises(
        ValueError, match=r"has 2 loops; say which one by loop=: 0 \('layer/hidden_t_all'\), 1 \('layer/layer/i2h_grad'"
    ):
        caffe2_recurrent.step_times(model)
    for loop in (0, 1):
        assert caffe2_recurrent.step_times(model, loop=loop, runs=1).steps == support.T
        with pytest.raises(ValueError, match="optimize it without the rule 'backward_loop'"):
            caffe2_recurrent.step_values(model, loop=loop)
    assert ": 2 loops" in str(caffe2_recurrent.describe(model))
    assert len(caffe2_recurrent.retrieve_step_blobs(model.net, "kept"))
    prediction = caffe2_recurrent.prediction_net(model, ["x"], ["layer/hidden_t_all"])
    assert kinds(prediction.net) == [support.LOOP]


def test_no_more_gradient_operators():
    model, _ = turned()
    with pytest.raises(Exception, match="without a backward step"):
        model.net.AddGradientOperators(["layer/hidden_t_all"])


# --------------------------------------------------------------------------------------------------------- what it says


def test_few_operators():
    shapes = {"x": (support.T, support.N, support.DIM_IN)}
    report = optimize(support.lstm()[0], ALONE, shapes=shapes, trials=False)
    (reason,) = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    assert reason.endswith("operators and links of all steps are few, and a trial has not found that it pays")
    long = {"x": (100, support.N, support.DIM_IN)}
    assert optimize(support.lstm()[0], ALONE, shapes=long, trials=False).counts[RULE] == 1


def test_gradients_that_are_added_up_in_the_loop():
    model, _ = support.lstm()
    assert support.reasons(model.net, RULE) == ["steps add up the gradient of 'layer/gates_t_w'"]


def test_threads_that_somebody_has_given():
    model, _ = support.lstm()
    for operator in model.net.Proto().op:
        if operator.type in (support.LOOP, support.GRADIENT):
            caffe2_recurrent.set_rnn_executor_config(operator, num_threads=2)
    report = optimize(model, ALONE, even_if_slower=True)
    assert [refusal.reason for refusal in report.refusals if refusal.rule == RULE] == [
        "the RNN executor runs its steps, with 2 threads"
    ]


# Without a parameter; the step keeps 'xh' and the slices of X and of the state.
def kept_in_steps():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.cell.Sigmoid(make.cell.Mul([x, h], "xh"), "s"), "h_t"))
    return make.done()


def loop_and_sizes(*unknown):
    step_net = kept_in_steps()
    net, outputs = comparing.build(recurrent_net, step_net)
    net.AddGradientOperators([outputs[0]])
    (loop,) = read_loops(net.Proto()).values()
    return loop, Sizes({name: value.shape for name, value in step_net.outer.items() if name not in unknown})


def refusal(loop, sizes):
    (site,) = support.rule(RULE).sites(loop)
    return support.rule(RULE).refusal(loop, site, sizes)


def test_what_is_known_is_not_refused():
    assert refusal(*loop_and_sizes()) is None


def test_sizes_that_are_not_known():
    assert refusal(*loop_and_sizes("h_initial")) == (
        "the initial state 'h_initial' is not known to be one value; give shapes"
    )
    assert refusal(*loop_and_sizes("X")) == "the shape of the sequence 'X' is not known; give shapes"
    loop, sizes = loop_and_sizes("X")
    assert support.rule(RULE).loss(loop, None, sizes) == "the number of steps is not known; give shapes"
    loop, sizes = loop_and_sizes()
    sizes.set("h_initial", (2, 2, 3))
    assert "not known to be one value" in refusal(loop, sizes)


def test_states_whose_gradient_is_not_passed_on():
    loop, sizes = loop_and_sizes()
    (state,) = loop.states
    loop.gradient.backward_links[:] = [link for link in loop.gradient.backward_links if link.offset != 1]
    assert refusal(loop, sizes) == "the backward step does not pass on the gradient of '{}'".format(state.outer_states)


def test_gradients_of_states_that_others_read():
    with support.optimising(ALONE) as lines:
        comparing.run(recurrent_net, step_nets.value_read_before_it_is_added_to(), executor=False)
    (reason,) = [reason for name, reason in lines.reasons if name == RULE]
    assert reason.startswith("other operators read '") and reason.endswith("_grad', in the order of the steps")


def test_slices_that_the_backward_step_writes_to():
    loop, sizes = loop_and_sizes()
    loop.gradient.links.clear()
    loop.gradient.operators.append(core.CreateOperator("Copy", ["x_t_grad"], ["x_t"]))
    assert refusal(loop, sizes) == "the backward step writes to 'x_t'"


@pytest.mark.parametrize("kind, inputs", [("Relu", ["x_t"]), ("ATen", ["s"])])
def test_blobs_that_are_written_anew(kind, inputs):
    loop, sizes = loop_and_sizes()
    loop.operators.append(core.CreateOperator(kind, inputs, ["s"]))
    assert refusal(loop, sizes) == "'s' is written anew, or shows another blob"


def test_blobs_that_show_another():
    loop, sizes = loop_and_sizes()
    (position,) = [index for index, operator in enumerate(loop.operators) if "s" in operator.output]
    loop.operators[position] = core.CreateOperator("Alias", ["xh"], ["s"])
    assert refusal(loop, sizes) == "'s' is written anew, or shows another blob"


def test_blobs_whose_shape_is_not_known():
    loop, sizes = loop_and_sizes()
    (position,) = [index for index, operator in enumerate(loop.operators) if "s" in operator.output]
    loop.operators[position] = core.CreateOperator("Unknown", ["xh"], ["s"])
    assert refusal(loop, sizes) == "each step keeps 's', which is not known to be a row of floats for each sequence"


def test_blobs_of_other_types():
    """A slice is one of floats; what else is written to it would lie elsewhere."""

    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    dropped, _ = make.cell.Dropout(make.cell.Mul([x, h], "xh"), ["dropped", "mask"], ratio=0.5, is_test=0)
    make.link(h, make.cell.Tanh(dropped, "h_t"))
    step_net = make.done()
    net, outputs = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    net.AddGradientOperators([outputs[0]])
    assert support.reasons(net, RULE) == [
        "each step keeps 'mask', which is not known to be a row of floats for each sequence"
    ]


def test_a_gradient_from_outside_in_another_shape(monkeypatch):
    """The engine's operator looks at the number of elements alone."""
    for without_aten in (False, True):
        workspace.ResetWorkspace()
        model, blobs = support.lstm()
        workspace.FeedBlob("dh", workspace.FetchBlob("dh").reshape(support.T * support.N, support.D))
        expected = support.run(model, blobs)
        if without_aten:
            support.without_aten(monkeypatch)
            monkeypatch.setattr(backward_pass, "aten_is_missing", lambda: True)
        model, blobs = turned()
        workspace.FeedBlob("dh", workspace.FetchBlob("dh").reshape(support.T * support.N, support.D))
        assert ("view_as" in str(model.net.Proto())) == (not without_aten)
        support.assert_same(support.run(model, blobs), expected)
