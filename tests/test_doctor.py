"""The doctor: on a sound installation, on broken ones, and on engines that this machine does not have."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from caffe2.python import workspace

import caffe2_recurrent
from caffe2_recurrent import doctor, installation, lstm_trial
from test_installation import ENDS_THE_INTERPRETER, REPOSITORY, python, write_caffe2

SOUND = doctor.Report(
    versions={"torch": "1.10.2", "numpy": "1.23.5", "protobuf": "3.20.3", "future": "1.0.0", "six": None},
    caffe2_trouble=None,
    engine=doctor.Engine(
        place="/site/caffe2",
        in_torch_wheel=True,
        built_for_gpu=True,
        gpus=0,
        aten=True,
        cudnn=True,
        gloo=True,
    ),
    trial=lstm_trial.Trial(None, 1e-7, 1e-4),
    graphviz=False,
    dot=None,
    products=None,
    withholding=None,
)


def rows(report: doctor.Report) -> dict[str, str]:
    """The lines of the rendered report by their name, runs of blanks made one."""
    lines = [line.split() for line in doctor.render(report).splitlines()[1:]]
    return {words[0]: " ".join(words[1:]) for words in lines}


def test_as_a_command_here():
    done = subprocess.run(
        [sys.executable, "-m", "caffe2_recurrent.doctor"],
        cwd=str(REPOSITORY),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an LSTM was built and ran" in done.stdout
    # runpy warns where a package imports the module that it is about to run.
    assert "RuntimeWarning" not in done.stderr


def test_as_a_command_where_caffe2_is_missing(tmp_path):
    done = python("-m", "caffe2_recurrent.doctor", site=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Caffe2    missing: there is no package caffe2." in done.stdout
    assert "numpy     not there  (numpy<1.24)" in done.stdout
    assert done.stdout.endswith("networks  FAILED: there is no working Caffe2 to build them with\n")
    assert "Traceback" not in done.stderr


def test_as_a_command_where_caffe2_is_broken(tmp_path):
    write_caffe2(tmp_path, core=ENDS_THE_INTERPRETER)
    done = python("-m", "caffe2_recurrent.doctor", site=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "but does not load: its compiled extension is not there." in done.stdout
    assert "FAILED: there is no working Caffe2" in done.stdout


def test_main_here(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"caffe2_recurrent {caffe2_recurrent.__version__}\n  Python ")
    assert "within" in printed.splitlines()[-1]


def test_main_fails_with_the_trial(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "try_network", lambda: lstm_trial.Trial("an LSTM could not be built: so it is"))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.endswith("networks  FAILED: an LSTM could not be built: so it is\n")


def test_main_takes_no_arguments(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--fix"])
    assert "unrecognized arguments: --fix" in capsys.readouterr().err


def test_examine_here():
    report = doctor.examine()
    assert report.healthy
    assert report.caffe2_trouble is None
    assert report.versions["numpy"] == np.__version__
    assert report.engine is not None
    assert report.engine.gpus == workspace.NumCudaDevices()


def test_examine_without_caffe2(monkeypatch):
    monkeypatch.setattr(installation, "find_trouble", lambda: "Caffe2 is missing: so it is.")
    report = doctor.examine()
    assert not report.healthy
    assert report.engine is None
    assert rows(report)["Caffe2"] == "missing: so it is."


def test_render_aligns_its_columns():
    lines = doctor.render(SOUND).splitlines()[1:]
    width = max(len(line.split()[0]) for line in lines)
    for line in lines:
        assert line[:2] == "  "
        assert line[2 + width : 4 + width] == "  "
        assert line[4 + width] != " "


def test_render_sound():
    found = rows(SOUND)
    assert found["Caffe2"] == "torch's wheel, in /site/caffe2"
    assert found["numpy"] == "1.23.5 in bounds (numpy<1.24)"
    assert found["six"] == "not there"
    assert found["device"] == "CPU; built for GPUs too, but none was found"
    assert found["cuDNN"] == "registered, cannot run without a GPU: cudnn_LSTM can be built only"
    assert found["graphviz"] == "package not there, program dot not there (only for drawings)"
    assert found["networks"].endswith("built and ran: values within 1e-07 of numpy's, gradient within 0.01%")


@pytest.mark.parametrize(
    "changes, name, text",
    [
        ({"in_torch_wheel": False}, "Caffe2", "own build, in /site/caffe2"),
        ({"gpus": 2}, "device", "CPU and GPU (2 found)"),
        ({"gpus": 2}, "cuDNN", "registered, can run"),
        ({"built_for_gpu": False}, "device", "CPU; built without GPU support"),
        ({"cudnn": False}, "cuDNN", "not registered: cudnn_LSTM cannot be built"),
        ({"aten": False}, "ATen", "not there"),
        ({"gloo": False}, "Gloo", "not there: no training over several processes"),
    ],
)
def test_render_other_engines(changes, name, text):
    engine = dataclasses.replace(SOUND.engine, **changes)
    assert rows(dataclasses.replace(SOUND, engine=engine))[name] == text


def test_render_versions_out_of_bounds_and_drawing_tools(monkeypatch):
    monkeypatch.setattr(installation, "NEWEST_PYTHON", (3, 6))
    versions = {**SOUND.versions, "numpy": "1.26.4", "protobuf": None}
    found = rows(dataclasses.replace(SOUND, versions=versions, graphviz=True, dot="/usr/bin/dot"))
    assert found["Python"].endswith("not in bounds (Python 3.7 to 3.6)")
    assert found["numpy"] == "1.26.4 not in bounds (numpy<1.24)"
    assert found["protobuf"] == "not there (protobuf<3.21)"
    assert found["graphviz"] == "package there, program dot in /usr/bin/dot (only for drawings)"
