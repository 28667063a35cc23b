"""`vector_gradients`: gradients of vectors over all steps, in products."""

import numpy as np
import pytest
from caffe2.python import workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.rules import vector_gradients
from caffe2_recurrent.rewriting.rules.vector_gradients import Size
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, result
from onednn_support import assert_cell, leaving_no_trace
from step_nets import D, N, T
from test_rewriting_rules import EVERY_STEP_NET, EXECUTOR, reasons_in
from test_rewriting_sequence_bias import Net
from test_rewriting_sequence_gradient import assert_kept, assert_seen, one, several

RULE = "vector_gradients"
GRADIENT = "ElementwiseLinearGradient"
MOVED = ["parameter_gradients", RULE]
WITH = pytest.mark.parametrize(
    "rules", [MOVED, ["sequence_gradient", *MOVED], None], ids=["alone", "read", "all rules"]
)


def kinds(net):
    return [operator.type for operator in net.Proto().op]


@EXECUTOR
@WITH
@pytest.mark.parametrize("step, count", [(one, 1), (several, 3)], ids=["one", "several"])
def test_values_and_gradients(step, count, rules, executor):
    assert GRADIENT not in kinds(assert_kept(step, RULE, count, rules, executor))


@pytest.mark.parametrize("reads", [False, True])
def test_the_gradient_of_the_rows_is_made_where_something_reads_it(reads):
    net = Net(several)
    optimize(net.net, ["sequence_gradient", *MOVED] if reads else MOVED, even_if_slower=True)
    made = [operator.output[0] for operator in net.net.Proto().op if operator.type == "Mul"]
    assert len([blob for blob in made if "grad_over_steps" in blob]) == (3 if reads else 0)


@WITH
@pytest.mark.parametrize("variant", ["kept", "recomputed"])
def test_an_milstm(rules, variant):
    """Against the numpy loop."""
    assert_cell("milstm", variant, support.Optimised(rules))


@EVERY_STEP_NET
def test_step_nets(make):
    step_net = make()
    found = comparing.run(recurrent_net, step_net, rewrite=support.Optimised(MOVED))
    comparing.assert_outputs_and_gradients(step_net, *found)


@pytest.mark.parametrize("kind", ["Mul", "MatMul"])
def test_a_wrong_product_is_seen(kind):
    assert_seen(MOVED, lambda operator: operator.type == kind)


# Whether it is worth it.


def make_up(monkeypatch, as_it_is, apart):
    """Times of the two ways; the sizes that were asked about."""
    asked = []

    def tried(size):
        asked.append(size)
        return {False: Seconds(0.0, as_it_is), True: Seconds(0.0, apart)}

    monkeypatch.setattr(vector_gradients, "_tried", tried)
    return asked


@pytest.mark.parametrize("as_it_is, is_faster", [(1.5, True), (1.01, False), (0.9, False)])
def test_a_trial_decides(as_it_is, is_faster, monkeypatch):
    asked = make_up(monkeypatch, as_it_is, 1.0)
    net = Net(several)
    report = optimize(net.net, ["sequence_gradient", *MOVED])
    assert report.counts[RULE] == (3 if is_faster else 0)
    slower = "for {} rows of {} elements it is not faster".format(T * N, D)
    assert set(reasons_in(report, RULE)) == (set() if is_faster else {slower})
    assert set(asked) == {Size(T * N, D, True)}


def test_without_sizes_nothing_is_tried(monkeypatch):
    make_up(monkeypatch, 2.0, 1.0)
    net = Net(several).net
    workspace.ResetWorkspace()
    report = optimize(net, MOVED)
    assert report.counts[RULE] == 0
    assert set(reasons_in(report, RULE)) == {"the numbers of steps and sequences are not known; give shapes"}


def test_without_trials_it_stays_as_it_is():
    net = Net(several).net
    assert optimize(net, MOVED, trials=False).counts[RULE] == 0


@pytest.mark.parametrize("is_read", [False, True])
def test_both_ways_are_tried(is_read):
    """Each runs by itself and gives the same; nobody knows how long that takes."""
    size = Size(7, 5, is_read)
    with leaving_no_trace():
        found = vector_gradients._tried.__wrapped__(size)
    assert list(found) == [False, True] and min(seconds.step for seconds in found.values()) > 0
    random = np.random.RandomState(0)
    subjects = [vector_gradients._subject(size, apart) for apart in (False, True)]
    values = {blob: random.randn(*shape).astype(np.float32) for blob, shape in subjects[0].shapes.items()}
    for blob in ["dw", "db"] + ["dx"] * is_read:
        expected, other = (result(subject.step, values, blob) for subject in subjects)
        assert other.shape == expected.shape and support.difference(other, expected) < support.TOLERANCE


def test_a_trial_of_many_rows_is_made_with_fewer():
    assert trial.rows_to_try(10**6, 1, 2048, vector_gradients.ENOUGH) == 4882
