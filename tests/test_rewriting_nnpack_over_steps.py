"""The rule `nnpack_over_steps`: the product that makes a sequence of a loop that serves, by NNPACK."""

import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import GRU, LSTM, optimize
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.operator_arguments import nets_of
from caffe2_recurrent.operators import opened
from caffe2_recurrent.rewriting.products import nnpack, separate_rows
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from caffe2_recurrent.rewriting.rules import nnpack_over_steps
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from cells import CELLS
from every_pair import every_pair
from test_rewriting_packed_products import assert_rows_stay_apart
from test_rewriting_unchanged_weights import as_built, assert_runs_see, change, parameters

RULE = "nnpack_over_steps"
ALONE = [RULE, "unchanged_weights"]
# oneDNN's products come before it.
ALL = [name for name in support.NAMES if name not in ("products_over_steps", "joined_sequence", "gates_first")]
RULES = pytest.mark.parametrize("rules", [ALONE, ALL], ids=["alone", "all rules"])
FORWARD = {"gradients": False, "forward_only": True}

pytestmark = pytest.mark.usefixtures("nnpack_products")


def by_nnpack(rules=ALONE, constant_weights=False, **options):
    """An LSTM whose sequence is NNPACK's, and its results."""
    model, blobs = support.lstm(**FORWARD, **options)
    report = optimize(model, rules, even_if_slower=True, constant_weights=constant_weights)
    assert report.counts[RULE] == 1, report
    return model, blobs


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_of_a_numpy_loop(cell, weights_by_name):
    with support.optimising(ALL) as lines:
        support.assert_right_forwards(cell, [cell.steps, 1])
    assert lines.counts[RULE] >= 2, lines.reasons


@every_pair
@RULES
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
def test_runs_see_each_change(rules, kind, lengths):
    """Of a weight, and of the numbers of steps and sequences; none is a number too."""
    model, blobs = by_nnpack(rules, lengths=lengths)
    model.net.Proto().type = kind
    support.without_executor(model)
    sizes = [(2, 1), (14, 17), (1, 2), (14, 5)]
    changes = [None, None, *parameters(), "x", "sizes", "sizes", *parameters(), *["sizes"] * 2]
    assert_runs_see(changes, model, blobs, sizes, lengths=lengths)


@pytest.mark.parametrize("constant_weights", [False, True])
def test_no_steps(constant_weights):
    model, blobs = by_nnpack(constant_weights=constant_weights)
    support.without_executor(model)
    workspace.CreateNet(model.net)
    for steps in (3, 0, 3):
        support.feed(steps=steps)
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs[1::2]), as_built(blobs[1::2]))


def test_without_a_net_for_no_steps_it_would_fail():
    """NNPACK does not take so many filters; the test above would see it."""
    model, _ = by_nnpack()
    (guard,) = [made for made in model.net.Proto().op if any(inner.name == "nnpack" for inner in nets_of(made))]
    support.argument(guard, "else_net").n.CopyFrom(support.argument(guard, "then_net").n)
    support.feed(steps=0)
    with pytest.raises(RuntimeError, match="NNPACK"):
        workspace.RunNetOnce(model.net)


def test_rows_that_are_no_numbers():
    model, blobs = by_nnpack(ALL)
    assert_rows_stay_apart(model, blobs, as_built(blobs))


@pytest.mark.parametrize("planted", ["no bias", "another layout"])
def test_a_wrong_product_is_seen(planted):
    model, blobs = by_nnpack()
    for operator in opened(model.net.Proto().op):
        if planted == "no bias" and operator.type == "Add":
            operator.CopyFrom(core.CreateOperator("Scale", list(operator.input[:1]), list(operator.output), scale=1.0))
        if planted == "another layout" and operator.type == "Transpose":
            shape = {"shape": [2, 16]}
            operator.CopyFrom(
                core.CreateOperator("Reshape", list(operator.input), [operator.output[0], "old"], **shape)
            )
    change("layer/i2h_b", 3)
    assert support.difference(support.run(model, blobs)[0][0], as_built(blobs)[0][0]) > support.TOLERANCE


# ------------------------------------------------------------------------------------------------------------ the net


@RULES
def test_weights_are_laid_out_when_they_have_changed(rules):
    model, _ = by_nnpack(rules)
    net = model.net.Proto()
    convolving = [operator for operator in opened(net.op) if nnpack.is_by_nnpack(operator)]
    (guard,) = [operator for operator in net.op if laid_out_when_changed(operator)]
    assert [operator.input[0] for operator in convolving if operator.input[0] in guard.output]
    # The FC is there for no steps alone.
    assert "FC" not in [operator.type for operator in net.op]


@RULES
def test_nothing_is_left_for_a_second_time(rules):
    model, _ = by_nnpack(rules)
    before = model.net.Proto().SerializeToString()
    assert optimize(model, rules, even_if_slower=True).total == 0
    assert model.net.Proto().SerializeToString() == before


@pytest.mark.parametrize("layer", [LSTM, GRU], ids=lambda layer: layer.__name__)
def test_two_layers(layer):
    model = ModelHelper("model")
    layer(model, "x", None, None, 3, [4, 4], "layers", forward_only=True)
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    assert optimize(model, ALL, even_if_slower=True).counts[RULE] == 2


# ------------------------------------------------------------------------------------------------------------ refusals


def reason(model, rules=ALONE, **options):
    report = optimize(model, rules, dry_run=True, **{"even_if_slower": True, **options})
    (found,) = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    return found


def test_a_loop_that_is_trained():
    found = reason(support.lstm()[0])
    assert found == "its weights 'layer/i2h_w' may be others in each run"


def test_weights_that_the_net_makes():
    model, _ = support.lstm(**FORWARD)
    model.net.Scale(["layer/i2h_w"], "layer/i2h_w", scale=1.0)
    assert reason(model) == "its weights 'layer/i2h_w' may be others in each run"


def test_without_the_rule_that_keeps_what_is_made_of_weights():
    found = reason(support.lstm(**FORWARD)[0], [RULE])
    assert found == "its weights 'layer/i2h_w' may be others in each run"


def test_a_sequence_that_others_read():
    model, _ = support.lstm(**FORWARD)
    model.net.Copy(["layer/i2h"], "seen")
    assert reason(model) == "'layer/i2h' is not made for this loop alone"


def test_a_caffe2_without_nnpack(monkeypatch):
    monkeypatch.setattr(nnpack, "is_missing", lambda: True)
    assert reason(support.lstm(**FORWARD)[0]) == "this Caffe2 has no NNPACK"


def test_loops_that_run_at_once():
    model = ModelHelper("model")
    for scope in "ab":
        LSTM(model, "x", None, None, 3, 4, scope, forward_only=True)
    support.feed()
    workspace.RunNetOnce(model.param_init_net)
    model.net.Proto().type = "dag"
    report = optimize(model, ALONE, even_if_slower=True)
    found = {refusal.reason for refusal in report.refusals if refusal.rule == RULE}
    assert found == {"another loop may run at the same time, and products by NNPACK have no memory of their own"}


def test_rows_that_would_not_stay_apart(monkeypatch):
    monkeypatch.setattr(separate_rows, "in_steps", lambda *_: False)
    found = reason(support.lstm(**FORWARD)[0])
    assert found == "in NNPACK's products with [2, 16] what is no number would reach other rows"


def test_weights_of_unknown_size():
    model, _ = support.lstm(**FORWARD)
    proto = support.as_read_from_a_file(model.net)
    workspace.ResetWorkspace()
    assert reason(proto) == "the size of its weights 'layer/i2h_w' is not known; give shapes"


def test_a_number_of_rows_that_is_not_known():
    model, _ = support.lstm(**FORWARD)
    weights = {name: workspace.FetchBlob(name).shape for name in parameters()}
    workspace.ResetWorkspace()
    found = reason(model, shapes=weights, even_if_slower=False)
    assert found == "the numbers of steps and sequences are not known; give shapes"


@pytest.mark.parametrize("seconds, comparing, is_taken", [(2.0, 0.0, False), (1.0, 0.0, True), (1.0, 1.0, False)])
def test_a_trial_decides(monkeypatch, seconds, comparing, is_taken):
    """To see that weights have not changed is a price of laying them out."""
    others, by_nnpack = Seconds(0.0, 2.0), Seconds(0.0, seconds)
    monkeypatch.setattr(trial, "in_turn", lambda ways: {way: by_nnpack if way == NNPACK else others for way in ways})
    monkeypatch.setattr(nnpack_over_steps, "seconds_of_comparing", lambda *_: comparing)
    model, _ = support.lstm(**FORWARD)
    trial.forget()
    report = optimize(model, [RULE, "unchanged_weights"], dry_run=True)
    assert report.counts[RULE] == is_taken
    found = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    assert found == ([] if is_taken else ["for [27, 2] x [2, 16] NNPACK is not faster"])
    trial.forget()
