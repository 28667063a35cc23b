"""`step_times`: which operators are measured, how often, and which is slowest; never how long anything takes."""

import time

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, recurrent, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import LSTM, install, optimize, step_times
from caffe2_recurrent.debugging import timed_loop
from caffe2_recurrent.debugging.time_table import LoopTime, OperatorTime, StepTimes
from caffe2_recurrent.rewriting.products import thread_numbers
from cells import CELLS
from errors_support import listed
from numpy_lstm import Case
from test_step_values import EXECUTOR, run, several_loops
from workspace_contents import contents

STEP, BACKWARD_STEP = "step", "backward step"
CELL = pytest.mark.parametrize("cell", [CELLS[0], CELLS[2], CELLS[5]], ids=lambda cell: cell.name)


def state():
    """What must be as it was: blobs and their contents, nets, which workspace is current."""
    nets = set(workspace.C.nets())
    return contents(), nets, workspace.CurrentWorkspace()


def measured(*arguments, **named):
    """The result of `step_times`, which has left no trace."""
    before = state()
    found = step_times(*arguments, **dict({"runs": 2}, **named))
    assert state() == before
    assert_left_nothing()
    return found


def assert_left_nothing():
    current = workspace.CurrentWorkspace()
    workspace.SwitchWorkspace(timed_loop.WORKSPACE, True)
    left = workspace.Blobs() + list(workspace.C.nets())
    workspace.SwitchWorkspace(current)
    assert left == []


def refused(kind, *arguments, **named):
    before = state()
    with pytest.raises(kind) as caught:
        step_times(*arguments, **named)
    assert type(caught.value) is kind
    assert state() == before
    return str(caught.value)


def step_operators(net, kind, name, number=0):
    operator = [operator for operator in net.Proto().op if operator.type == kind][number]
    (argument,) = [argument for argument in operator.arg if argument.name == name]
    return [(operator.type, tuple(operator.output)) for operator in argument.n.op]


def assert_all_there(found, net, steps, number=0):
    """Every operator of both steps once, in order, run as often as there are steps."""
    expected = [(STEP, *parts) for parts in enumerate(step_operators(net, "RecurrentNetwork", "step_net", number))]
    loops = [(STEP, "RecurrentNetwork")]
    if any(operator.type == "RecurrentNetworkGradient" for operator in net.Proto().op):
        backward = step_operators(net, "RecurrentNetworkGradient", "backward_step_net", number)
        expected += [(BACKWARD_STEP, *parts) for parts in enumerate(backward)]
        loops.append((BACKWARD_STEP, "RecurrentNetworkGradient"))
    assert [(one.step, one.position, (one.type, one.outputs)) for one in found.operators] == expected
    assert [(loop.step, loop.type) for loop in found.loops] == loops
    assert found.steps == steps
    assert all(one.calls == steps and one.microseconds > 0 for one in found.operators)
    assert all(loop.in_order > 0 and loop.as_set > 0 for loop in found.loops)
    assert found.clock > 0
    assert sum(map(found.share, found.operators)) == pytest.approx(1)
    assert sorted(found.slowest) == sorted(found.operators)
    assert sum(map(found.of_operators, (STEP, BACKWARD_STEP))) == pytest.approx(
        sum(one.microseconds_per_run for one in found.operators)
    )
    times = [one.microseconds_per_run for one in found.slowest]
    assert times == sorted(times, reverse=True)
    assert_table(found)


def assert_table(found):
    lines = str(found).splitlines()
    for one in found.operators:
        ending = "{} {}: {} -> {}".format(one.step, one.position, one.type, ", ".join(one.outputs))
        assert len([line for line in lines if line.endswith("  " + ending)]) == 1, ending
    for loop in found.loops:
        assert len([line for line in lines if line.split()[-1:] == [loop.type]]) == 1, loop.type


# What is measured


@EXECUTOR
def test_lstm(executor):
    case = Case(steps=5, lengths=[5, 2])
    _, _, model = case.run(executor=executor)
    found = measured(model)
    assert_all_there(found, model.net, 5)
    assert found.runs == 2 and found.loop == "lstm/hidden_t_all"
    assert [one.type for one in found.operators] == ["FC", "Sum", "LSTMUnit", "LSTMUnitGradient", "FCGradient", "Sum"]


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_step_nets(make):
    step_net = make()
    forward_only = step_net.options.get("forward_only", False)
    net = run(step_net, gradients=not forward_only)
    assert_all_there(measured(net, runs=1), net, step_nets.T)


@EXECUTOR
def test_forward_only(executor):
    """More steps than workspaces."""
    step_net = step_nets.lstm()
    step_net.outer["GATES_IN"] = np.zeros((7, 2, 12), np.float32)
    net = run(step_net, executor, forward_only=True)
    assert_all_there(measured(net), net, 7)


@CELL
@EXECUTOR
def test_optimised(cell, executor):
    cell = cell.but(steps=4)
    model, outputs = cell.build()
    seeds = cell.output_gradients()
    given = {outputs[n]: model.net.AddExternalInput("seed_{}".format(n)) for n in cell.positions}
    model.net.AddGradientOperators(given)
    for position in cell.positions:
        workspace.FeedBlob("seed_{}".format(position), seeds[position].astype(np.float32))
    workspace.RunNetOnce(model.param_init_net)
    cell.feed()
    assert optimize(model, even_if_slower=True).total
    comparing.configure(model.net, executor)
    workspace.RunNetOnce(model.net)
    assert_all_there(measured(model), model.net, 4)


def test_the_number_of_threads_is_set_before(monkeypatch):
    """Operators in front of a loop may do that, and are not run here."""
    model, _ = support.lstm()
    workspace.RunNetOnce(model.net)
    monkeypatch.setattr(thread_numbers, "matter", lambda: True)
    run_operator, ran = workspace.RunOperatorOnce, []
    monkeypatch.setattr(workspace, "RunOperatorOnce", lambda made: ran.append(made.type) or run_operator(made))
    measured(model.net)
    assert ran == ["ConstantFill", "ATen"]


def test_nets_of_caffe2s_builder():
    step_net = step_nets.product()
    net = run(step_net, builder=recurrent.recurrent_net, scope="theirs", gradients=True)
    found = measured(net)
    assert_all_there(found, net, 3)
    for operator in net.Proto().op:
        for argument in operator.arg:
            if argument.name in ("step_net", "backward_step_net"):
                # As before 2018.
                argument.s = str(argument.n).encode()
                argument.ClearField("n")
    as_text = measured(net.Proto())
    assert [one[:5] for one in as_text.operators] == [one[:5] for one in found.operators]


def test_which_loop():
    net = several_loops()
    for number, loop in ((0, 0), (1, "h_t_all_1"), (2, core.BlobReference("h_t_last_2"))):
        found = measured(net, loop)
        assert_all_there(found, net, 3, number)
        assert found.loop == ("h_t_all", "h_t_all_1", "h_t_all_2")[number]
    assert refused(ValueError, net).startswith("step_times: net '{}' has 3 loops; say which".format(net.Name()))


def test_a_net_that_is_created_goes_on():
    case = Case(options={"outputs_with_grads": "auto"})
    model, outputs = case.build()
    model.AddGradientOperators([outputs[0]])
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    expected = contents()
    measured(model)
    workspace.RunNet(model.net)
    assert contents() == expected


# Ranking


def test_an_operator_that_sleeps_is_the_slowest():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    xh = make.cell.Mul([x, h], "xh")
    make.cell.Python(lambda inputs, outputs: time.sleep(0.005))([xh], ["slept"])
    make.link(h, make.cell.Tanh(xh, "h_t"))
    net = run(make.done(), forward_only=True)
    found = measured(net, runs=5)
    assert [one.type for one in found.operators] == ["Mul", "Python", "Tanh"]
    assert found.slowest[0] is found.operators[1]
    assert found.share(found.slowest[0]) > 0.5


def test_a_large_product_is_the_slowest():
    """Of 512 x 512, beside 2 x 3."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.cell.Tanh(make.fc(x, "small"), "small_squashed")
    large, weights = make.reference("large", 1, 512, 512), make.reference("weights", 512, 512)
    make.cell.FC([large, weights, make.reference("zeros", 512)], "product", axis=2)
    make.link(h, make.cell.Mul([x, h], "h_t"))
    net = run(make.done(), forward_only=True)
    assert measured(net, runs=5).slowest[0].outputs == ("product",)


def test_a_slow_backward_operator_is_the_slowest():
    def build(slow):
        make = step_nets.Maker()
        x, h = make.sequence(size=512 if slow else 3), make.state()
        make.link(h, make.cell.Tanh(make.cell.Sum([make.fc(x, "u", 512 if slow else 3), h], "z"), "h_t"))
        return make.done()

    step_net = build(slow=True)
    for name, value in step_net.outer.items():
        if name in ("X", "h_initial"):
            step_net.outer[name] = np.ones((*value.shape[:-2], 256, value.shape[-1]), np.float32)
    net = run(step_net, gradients=True)
    found = measured(net, runs=5)
    assert {found.slowest[0].type, found.slowest[1].type} == {"FC", "FCGradient"}
    assert {found.slowest[0].step, found.slowest[1].step} == {STEP, BACKWARD_STEP}


def test_table():
    found = StepTimes(
        loop="h_t_all",
        steps=20,
        runs=3,
        clock=0.25,
        operators=(
            OperatorTime(STEP, 0, "FC", ("gates",), 20, 100.0),
            OperatorTime(STEP, 1, "Print", (), 20, 12.34),
            OperatorTime(BACKWARD_STEP, 0, "FCGradient", ("dw", "db", "dx"), 20, 300.0),
        ),
        loops=(
            LoopTime(STEP, "RecurrentNetwork", 2300.0, 2000.4),
            LoopTime(BACKWARD_STEP, "RecurrentNetworkGradient", 6500.0, 11000.6),
        ),
    )
    assert str(found) == "\n".join(
        [
            "loop 'h_t_all', 20 steps; microseconds, medians of 3 runs",
            "",
            "per call  calls  per run  share  operator",
            "   300.0     20     6000  72.8%  backward step 0: FCGradient -> dw, db, dx",
            "   100.0     20     2000  24.3%  step 0: FC -> gates",
            "    12.3     20      247   3.0%  step 1: Print -> nothing",
            "",
            "operators  in order  as set  of the loop",
            "     2247      2300    2000  RecurrentNetwork",
            "     6000      6500   11001  RecurrentNetworkGradient",
            "",
            "Each operator's time includes a reading of the clock, 0.25 microseconds.",
        ]
    )


@pytest.mark.parametrize("is_current", [True, False], ids=["current", "another"])
def test_a_workspace_that_the_caller_calls_so(is_current):
    here = workspace.CurrentWorkspace()
    workspace.SwitchWorkspace("step_times", True)
    workspace.FeedBlob("kept", np.ones(3, np.float32))
    if not is_current:
        workspace.SwitchWorkspace(here)
    measured(run(step_nets.product()))
    workspace.SwitchWorkspace("step_times")
    np.testing.assert_array_equal(workspace.FetchBlob("kept"), np.ones(3))
    workspace.ResetWorkspace()
    workspace.SwitchWorkspace(here)


# What is refused


def test_before_the_net_has_run():
    case = Case()
    model, outputs = case.build()
    model.AddGradientOperators([outputs[0]])
    case.feed()
    assert refused(ValueError, model) == (
        "step_times: loop 'lstm/hidden_t_all' has not run in this workspace, or only in an optimised copy of the net "
        "(install(optimize=True)): there is no "
        "'lstm/i2h', 'lstm/hidden_t_all_autogen_grad'"
    )


def test_before_a_net_that_has_been_created_has_run():
    case = Case()
    model, _ = case.build()
    case.feed()
    workspace.CreateNet(model.net)
    assert refused(ValueError, model) == (
        "step_times: loop 'lstm/hidden_t_all' has not run in this workspace, or only in an optimised copy of the net "
        "(install(optimize=True)): there is no 'lstm/i2h'"
    )


def test_a_sequence_that_is_no_tensor():
    net = run(step_nets.product(), forward_only=True)
    workspace.RunOperatorOnce(core.CreateOperator("CreateMutex", [], ["X"]))
    assert refused(ValueError, net) == "step_times: loop 'h_t_all' reads 'X', where there is no tensor to copy"


def test_a_reference_that_is_no_tensor():
    net = run(step_nets.reference_summed_with_state(), forward_only=True)
    workspace.RunOperatorOnce(core.CreateOperator("CreateMutex", [], ["w"]))
    assert refused(ValueError, net) == ("step_times: loop 'h_t_all' reads 'w', where there is no tensor to copy")


def test_a_sequence_of_no_steps():
    step_net = step_nets.product()
    step_net.outer["X"] = np.zeros((0, 2, 3), np.float32)
    net = run(step_net)
    assert refused(ValueError, net) == "step_times: loop 'h_t_all' runs over a sequence of no steps"


def test_loops_on_a_gpu():
    model = ModelHelper("gpu")
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 0)):
        LSTM(model, "x", None, None, 2, 3, scope="lstm")
    assert refused(ValueError, model) == listed(
        "step_times",
        "loop 'lstm/hidden_t_all' runs on a GPU, where operators return before they are done",
        "loop 'lstm/hidden_t_all' has not run in this workspace, or only in an optimised copy of the net "
        "(install(optimize=True)): there is no 'lstm/i2h', "
        "'lstm/initial_hidden_state', 'lstm/initial_cell_state', 'lstm/gates_t_w', 'lstm/gates_t_b'",
    )


def test_a_run_that_fails_leaves_no_trace():
    net = run(step_nets.product())
    workspace.FeedBlob("h_initial", np.zeros((5, 7), np.float32))
    before = state()
    with pytest.raises(RuntimeError, match="h_initial"):
        step_times(net)
    assert state() == before
    assert_left_nothing()


def test_wrong_arguments():
    net = run(step_nets.product())
    assert refused(TypeError, net, runs=1.5) == "step_times: runs must be a whole number; got 1.5 of type float"
    assert refused(TypeError, None, loop=()) == listed(
        "step_times",
        "net must be a ModelHelper, a core.Net or a NetDef; got None of type NoneType",
        "loop must be a position, an output of the loop, or None; got () of type tuple",
    )
    assert refused(TypeError, "net", 2.5, 0.5) == listed(
        "step_times",
        "runs must be a whole number; got 0.5 of type float",
        "net must be a ModelHelper, a core.Net or a NetDef; got 'net' of type str",
        "loop must be a position, an output of the loop, or None; got 2.5 of type float",
    )
    name = net.Name()
    assert refused(ValueError, net, loop=3, runs=0) == listed(
        "step_times", "runs must be 1 or more; got 0", "net '{}' has no loop 3; it has 0 ('h_t_all')".format(name)
    )
    assert refused(ValueError, net, runs=0) == "step_times: runs must be 1 or more; got 0"
    assert refused(TypeError, net, runs=True) == "step_times: runs must be a whole number; got True of type bool"
    empty = core.Net("empty")
    text = "step_times: net '{}' has no RecurrentNetwork operator; it has no operators"
    assert refused(ValueError, empty) == text.format(empty.Name())


def test_what_is_timed_is_the_net_that_was_given():
    case = Case()
    model, outputs = case.build()
    model.AddGradientOperators([outputs[0]])
    case.feed()
    workspace.RunNetOnce(model.net)
    reports = []
    with install(optimize=True, even_if_slower=True, trials=False, on_report=reports.append):
        times = step_times(model, runs=2)
    assert reports == []
    assert "LSTMUnit" in [operator.type for operator in times.operators]


def test_a_net_that_ran_in_an_optimised_copy():
    case = Case()
    model, outputs = case.build()
    model.AddGradientOperators([outputs[0]])
    case.feed()
    with install(optimize=True, even_if_slower=True, trials=False):
        workspace.RunNetOnce(model.net)
    assert "or only in an optimised copy of the net (install(optimize=True))" in refused(ValueError, model)
