"""The rule `kept_rows`: rows of steps that are written out for one sequence, in memory that stays from run to run."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import LSTM, optimize, recurrent_net
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import opened
from caffe2_recurrent.rewriting import unrolled
from caffe2_recurrent.rewriting.emit import is_aten
from caffe2_recurrent.rewriting.products import fixed_rows
from caffe2_recurrent.rewriting.rules import kept_rows, unrolled_steps
from cells import CELLS
from every_pair import every_pair
from test_rewriting_unchanged_weights import (
    as_built,
    assert_a_predictor_needs_the_weights_alone,
    assert_other_weights_are_seen_when_created_anew,
    assert_runs_see,
    change,
)
from test_rewriting_unrolled_steps import branches

pytestmark = pytest.mark.usefixtures("unrolled_steps", "chained_steps")

RULE = "kept_rows"
FEW = ["transposed_weights", "unrolled_steps", RULE, "unchanged_weights"]
# Without those that have the product with the state by other operators than FC and FCTransposed.
MOST = [name for name in support.NAMES if name not in ("joined_sequence", "gates_first", "packed_products")]
# The product in front of the loop leaves its result in memory that stays, with the bias of that in the step.
FILTERS = ["sequence_bias", "filters_over_steps", *FEW]
RULES = pytest.mark.parametrize(
    "rules", [FEW, ["sequence_bias", *FEW], FILTERS, MOST], ids=["few", "bias", "filters", "most rules"]
)
FORWARD = {"gradients": False, "forward_only": True}
PROMISED = {"constant_weights": True, "constant_threads": True}
T, D = support.T, support.D


def lstm(rules=FEW, name="model", steps=T, **options):
    """An LSTM for one sequence whose rows stay, and its results."""
    model, blobs = support.lstm(name=name, **FORWARD, **options)
    support.without_executor(model)
    support.feed(steps, 1)
    report = optimize(model, rules, even_if_slower=True, **PROMISED)
    assert report.counts[RULE] == 1, report
    return model, blobs


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.inputs], ids=lambda cell: cell.name)
def test_cells_have_the_values_of_a_numpy_loop(cell, weights_by_name):
    with support.optimising(MOST, **PROMISED) as lines:
        support.assert_right_forwards(cell, [cell.steps - 1], batch=1)
    assert lines.counts[RULE] or {reason for rule, reason in lines.reasons if rule == RULE} == {
        "the number of sequences may be another in a later run"
    }


def test_lstms_are_among_those_cells(weights_by_name):
    cell = next(cell for cell in CELLS if cell.name == "lstm")
    with support.optimising(MOST, **PROMISED) as lines:
        cell.but(batch=1, options={**cell.options, "forward_only": True}).assert_right(executor=False)
    assert lines.counts[RULE] == 1


@every_pair
@RULES
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change_of_what_is_no_weight(rules, kind, lengths):
    """Also of the numbers of steps and sequences, to more, to fewer, and back."""
    model, blobs = lstm(rules, lengths=lengths)
    model.net.Proto().type = kind
    sizes = [(T, 2), (T, 1), (2 * T, 1), (T, 1), (2, 1), (T, 1), (1, T), (T, 1)]
    changes = [None, None, "x", "h0", "c0", *["sizes"] * 4, "x", *["sizes"] * 4, None]
    assert_runs_see(changes, model, blobs, sizes, lengths=lengths)


@RULES
def test_runs_behind_one_that_is_refused(rules):
    """Its initial states have rows of several sequences, or what it reads is not of floats."""
    model, blobs = lstm(rules)
    workspace.CreateNet(model.net)
    of_two = np.ones((1, 2, D), np.float32)
    for seed, wrong in enumerate(({}, {"h0": of_two}, {"h0": of_two, "c0": of_two}, {"x": np.ones((T, 1, 2), int)})):
        for blob, value in wrong.items():
            workspace.FeedBlob(blob, value)
        if wrong:
            with pytest.raises(RuntimeError):
                workspace.RunNet(model.net)
        support.feed(T, 1, seed=seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [1, D])
def test_runs_behind_one_whose_sequence_has_longer_rows(size, has_bias, monkeypatch):
    """Of a step net whose sequence is fed, and made by no product: it is refused, as the sum in a step refuses it."""
    monkeypatch.setattr(Sizes, "is_parameter", lambda self, blob: blob in "wb")

    def net(name):
        model = ModelHelper(name)
        step = ModelHelper(name + "_step", param_model=model)
        x, before = step.net.AddExternalInputs("x_t", "h_prev")
        if has_bias:
            product = step.net.FC([before, "w", "b"], "product", axis=2)
        else:
            # `invariants` has something to make of weights.
            twice = step.net.Scale(["w"], "twice", scale=2.0)
            product = step.net.BatchMatMul([before, twice], "product", trans_b=1, broadcast=1)
        now = step.net.Sum([product, x], "h")
        recurrent_net(
            net=model.net,
            cell_net=step.net,
            inputs=[(x, "x")],
            initial_cell_inputs=[(before, "h0")],
            links={before: now},
            scope="rnn",
            outputs_with_grads=(0,),
            forward_only=True,
        )
        return model

    random = np.random.RandomState(2)
    for blob, shape in {"x": (T, 1, size), "h0": (1, 1, size), "w": (size, size), "b": (size,)}.items():
        workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
    built, model = net("built"), net("model")
    report = optimize(model, ["invariants", *FEW], even_if_slower=True, **PROMISED)
    assert report.counts[RULE] == 1, report
    workspace.CreateNet(model.net)
    for columns in (size, size + 1, size):
        workspace.FeedBlob("x", random.uniform(-1, 1, (T, 1, columns)).astype(np.float32))
        if columns != size:
            with pytest.raises(RuntimeError):
                workspace.RunNet(model.net)
            continue
        workspace.RunNet(model.net)
        found = workspace.FetchBlob("h_all")
        workspace.RunNetOnce(built.net)
        np.testing.assert_allclose(found, workspace.FetchBlob("h_all"), atol=support.TOLERANCE)


@RULES
def test_nets_of_a_workspace_that_leave_the_same_blobs(rules):
    """Two of them for other numbers of steps, two alike, and one as it was built."""
    nets = []
    for name, steps in (("one", T), ("two", 5), ("three", T)):
        model, blobs = lstm(rules, name, steps)
        nets.append(model.net)
    nets.append(support.lstm(name="as_built", **FORWARD)[0].net)
    for net in nets:
        support.feed(T, 1)
        workspace.CreateNet(net)
    order = [(0, T), (1, T), (1, 5), (0, T), (2, T), (0, T), (3, 2 * T), (0, T), (3, 2), (2, T), (0, 5), (1, 5), (0, T)]
    for seed, (number, steps) in enumerate(order):
        support.feed(steps, 1, seed=seed)
        workspace.RunNet(nets[number])
        support.assert_same(support.values(blobs), as_built(blobs))


@pytest.mark.parametrize("size", [(T, 1, D), (T + 5, 3, D), (1,)], ids=str)
def test_runs_behind_something_that_is_fed_into_what_they_leave(size):
    model, blobs = lstm()
    workspace.CreateNet(model.net)
    for seed in range(3):
        for blob in blobs:
            workspace.FeedBlob(blob, np.full(size, 7, np.float32))
        support.feed(T, 1, seed=seed)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), as_built(blobs))


@pytest.mark.parametrize(
    "rules, blob", [(FEW, "hidden_t_prev_states"), (FILTERS, "i2h_with_bias")], ids=["few", "filters"]
)
@pytest.mark.parametrize("planted", ["rows in another order", "another row"])
def test_wrong_views_are_seen(planted, rules, blob):
    """What the tests above compare would not pass over these."""
    model, blobs = lstm(rules)
    views = [operator for operator in opened(model.net.Proto().op) if is_aten(operator, "narrow")]
    of_blob = [operator for operator in views if blob in operator.output[0]]
    if planted == "rows in another order":
        of_blob[0].output[0], of_blob[1].output[0] = of_blob[1].output[0], of_blob[0].output[0]
    else:
        start, length = (support.argument(of_blob[2], name) for name in ("start", "length"))
        start.i += length.i
    with pytest.raises(AssertionError):
        assert_runs_see([None], model, blobs)


def test_other_weights_are_seen_by_a_net_that_is_created_anew():
    assert_other_weights_are_seen_when_created_anew(*lstm(MOST))


# ------------------------------------------------------------------------------------------------------------ the net


@pytest.mark.parametrize("bias", [[], ["sequence_bias"]], ids=["", "bias"])
def test_nothing_is_taken_apart_or_put_together_in_a_run(bias):
    model, _ = lstm([*bias, *FEW])
    ((steps, _),) = branches(model.net)
    kinds = [operator.type for operator in steps.op]
    assert "Split" not in kinds
    assert "Concat" not in kinds
    rows = {blob for operator in steps.op for blob in operator.output if "prev_states_" in blob}
    made = {blob for guard in model.net.Proto().op if laid_out_when_changed(guard) for blob in guard.output}
    assert len(rows - made) == 2  # the initial ones
    assert len(rows & made) == 2 * T


def test_what_a_product_leaves_in_memory_is_not_copied():
    """Where it has done so is what decides about the steps as well."""
    model, _ = lstm(FILTERS)
    ((steps, _),) = branches(model.net)
    assert "Add" not in {operator.type for operator in steps.op}
    assert not {"And", "Shape"}.intersection(_between(model.net, fixed_rows.NET, unrolled.NET))
    conditions = {net.name: operator.input[0] for operator, net in _chosen(model.net)}
    assert conditions[unrolled.NET] == conditions[fixed_rows.NET]


def test_what_a_product_leaves_is_copied_where_a_bias_is_to_be_added():
    model, _ = lstm([rule for rule in FILTERS if rule != "sequence_bias"])
    ((steps, _),) = branches(model.net)
    assert "Add" in {operator.type for operator in steps.op}
    assert "And" in _between(model.net, fixed_rows.NET, unrolled.NET)


def _chosen(net):
    """Operators that run one of two nets, with the net that they run if what they ask is so."""
    operators = [operator for operator in net.Proto().op if operator.type == "If"]
    return [(operator, support.argument(operator, "then_net").n) for operator in operators]


def _between(net, first, last):
    """The types of the operators behind the one that runs a net of the name `first` and in front of that of `last`."""
    runs = {inner.name: operator for operator, inner in _chosen(net)}
    operators = list(net.Proto().op)
    return [operator.type for operator in operators[operators.index(runs[first]) + 1 : operators.index(runs[last])]]


@RULES
def test_nothing_is_left_for_a_second_time(rules):
    model, _ = lstm(rules)
    before = model.net.Proto().SerializeToString()
    assert optimize(model, rules, even_if_slower=True, **PROMISED).total == 0
    assert model.net.Proto().SerializeToString() == before


def test_a_predictor_needs_the_weights_alone():
    assert_a_predictor_needs_the_weights_alone(*lstm(MOST))


def test_two_layers():
    found = []
    for rewrite in (False, True):
        workspace.ResetWorkspace()
        model, outputs = ModelHelper("model"), ["x"]
        for name, size in (("first", support.DIM_IN), ("second", D)):
            outputs = LSTM(model, outputs[0], None, ("h0", "c0"), size, D, name, forward_only=True)
        support.feed(T, 1)
        workspace.RunNetOnce(model.param_init_net)
        for number, parameter in enumerate(map(str, model.params)):
            change(parameter, number)
        if rewrite:
            # A trial of the executor might leave one a loop.
            support.without_executor(model)
            assert optimize(model, MOST, even_if_slower=True, **PROMISED).counts[RULE] == 2
        workspace.CreateNet(model.net)
        workspace.RunNet(model.net, 2)
        found.append(support.values(map(str, outputs)))
    support.assert_same(found[1], found[0])


def test_values_that_something_reads_from_the_initial_ones_on_are_put_together():
    states = "layer/layer/hidden_t_prev_states"
    model, blobs = support.lstm(**FORWARD)
    model.net.Proto().op.extend([core.CreateOperator("Copy", [states], ["copied"])])
    # The engine's operator does not say that it writes to them.
    model.net.Proto().external_input.append(states)
    workspace.CreateBlob(states)
    support.feed(T, 1)
    report = optimize(model, FEW, even_if_slower=True, **PROMISED)
    assert report.counts[RULE] == 1
    ((steps, _),) = branches(model.net)
    assert [operator.output[0] for operator in steps.op if operator.type == "Concat"] == [states]
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 2)
    support.assert_same(support.values(blobs), as_built(blobs))
    np.testing.assert_array_equal(workspace.FetchBlob("copied")[1:], workspace.FetchBlob(blobs[0]))


# ------------------------------------------------------------------------------------------------------------ refusals


def reason(model, rules=FEW, **promised):
    report = optimize(model, rules, dry_run=True, even_if_slower=True, **{**PROMISED, **promised})
    (found,) = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    return found


def one_sequence(**options):
    model, _ = support.lstm(**options)
    support.feed(T, 1)
    return model


def test_a_loop_that_is_trained():
    found = reason(one_sequence(), ["parameter_gradients", *FEW])
    assert found == "it is trained, and its weights change from run to run"


def test_weights_that_are_not_said_to_stay():
    assert reason(one_sequence(**FORWARD), constant_weights=False) == "its weights may be others in a later run"


def test_several_sequences():
    found = reason(support.lstm(**FORWARD)[0])
    assert found == "the number of sequences may be another in a later run"


def test_nothing_that_is_made_of_weights():
    found = reason(one_sequence(**FORWARD), FEW[1:])
    assert found == "nothing is made of weights in its first run"


def test_sizes_that_are_not_known(monkeypatch):
    for name in ("_sequences", "_states"):
        monkeypatch.setattr(kept_rows, name, lambda *_: {})
    assert reason(one_sequence(**FORWARD)) == "of no sequence and no state are the sizes known"


def test_rows_that_are_written_in_a_shape_that_is_not_known(monkeypatch):
    """They are put together as before."""
    monkeypatch.setattr(unrolled_steps, "_shapeless", lambda loop, _: frozenset(link.inner for link in loop.links))
    model, blobs = lstm()
    ((steps, _),) = branches(model.net)
    assert [operator.type for operator in steps.op].count("Concat") == 2
    assert_runs_see([None, "x"], model, blobs)
