"""All slices of a state blob but one, after the loop: views where Caffe2 has them, or copies."""

import numpy as np
import pytest
from caffe2.python import workspace

import rewriting_support as support
from caffe2_recurrent.rewriting.sequences import state_slices
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import result

RULE = "parameter_gradients"
POSSIBLE = [way for way in state_slices.WAYS if state_slices._runs(way)]
EVERY_WAY = pytest.mark.parametrize("way", POSSIBLE, ids=lambda way: way.__name__)


@EVERY_WAY
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_slices(steps, first, way):
    whole = np.random.randn(steps + 1, 3, 2).astype(np.float32)
    operator = way(trial.lone_loop(["s", "t"]), "s", "t", first)
    found = result([operator], {"s": whole}, "t")
    np.testing.assert_array_equal(found, whole[first : steps + first])


@EVERY_WAY
def test_the_gradients_of_an_lstm(way, monkeypatch):
    """In several runs of other sizes: no view is of what was there before."""
    monkeypatch.setattr(state_slices, "_first_that_runs", lambda: way)
    expected = support.runs_of_other_sizes(lambda model: None)
    support.assert_same(support.runs_of_other_sizes(support.Optimised([RULE])), expected)
    expected = support.run_without_steps(lambda model: None)
    support.assert_same(support.run_without_steps(support.Optimised([RULE])), expected)


def test_a_wrong_slice_is_seen(monkeypatch):
    monkeypatch.setattr(
        state_slices, "_first_that_runs", lambda: lambda loop, s, t, first: state_slices._by_copy(loop, s, t, 1 - first)
    )
    expected = support.runs_of_other_sizes(lambda model: None)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.runs_of_other_sizes(support.Optimised([RULE])), expected)


def kinds(net):
    return [operator.type for operator in net.Proto().op]


def test_nothing_is_copied_where_there_are_views():
    model, _ = support.lstm()
    support.Optimised([RULE])(model)
    assert len(POSSIBLE) > 1 and "Slice" not in kinds(model.net) and "ATen" in kinds(model.net)


def test_without_aten_slices_are_copied(monkeypatch):
    support.without_aten(monkeypatch)
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    support.Optimised([RULE])(model)
    assert "Slice" in kinds(model.net) and "ATen" not in kinds(model.net)
    support.assert_same(support.run(model, blobs), expected)


def test_views_that_caffe2_does_not_know(monkeypatch):
    """The next way is taken, and nothing is left behind."""

    def unknown(loop, source, target, first):
        operator = state_slices._by_tensor_split(loop, source, target, first)
        operator.arg.add(name="unheard_of", i=1)
        return operator

    trial.forget()
    monkeypatch.setattr(state_slices, "WAYS", (unknown, state_slices._by_copy))
    before = set(workspace.Blobs())
    assert state_slices._first_that_runs() is state_slices._by_copy
    assert set(workspace.Blobs()) == before
    trial.forget()
