"""The trial of the doctor: it passes here, and tells what is wrong with an engine where something is."""

import re

import numpy as np
import pytest
from caffe2.python import workspace

import caffe2_recurrent
from caffe2_recurrent import lstm_trial


def test_the_trial_leaves_the_callers_workspace_alone():
    workspace.FeedBlob("mine", np.ones(3, np.float32))
    before = workspace.CurrentWorkspace()
    assert lstm_trial.try_network().trouble is None
    assert workspace.CurrentWorkspace() == before
    assert workspace.Blobs() == ["mine"]
    workspace.SwitchWorkspace("caffe2_recurrent_doctor")
    left = workspace.Blobs()
    workspace.SwitchWorkspace(before)
    assert left == []


def test_trial_that_cannot_build(monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("no such operator")

    monkeypatch.setattr(caffe2_recurrent, "LSTM", fail)
    assert lstm_trial.try_network().trouble == "an LSTM could not be built: ValueError: no such operator"


def test_trial_that_cannot_run(monkeypatch):
    def fail(net):
        raise RuntimeError("[enforce fail at operator.cc]\nand a stack trace")

    monkeypatch.setattr(workspace, "RunNetOnce", fail)
    assert lstm_trial.try_network().trouble == (
        "an LSTM was built, but did not run: RuntimeError: [enforce fail at operator.cc]"
    )
    assert workspace.CurrentWorkspace() != "caffe2_recurrent_doctor"


@pytest.mark.parametrize("change", [lambda hiddens: hiddens + 1e-3, lambda hiddens: hiddens * np.nan])
def test_trial_with_wrong_values(change, monkeypatch):
    right = lstm_trial._lstm_in_numpy
    monkeypatch.setattr(lstm_trial, "_lstm_in_numpy", lambda *arguments: change(right(*arguments)))
    assert "an LSTM ran, but its values are off by" in lstm_trial.try_network().trouble


@pytest.mark.parametrize("factor, amount", [(1.1, "[1-9]"), (0.0, "inf"), (np.nan, "(nan|inf)")])
def test_trial_with_a_wrong_gradient(factor, amount, monkeypatch):
    fetch = workspace.FetchBlob

    def fetch_changed(name):
        return fetch(name) * (np.float32(factor) if str(name).endswith("_grad") else 1)

    monkeypatch.setattr(workspace, "FetchBlob", fetch_changed)
    assert re.match(f"an LSTM ran, but its gradient is off by {amount}", lstm_trial.try_network().trouble)
