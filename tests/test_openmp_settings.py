"""`openmp_settings`: which of them let OpenMP give fewer threads than it says, and who says so."""

from __future__ import annotations

import dataclasses
import os

import pytest

import rewriting_support as support
from caffe2_recurrent import openmp_settings, optimize
from caffe2_recurrent.openmp_settings import that_withhold_threads
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.products import onednn, product_ways
from onednn_support import in_ifs
from test_doctor import SOUND, rows


@pytest.fixture(autouse=True)
def four_processors(monkeypatch):
    monkeypatch.setattr(openmp_settings.os, "cpu_count", lambda: 4)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "8"}, None),
        ({"OMP_DYNAMIC": "false"}, None),
        ({"OMP_DYNAMIC": ""}, None),
        ({"OMP_DYNAMIC": "true"}, "OMP_DYNAMIC=true"),
        ({"OMP_DYNAMIC": " TRUE"}, "OMP_DYNAMIC= TRUE"),
        ({"OMP_DYNAMIC": "1", "OMP_THREAD_LIMIT": "1"}, "OMP_DYNAMIC=1"),
        ({"OMP_THREAD_LIMIT": "4"}, None),
        ({"OMP_THREAD_LIMIT": "3"}, "OMP_THREAD_LIMIT=3, with 4 processors"),
        ({"OMP_THREAD_LIMIT": "3", "OMP_NUM_THREADS": "2"}, None),
        ({"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "2,8"}, "OMP_THREAD_LIMIT=1, with OMP_NUM_THREADS=2"),
        ({"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "many"}, "OMP_THREAD_LIMIT=1, with 4 processors"),
        ({"OMP_THREAD_LIMIT": "\N{SUPERSCRIPT TWO}"}, None),
        ({"OMP_THREAD_LIMIT": "few", "OMP_NUM_THREADS": "2"}, None),
        ({"OMP_THREAD_LIMIT": "0", "OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_settings(settings, expected):
    assert that_withhold_threads(settings) == expected


@pytest.mark.parametrize(
    "number, told, expected",
    [
        ("2", 3, None),
        ("2", 5, "OMP_THREAD_LIMIT=3, with 5 threads"),
        ("4", 5, "OMP_THREAD_LIMIT=3, with OMP_NUM_THREADS=4"),
    ],
)
def test_a_number_that_openmp_was_told_later(number, told, expected):
    assert that_withhold_threads({"OMP_THREAD_LIMIT": "3", "OMP_NUM_THREADS": number}, told) == expected


def test_optimize_goes_by_the_number_of_threads_that_there_are(monkeypatch):
    monkeypatch.setenv("OMP_THREAD_LIMIT", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert onednn.why_not() is None
    monkeypatch.setattr(onednn.threads, "of_openmp", lambda: 3)
    assert onednn.why_not() == "oneDNN would plan for threads that it does not get: OMP_THREAD_LIMIT=2, with 3 threads"


def test_they_are_those_of_this_process(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    assert that_withhold_threads() == "OMP_DYNAMIC=true"


def test_the_doctor_says_so():
    assert "OpenMP" not in rows(SOUND)
    found = rows(dataclasses.replace(SOUND, withholding="OMP_DYNAMIC=true"))
    assert found["OpenMP"] == "may give fewer threads than it says, by OMP_DYNAMIC=true: optimize does without oneDNN"


REFUSAL = "oneDNN would plan for threads that it does not get: OMP_DYNAMIC=true"


def operators_of_onednn(net):
    return list(filter(is_on_onednn, [*in_ifs(net), *net.Proto().op, *support.step(net).op]))


@pytest.mark.usefixtures("nnpack_products")
def test_optimize_does_without_onednn(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    assert product_ways.ways_of(1) == product_ways.ways_of(3) == [product_ways.NNPACK]
    model, *_ = support.lstm()
    report = optimize(model, even_if_slower=True)
    assert REFUSAL in {refusal.reason for refusal in report.refusals if refusal.rule == "products_over_steps"}
    assert report.counts["packed_products"] and not operators_of_onednn(model.net)


def test_without_nnpack_there_is_no_way(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    report = optimize(support.lstm()[0], ["packed_products"], even_if_slower=True)
    assert {refusal.reason for refusal in report.refusals} == {"this Caffe2 has no NNPACK, and " + REFUSAL}


def test_with_as_many_threads_as_planned_it_may(monkeypatch):
    monkeypatch.setenv("OMP_THREAD_LIMIT", os.environ["OMP_NUM_THREADS"])
    model, *_ = support.lstm()
    optimize(model, ["products_over_steps", "packed_products"], even_if_slower=True)
    assert operators_of_onednn(model.net)
