"""benchmarks/step_operators.py: each way computes what its task says, and the fastest forms are added up."""

import sys
from pathlib import Path

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import other_interpreter  # noqa: E402
import step_operators  # noqa: E402
import timed_operators  # noqa: E402
from layers import FORWARD, TRAINING, Shape  # noqa: E402
from step_operators import (  # noqa: E402
    ADDED,
    GATES_MULTIPLIED,
    MULTIPLIED,
    MULTIPLIED_AND_ADDED,
    SQUASHED,
    TANH,
    UNIT,
    UNIT_GRADIENT,
)

pytestmark = pytest.mark.untraced

SHAPE = Shape(3, 2, 4, 5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(hidden, cell, gates, timestep):
    """Hidden and cell state; gates are in the order i, f, o, g."""
    i, f, o, g = np.split(gates, 4, axis=-1)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(cell), cell


def unit_gradient(hidden, cell, gates, timestep, new_hidden, new_cell, of_hidden, of_cell):
    i, f, o, g = np.split(gates, 4, axis=-1)
    i, f, o, g, squashed = sigmoid(i), sigmoid(f), sigmoid(o), np.tanh(g), np.tanh(new_cell)
    of_cell = of_cell + of_hidden * o * (1 - squashed**2)
    of_gates = [
        of_cell * g * i * (1 - i),
        of_cell * cell * f * (1 - f),
        of_hidden * squashed * o * (1 - o),
        of_cell * i * (1 - g**2),
    ]
    return np.zeros_like(hidden), of_cell * f, np.concatenate(of_gates, axis=-1)


COMPUTED = {
    TANH: lambda a: [np.tanh(a)],
    MULTIPLIED: lambda a, b: [a * b],
    ADDED: lambda a, b: [a + b],
    MULTIPLIED_AND_ADDED: lambda a, b, c: [a + b * c],
    GATES_MULTIPLIED: lambda a, b: [a * b],
    UNIT: unit,
    UNIT_GRADIENT: unit_gradient,
}
# By the end of the way's name.
SQUASHING = {"tanh": lambda gates: [np.tanh(gates)], "moid": lambda gates: [sigmoid(gates)]}


def computed(way):
    """What a way makes of its operands, and these; in memory as numpy has it."""
    operands = [step_operators.value(SHAPE, operand) for operand in way.fed]
    for name, operand in zip(way.fed, operands):
        workspace.FeedBlob(name, operand)
    for step in (*way.prepared, way.timed):
        workspace.RunOperatorOnce(timed_operators.created(step, str))
    results = list(way.timed.results)
    if way.timed.device == caffe2_pb2.IDEEP:
        device = core.DeviceOption(caffe2_pb2.IDEEP)
        workspace.RunOperatorOnce(core.CreateOperator("CopyIDEEPToCPU", results, ["copied"], device_option=device))
        results = ["copied"]
    return operands, [workspace.FetchBlob(name) for name in results]


@pytest.mark.parametrize("task", [SQUASHED, *COMPUTED])
def test_every_way_does_its_task(task):
    for way in step_operators.ways(task):
        operands, found = computed(way)
        for result, wanted in zip(found, COMPUTED.get(task, SQUASHING.get(way.name.lower()[-4:]))(*operands)):
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-6, err_msg=way.name)


def test_gates_are_four_times_as_wide_as_states():
    assert step_operators.value(SHAPE, "gates 1").shape == (1, 2, 20)
    assert step_operators.value(SHAPE, "state 1").shape == (1, 2, 5)


SECONDS = {
    UNIT: 9.0,
    SQUASHED: 3.0,
    TANH: 1.0,
    MULTIPLIED: 1.0,
    ADDED: 1.0,
    MULTIPLIED_AND_ADDED: 2.5,
    UNIT_GRADIENT: 9.0,
    GATES_MULTIPLIED: 2.0,
}


@pytest.mark.parametrize(
    "changed, forward, backward",
    [
        ({}, 3 + 1 + 3 * 1 + 1, 2 * 1 + 1 + 2),
        ({UNIT: 7.0, UNIT_GRADIENT: 4.5}, 7, 4.5),
        ({MULTIPLIED_AND_ADDED: 1.5}, 3 + 1 + 2 * 1 + 1.5, 1 + 1.5 + 2),
    ],
)
def test_the_fastest_forms_are_taken(changed, forward, backward):
    seconds = dict(SECONDS, **changed)
    assert step_operators.fastest(FORWARD, seconds).seconds == forward
    assert step_operators.fastest(TRAINING, seconds).seconds == forward + backward


def test_what_cannot_be_had_is_in_no_form():
    without = {task: seconds for task, seconds in SECONDS.items() if task != MULTIPLIED_AND_ADDED}
    assert step_operators.fastest(FORWARD, without).seconds == 8
    assert step_operators.fastest(FORWARD, {UNIT: 9.0}).seconds == 9


def test_without_aten_there_are_other_ways(monkeypatch):
    is_operator = core.IsOperator
    monkeypatch.setattr(core, "IsOperator", lambda kind: kind != "ATen" and is_operator(kind))
    assert [way.name for way in step_operators.ways(TANH)] == ["Tanh"]
    assert step_operators.ways(MULTIPLIED_AND_ADDED) == []


@pytest.fixture
def in_a_hurry(monkeypatch):
    """Short looks and pauses."""
    monkeypatch.setattr(timed_operators, "LOOK_MINIMUM", 0.0)
    monkeypatch.setattr(timed_operators, "LOOKS_ENOUGH", 0.0)
    monkeypatch.setattr(other_interpreter, "CALM", 0.0005)


@pytest.mark.parametrize("pass_", [FORWARD, TRAINING])
def test_the_operators_of_a_pass_are_timed(in_a_hurry, pass_):
    """What is recorded is what the forms do, and adds up to their time."""
    subject = step_operators.StepOperators(SHAPE, pass_)
    try:
        seconds = subject.run(2)
        best = subject.best()
        ways_ = subject._ways.best()
    finally:
        subject.close()
    chosen = step_operators.fastest(pass_, {task: time_ for task, (_, time_) in ways_.items()})
    assert seconds > 0
    assert set(best) == {task for form in chosen.forms for task in form}
    assert sum(time_ for _, time_ in best.values()) == pytest.approx(chosen.seconds)
    assert workspace.CurrentWorkspace() == "default"


def test_each_operator_is_there_once_for_each_step(in_a_hurry, monkeypatch):
    nets, create = [], workspace.CreateNet
    monkeypatch.setattr(workspace, "CreateNet", lambda net: nets.append(net.Proto()) or create(net))
    step_operators.StepOperators(SHAPE, FORWARD).close()
    assert {len(net.op) for net in nets} == {SHAPE.steps}
    assert {"Tanh", "Mul", "Sum", "LSTMUnit"} <= {operator.type for net in nets for operator in net.op}
