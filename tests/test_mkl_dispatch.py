"""`mkl_dispatch`: for which processors it asks, and what it makes of two trials. Never how long they take."""

from __future__ import annotations

import dataclasses
import os

import pytest

from caffe2_recurrent import mkl_dispatch, processor
from caffe2_recurrent.mkl_dispatch import VARIABLE, Gain
from test_doctor import SOUND, rows

AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse fma avx avx2 bmi2\n\nprocessor\t: 1\n"
AVX512 = AMD.replace("bmi2", "bmi2 avx512f avx512dq avx512cd avx512bw avx512vl")


@pytest.fixture
def on_amd(monkeypatch, tmp_path):
    """Returns a function that says what the processor says of itself."""
    path = tmp_path / "cpuinfo"
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(processor, "CPUINFO", str(path))
    path.write_text(AMD)
    return path.write_text


def times(monkeypatch, found):
    """Has trials take these times, by what the variable is set to."""
    monkeypatch.setattr(mkl_dispatch, "_seconds", lambda more: found[more.get(VARIABLE, os.environ.get(VARIABLE))])


def test_a_processor_that_is_passed_over(on_amd, monkeypatch):
    times(monkeypatch, {None: 0.5, "5": 0.2})
    assert mkl_dispatch.gain() == Gain("5", 2.5)


@pytest.mark.parametrize("with_avx512, best", [(0.1, Gain("7", 5.0)), (0.25, Gain("5", 2.5)), (None, Gain("5", 2.5))])
def test_the_faster_of_two_values(with_avx512, best, on_amd, monkeypatch):
    on_amd(AVX512)
    times(monkeypatch, {None: 0.5, "5": 0.2, "7": with_avx512})
    assert mkl_dispatch.gain() == best


def test_a_value_that_is_set_is_what_others_are_compared_with(on_amd, monkeypatch):
    on_amd(AVX512)
    monkeypatch.setenv(VARIABLE, "5")
    times(monkeypatch, {"5": 0.2, "7": 0.1})
    assert mkl_dispatch.gain() == Gain("7", 2.0)


@pytest.mark.parametrize(
    "text",
    [
        AMD.replace("AuthenticAMD", "GenuineIntel"),
        AMD.replace(" avx2", ""),
        AMD.replace(" avx2 bmi2", " avx512f"),
        AMD.replace("vendor_id", "CPU implementer"),
        AMD.replace("flags", "Features"),
        "",
    ],
    ids=["Intel's", "no AVX2", "no AVX2 named", "no vendor", "no flags", "empty"],
)
def test_other_processors(text, on_amd, monkeypatch):
    on_amd(text)
    times(monkeypatch, {None: 0.5, "5": 0.2})
    assert mkl_dispatch.gain() is None


def test_a_system_that_does_not_tell(on_amd, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", "/nowhere/cpuinfo")
    times(monkeypatch, {None: 0.5, "5": 0.2})
    assert mkl_dispatch.gain() is None


def test_nothing_is_tried_where_the_only_value_is_set(on_amd, monkeypatch):
    monkeypatch.setenv(VARIABLE, "5")
    monkeypatch.setattr(mkl_dispatch, "_seconds", lambda more: pytest.fail("it is tried"))
    assert mkl_dispatch.gain() is None


@pytest.mark.parametrize("without, with_avx2", [(None, 0.2), (0.5, None)])
def test_a_trial_that_fails_says_nothing(without, with_avx2, on_amd, monkeypatch):
    times(monkeypatch, {None: without, "5": with_avx2})
    assert mkl_dispatch.gain() is None


def test_it_is_tried(on_amd):
    assert mkl_dispatch.gain().times > 0


def test_the_variable_is_there_when_the_process_starts(monkeypatch):
    monkeypatch.setattr(mkl_dispatch, "PRODUCT", "import os; print(os.environ['{}'])".format(VARIABLE))
    assert mkl_dispatch._seconds({VARIABLE: "7"}) == 7.0


@pytest.mark.parametrize(
    "product", ["raise SystemExit(1)", "print('fast')", "pass", "print(1); raise OSError", "import time; time.sleep(9)"]
)
def test_processes_that_do_not_tell(product, monkeypatch):
    monkeypatch.setattr(mkl_dispatch, "PRODUCT", product)
    monkeypatch.setattr(mkl_dispatch, "SECONDS_TO_WAIT", 1)
    assert mkl_dispatch._seconds({}) is None


def test_a_python_that_is_not_there(monkeypatch):
    monkeypatch.setattr(mkl_dispatch.sys, "executable", "/nowhere/python")
    assert mkl_dispatch._seconds({}) is None


@pytest.mark.parametrize(
    "gain, said",
    [
        (Gain("5", 2.54), "MKL's, 2.5 times as fast with MKL_DEBUG_CPU_TYPE=5 in the environment (docs/optimize.md)"),
        (Gain("7", 1.1), None),
        (Gain("5", 0.5), None),
        (None, None),
    ],
)
def test_what_the_doctor_says(gain, said):
    assert rows(dataclasses.replace(SOUND, products=gain)).get("products") == said
