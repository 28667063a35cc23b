"""Scripts as they were written in 2016 and 2017 run unmodified, and come to the right numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from caffe2.python import core

import caffe2_recurrent
import step_nets
from caffe2_recurrent import recurrent_net
from numpy_loop import numerical_gradients

REPOSITORY = Path(caffe2_recurrent.__file__).parent.parent
SCRIPTS = Path(__file__).resolve().parent / "scripts_of_2016"


def run(name, *arguments, python_options=(), cwd=None):
    """Run a script on our builder; returns its output and what it wrote to stderr."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *python_options, "-m", "caffe2_recurrent", str(SCRIPTS / name), *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "name, error",
    [
        ("all_cells.py", "ImportError: cannot import name 'MILSTM'"),
        ("char_model.py", "ImportError: cannot import name 'LSTM'"),
        ("own_step.py", "ValueError: too many values to unpack"),
    ],
)
def test_caffe2_of_today_cannot_run_them(name, error, tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), str(tmp_path / "blobs.npz")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert error in done.stderr


def test_a_character_model_learns(tmp_path):
    losses, params = run("char_model.py", cwd=str(tmp_path))[0].splitlines()
    first, last = map(float, losses.split()[1:])
    assert last < 0.1 * first
    assert params.split()[1:5] == ["LSTM/i2h_w", "LSTM/i2h_b", "LSTM/gates_t_w", "LSTM/gates_t_b"]


def test_a_step_of_its_own_with_sizes_for_everything(tmp_path):
    path = tmp_path / "blobs.npz"
    _, warned = run("own_step.py", str(path), python_options=["-W", "default"])
    assert re.search(r"own_step.py:\d+: DeprecationWarning: recurrent_net ignores scratch_sizes", warned)
    assert "DeprecationWarning: recurrent_net ignores a size as the third element" in warned
    blobs = dict(np.load(str(path)))

    def loop(values):
        hidden, all_steps = values["initial"][0], []
        for x in values["sequence"]:
            hidden = np.tanh(hidden @ values["w"].T + values["b"] + x)
            all_steps.append(hidden)
        return np.stack(all_steps)

    doubles = {name: blobs[name].astype(np.float64) for name in ("initial", "sequence", "w", "b")}
    expected = loop(doubles)
    np.testing.assert_allclose(blobs["hidden_all"], expected, atol=1e-6)
    np.testing.assert_allclose(blobs["hidden_last"], expected[-1:], atol=1e-6)
    slopes = numerical_gradients(lambda values: np.square(loop(values)).sum(), doubles, ["w", "sequence"])
    np.testing.assert_allclose(blobs["w_grad"], slopes["w"], atol=1e-5)
    np.testing.assert_allclose(blobs["sequence_grad"], slopes["sequence"], atol=1e-5)


def test_all_cells_by_position(tmp_path):
    lines = run("all_cells.py", cwd=str(tmp_path))[0].splitlines()
    for scope in ("lstm", "milstm", "attention_0", "attention_1"):
        assert "{}/hidden_t_all 3 2 5".format(scope) in lines
        assert "{}/cell_t_last 1 2 5".format(scope) in lines
    for scope in ("attention_0", "attention_1"):
        assert "{}/attention_weighted_encoder_context_all 3 2 7".format(scope) in lines
    # lstm 4, milstm 8, attention 9 and 11.
    assert "with gradients 32 of 32" in lines
    assert "stacked True" in lines
    assert lines[-1] == "cudnn/lstm_output cudnn/lstm_hidden_output cudnn/lstm_cell_output 16 ['input', 'recurrent']"


def arguments(step_net):
    return [step_net.cell, step_net.inputs, step_net.initial, step_net.links]


@pytest.mark.parametrize("sizes", [[3], (3,), {"h": 3}, []], ids=["list", "tuple", "dict", "empty"])
def test_scratch_sizes_before_timestep(sizes):
    step_net = step_nets.lstm()
    expected, found, named = core.Net("net"), core.Net("net"), core.Net("net")
    recurrent_net(expected, *arguments(step_net), "timestep", "scope")
    with pytest.warns(DeprecationWarning, match="^recurrent_net ignores scratch_sizes") as caught:
        recurrent_net(found, *arguments(step_net), sizes, "timestep", "scope")
        recurrent_net(named, *arguments(step_net), sizes, scope="scope", timestep="timestep")
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert found.Proto().op == named.Proto().op == expected.Proto().op


def test_what_followed_scratch_sizes_keeps_its_place():
    step_net = step_nets.lstm()
    net = core.Net("net")
    with pytest.warns(DeprecationWarning):
        recurrent_net(net, *arguments(step_net), [3], "timestep", "scope", (1,), None, True)
    assert net.Proto().op[0].output[-1] == "scope/step_workspaces"
    assert "backward_step_net" not in {argument.name for argument in net.Proto().op[0].arg}


@pytest.mark.parametrize("timestep", ["timestep", core.BlobReference("timestep"), None], ids=["str", "blob", "None"])
def test_a_blob_after_links_is_the_timestep(timestep, recwarn):
    step_net = step_nets.lstm()
    recurrent_net(core.Net("net"), *arguments(step_net), timestep, "scope")
    assert not [warning for warning in recwarn if warning.category is DeprecationWarning]
