"""`gradcheck`: right gradients pass, planted errors do not, and every error in its words."""

import numpy as np
import pytest
from caffe2.python import brew, core, recurrent, workspace
from caffe2.python.model_helper import ModelHelper

import cells
import comparing
import random_step_nets
import step_nets
from caffe2_recurrent import LSTM, gradcheck, install, recurrent_net
from caffe2_recurrent.numerical_check import GradientsDiffer
from caffe2_recurrent.numerical_check.trial import Trial
from caffe2_recurrent.problems import names
from errors_support import listed, snapshot

SEEDS = range(12)


def built(step_net, builder=recurrent_net):
    """The net and those of its outputs that pass gradients back."""
    net, outputs = comparing.build(builder, step_net)
    return net, [outputs[position] for position in comparing.positions(step_net)]


def differentiated(step_net):
    return [name for name in step_net.floats if name not in step_net.stopped]


def elman(net=None, bent=False, **options):
    """h_t = tanh(z), z = W h_prev + b + x_t, or tanh(relu(z)): net, outputs, and the shapes of the inputs."""
    step = core.Net("elman_step")
    x_t, h_prev, w, b = step.AddExternalInputs("x_t", "h_prev", "w", "b")
    z = step.Sum([step.FC([h_prev, w, b], "u", axis=2), x_t], "z")
    h_t = step.Tanh(step.Relu(z, "bent") if bent else z, "h_t")
    step.AddExternalOutput(h_t)
    net = net or core.Net("elman")
    outputs = recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t}, **options)
    return net, outputs, {"x": (4, 2, 3), "h0": (2, 3), "w": (3, 3), "b": (3,)}


def make_wrong(monkeypatch):
    """All gradients, by five percent."""
    gradients = Trial.gradients
    monkeypatch.setattr(
        Trial, "gradients", lambda *arguments: {blob: 0.95 * found for blob, found in gradients(*arguments).items()}
    )


def refused(kind, *arguments, **options):
    with pytest.raises(kind) as caught:
        gradcheck(*arguments, **options)
    return str(caught.value)


# Right gradients


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_a_loss_that_is_one_large_number(is_wrong, seed, monkeypatch):
    """Its last digits say nothing; what is wrong by more than those is found all the same."""
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, None, 3, 4, "lstm")
    error = model.net.Sqr(model.net.Sub([hidden_all, "wanted"], "difference"), "error")
    loss = model.net.SumElements(error, "loss")
    shapes = {"x": (20, 8, 3), "wanted": (20, 8, 4)}
    if not is_wrong:
        gradcheck(model, loss, shapes, seed=seed)
        return
    make_wrong(monkeypatch)
    with pytest.raises(GradientsDiffer):
        gradcheck(model, loss, shapes, seed=seed)


@pytest.mark.parametrize("size", [1.0, 1e5, 1e9])
def test_large_elements_that_stay_as_they_are_hide_nothing(size, monkeypatch):
    """As the scores of what is masked, which are joined with others."""
    net, outputs, shapes = elman()
    mask = net.ConstantFill([outputs[0]], "mask", value=-size)
    joined = net.Concat([outputs[0], mask], ["joined", "joined_sizes"], axis=2)[0]
    gradcheck(net, joined, shapes)
    make_wrong(monkeypatch)
    assert "WRONG" in refused(GradientsDiffer, net, joined, shapes)


DIFFERENTIABLE = [make for make in step_nets.AS_CAFFE2 + step_nets.MENDED if make != step_nets.lstm_forward_only]


@pytest.mark.parametrize("step_net", DIFFERENTIABLE, ids=lambda make: make.__name__)
def test_the_gradients_of_every_step_net_pass(step_net):
    made = step_net()
    report = gradcheck(*built(made), values=made.outer, blobs=differentiated(made))
    assert report.passes
    assert sorted(check.blob for check in report.checks) == sorted(differentiated(made))
    assert all(check.checked == check.elements == made.outer[check.blob].size for check in report.checks)


@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_the_gradients_of_every_cell_pass(cell):
    model, outputs = cell.build()
    values = {cell.full_name(name): value for name, value in cell.values().items()}
    report = gradcheck(model, [outputs[position] for position in cell.positions], values)
    floats = {name for name, value in values.items() if value.dtype == np.float32}
    assert floats <= {check.blob for check in report.checks}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradients_of_random_step_nets_pass(seed):
    step_net = random_step_nets.step_net(seed)
    gradcheck(*built(step_net), values=step_net.outer, blobs=differentiated(step_net))


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("step", [2.0**-6, 2.0**-8])
def test_a_slope_is_as_exact_as_said(size, step):
    """Against the derivative on paper; the numerical one stays far below what is allowed."""
    net = core.Net("cube")
    cubed = net.Mul([net.Mul(["x", "x"], "squared"), "x"], "cubed")
    x = size * np.array([-0.75, 0.25, 0.5], dtype=np.float32)
    (check,) = gradcheck(net, cubed, {"x": x}, step=step).checks
    weights = np.random.RandomState(0).standard_normal(3).astype(np.float32)
    expected = (3 * x.astype(np.float64) ** 2 * weights)[check.worst]
    assert abs(check.numerical - expected) < 0.2 * check.allowed
    # Each element of x changes one of the output; the others say nothing of rounding, however large they are.
    moved = np.array([x.astype(np.float64) + step, x.astype(np.float64) + 2 * step])
    rounding = max(3e-5 * 3**0.5, 4 * 2.0**-23 * np.abs(moved**3 * weights).max() / step)
    assert (rounding > 3e-5 * 3**0.5) == (size > 1 or step < 2.0**-6)
    assert check.allowed == pytest.approx(rounding + 1e-3 * np.abs(3 * x**2 * weights).max(), rel=1e-3)


def test_the_many_runs_go_without_the_executor(monkeypatch):
    """The net that gives its own gradients has it as the caller's, which stays as it is."""
    net, outputs, shapes = elman()
    before = net.Proto().SerializeToString()
    seen = {}

    def spy(name, kind):
        original = getattr(workspace, name)

        def spied(created, *arguments, **options):
            operators = created.Proto().op
            seen[kind] = [given.i for loop in operators for given in loop.arg if given.name == "enable_rnn_executor"]
            return original(created, *arguments, **options)

        monkeypatch.setattr(workspace, name, spied)

    spy("CreateNet", "many runs")
    spy("RunNetOnce", "own gradients")
    gradcheck(net, outputs[:1], shapes)
    assert seen == {"many runs": [0], "own gradients": [1, 1]}
    assert net.Proto().SerializeToString() == before


# Wrong gradients


@pytest.mark.parametrize("step_net", [step_nets.sum_of_both_inputs, step_nets.scaled_in_place_before_sum])
def test_the_wrong_gradients_of_caffe2s_builder_are_found(step_net):
    with pytest.raises(GradientsDiffer, match="WRONG"):
        gradcheck(*built(step_net(), recurrent.recurrent_net), values=step_net().outer)


def planted():
    """Each place of the backward steps of two loops where something can be spoilt."""
    for make in (step_nets.lstm, step_nets.two_states):
        net, _ = built(make())
        (operator,) = net.Proto().op
        for position, backward in enumerate(_backward_step(operator).op):
            for output in backward.output:
                yield pytest.param(make, position, output, id="{}-{}-{}".format(make.__name__, position, output))


def _backward_step(operator):
    (step,) = [argument.n for argument in operator.arg if argument.name == "backward_step_net"]
    return step


@pytest.mark.parametrize("make, position, spoilt", planted())
def test_a_planted_error_of_five_percent_is_found(make, position, spoilt):
    net, outputs = built(make())
    step = _backward_step(net.Proto().op[0])
    operators = list(step.op)
    operators.insert(position + 1, core.CreateOperator("Scale", [spoilt], [spoilt], scale=1.05))
    del step.op[:]
    step.op.extend(operators)
    with pytest.raises(GradientsDiffer) as caught:
        gradcheck(net, outputs, make().outer)
    assert not caught.value.report.passes
    assert caught.value.report.worst.difference > caught.value.report.worst.allowed


def test_a_gradient_that_stops_is_called_missing():
    net = core.Net("stopped")
    net.Mul([net.StopGradient("x", "constant"), "y"], "product")
    shapes = {"x": (2, 2), "y": (2, 2)}
    text = refused(GradientsDiffer, net, "product", shapes)
    assert text.startswith("gradcheck: the gradient of 'x' is wrong\nblob  role   checked  worst element")
    assert text.endswith("\n'x' gets no gradient, so zero was compared.")
    assert gradcheck(net, "product", shapes, blobs=["y"]).passes


def test_a_gradient_that_is_no_number_is_the_worst():
    net = core.Net("root")
    net.Sqrt("x", "root")
    values = {"x": np.array([4.0, 0.0625, 9.0], dtype=np.float32)}
    with pytest.raises(GradientsDiffer, match="the gradient of 'x' is wrong") as caught:
        gradcheck(net, "root", values, step=0.0625)
    assert caught.value.report.worst.worst == (1,) and np.isnan(caught.value.report.worst.numerical)
    assert gradcheck(net, "root", values, step=0.001).passes


def test_a_kink_is_named_as_such():
    """Nearer than the smallest steps."""
    net = core.Net("kink")
    net.Relu("x", "bent")
    values = {"x": np.array([1e-4, 1.0], dtype=np.float32)}
    text = refused(GradientsDiffer, net, "bent", values)
    assert "If the net has a kink there (Relu, Max), check at other values; else try a smaller step." in text
    assert "'x': two steps give numerical gradients" in text and "apart at [0]" in text
    assert gradcheck(net, "bent", values, step=0.001).passes


NEAR_A_KINK = (
    "'x': {} of the checked elements agree by smaller steps only, as near a kink (Relu, Max) or in a sharp bend."
)


@pytest.mark.parametrize("distance", [0.02, 0.01, 0.003, 0.001])
def test_near_a_kink_smaller_steps_are_taken(distance):
    net = core.Net("kink")
    net.Relu("x", "bent")
    report = gradcheck(net, "bent", {"x": np.array([distance, 1.0, -distance], dtype=np.float32)})
    assert report.worst.near_kinks == 2
    assert str(report).endswith("\n" + NEAR_A_KINK.format(2))
    assert gradcheck(net, "bent", {"x": np.array([0.1, 1.0, -0.1], dtype=np.float32)}).worst.near_kinks == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_kinks_of_a_step_hide_no_error(is_wrong, seed, monkeypatch):
    """Of hundreds of elements some are so near one that steps of the usual size go across."""
    net, outputs, shapes = elman(bent=True, outputs_with_grads="auto")
    shapes = {**shapes, "x": (12, 6, 3), "h0": (6, 3)}
    if not is_wrong:
        gradcheck(net, list(outputs), shapes, seed=seed)
        return
    make_wrong(monkeypatch)
    assert "WRONG" in refused(GradientsDiffer, net, list(outputs), shapes, seed=seed)


# Reports


def test_the_report_is_a_table_with_the_worst_first():
    net, (_, h_last), shapes = elman(outputs_with_grads="auto")
    report = gradcheck(net, h_last, shapes)
    lines = str(report).split("\n")
    columns = ["blob", "role", "checked", "worst element", "analytic", "numerical", "difference", "allowed"]
    assert lines[0].split("  ")[0] == "blob"
    assert [column for column in columns if column in lines[0]] == columns
    assert [line.split()[0] for line in lines[1:]] == [check.blob for check in report.checks]
    assert all(line.endswith("  ok") for line in lines[1:])
    excess = [check.difference / check.allowed for check in report.checks]
    assert excess == sorted(excess, reverse=True)
    assert report.worst is report.checks[0]
    assert {check.blob: check.role for check in report.checks} == {
        "x": "sequence",
        "h0": "initial state",
        "w": "reference",
        "b": "reference",
    }


def test_what_is_no_part_of_a_loop_is_an_input():
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, ("h0", "c0"), 3, 4, scope="lstm")
    brew.fc(model, hidden_all, "guess", dim_in=4, dim_out=1, axis=2)
    report = gradcheck(model, "guess", {"x": (3, 2, 3), "h0": (2, 4), "c0": (2, 4)})
    roles = {check.blob: check.role for check in report.checks}
    assert {name: roles[name] for name in ("x", "h0", "guess_w", "lstm/i2h_w", "lstm/gates_t_w")} == {
        "x": "input",
        "h0": "initial state",
        "guess_w": "input",
        "lstm/i2h_w": "input",
        "lstm/gates_t_w": "reference",
    }


def test_names_under_the_current_scope():
    step_net = core.Net("scope_step")
    x_t, h_prev = step_net.AddExternalInputs("x_t", "h_prev")
    step_net.Tanh(step_net.Sum([x_t, h_prev], "z"), "h_t")
    net = core.Net("scoped")
    shapes = {"x": (3, 2, 4), "outside": (2, 4), "h0": (2, 4)}
    with core.NameScope("n"):
        h_all, *_ = recurrent_net(net, step_net, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"})
        net.Mul([core.BlobReference(str(h_all)), core.BlobReference("outside")], ["y"], broadcast=1)
        report = gradcheck(net, "y", shapes, blobs=["x", "outside", "n/h0"])
        assert sorted(check.blob for check in report.checks) == ["n/h0", "n/x", "outside"]
        assert "net 'scoped' does not compute 'none'; it computes " in refused(ValueError, net, "none", shapes)


def test_of_large_blobs_some_elements_are_drawn():
    net, (h_all, _), shapes = elman()
    report = gradcheck(net, h_all, shapes, most_elements=5)
    checked = {check.blob: (check.checked, check.elements) for check in report.checks}
    assert checked == {"x": (5, 24), "h0": (5, 6), "w": (5, 9), "b": (3, 3)}
    assert "5 of 24" in str(report)


def test_the_same_seed_gives_the_same_report():
    net, (h_all, _), shapes = elman()
    first, again, other = (str(gradcheck(net, h_all, shapes, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


# Values


def test_values_come_from_the_caller_then_the_workspace_then_the_init_net():
    model = ModelHelper("model")
    brew.fc(model, "x", "y", dim_in=2, dim_out=3)
    workspace.FeedBlob("y_b", np.array([1, 2, 3], dtype=np.float32))
    squared = model.net.Mul(["y", "y"], "squared")
    report = gradcheck(model, squared, {"x": np.ones((1, 2))})
    assert sorted(check.blob for check in report.checks) == ["x", "y_b", "y_w"]
    assert not workspace.HasBlob("y_w")
    workspace.FeedBlob("x", np.ones((1, 2), dtype=np.float32))
    assert sorted(check.blob for check in gradcheck(model, squared).checks) == ["x", "y_b", "y_w"]


def test_integers_are_no_subject_of_a_gradient():
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", "lengths", ("h0", "c0"), 3, 4, scope="lstm")
    values = {"x": (3, 2, 3), "h0": (2, 4), "c0": (2, 4), "lengths": np.array([3, 1], dtype=np.int32)}
    report = gradcheck(model, hidden_all, values)
    assert len(report.checks) == 7 and "lengths" not in [check.blob for check in report.checks]


def test_a_gradient_that_comes_as_a_slice_is_spread_out():
    """An embedding before the loop: row 2 is read twice, row 1 never."""
    net = core.Net("embedded")
    net.Gather(["table", "rows"], "x")
    _, (h_all, _), shapes = elman(net)
    values = {"h0": shapes["h0"], "w": shapes["w"], "b": shapes["b"], "table": (4, 3)}
    report = gradcheck(net, h_all, {**values, "rows": np.array([[2, 0], [3, 2]])})
    assert [check.elements for check in report.checks if check.blob == "table"] == [12]


def test_an_input_that_the_net_changes_is_put_back_before_each_run():
    net = core.Net("changing")
    net.Mul(["x", net.Scale("s", "s", scale=2.0)], "y")
    report = gradcheck(net, "y", {"x": (2, 3), "s": (2, 3)})
    assert sorted(check.blob for check in report.checks) == ["s", "x"]


# What must stay as it was


def test_nothing_is_left_behind():
    net, (h_all, _), shapes = elman()
    workspace.FeedBlob("x", np.zeros((4, 2, 3), dtype=np.float32))
    before, blobs, current = snapshot(net), workspace.Blobs(), workspace.CurrentWorkspace()
    gradcheck(net, h_all, shapes)
    refused(ValueError, net, "nothing_of_the_kind", shapes)
    refused(GradientsDiffer, net, h_all, shapes, rtol=0, atol=0)
    assert snapshot(net) == before
    assert workspace.Blobs() == blobs and workspace.CurrentWorkspace() == current
    assert not workspace.FetchBlob("x").any()
    assert core.Net("elman_after").Name() == "elman_after"
    workspace.SwitchWorkspace("caffe2_recurrent_gradcheck", True)
    left = workspace.Blobs()
    workspace.SwitchWorkspace(current)
    assert left == []


# Errors


def test_all_arguments_of_a_wrong_type_are_named():
    text = refused(TypeError, "net", 3, [1], 5, rtol="1", atol=True, step=None, most_elements=0.5, seed=None)
    assert text == listed(
        "gradcheck",
        "model_or_net must be a ModelHelper, a core.Net or a NetDef; got 'net' of type str",
        "outputs must be a blob or a list of blobs; got 3 of type int",
        "blobs must be a blob or a list of blobs; got 5 of type int",
        "values must map blobs to arrays or shapes, like {'x': (5, 2, 3)}; got [1] of type list",
        "rtol must be a number; got '1' of type str",
        "atol must be a number; got True of type bool",
        "step must be a number; got None of type NoneType",
        "most_elements must be a whole number; got 0.5 of type float",
        "seed must be a whole number; got None of type NoneType",
    )


def test_what_is_within_the_arguments_has_a_type_as_well():
    net, _, _ = elman()
    text = refused(TypeError, net, [1], {2: (1,), "x": "text", "w": (0, 3), "b": 1.5}, blobs=[None])
    assert text == listed(
        "gradcheck",
        "outputs takes blobs or their names; got 1 of type int",
        "blobs takes blobs or their names; got None of type NoneType",
        "values maps blobs or their names; got 2 of type int",
        "values['x'] must be an array of numbers, or a shape like (5, 2, 3); got 'text' of type str",
        "values['w'] must be an array of numbers, or a shape like (5, 2, 3); got (0, 3) of type tuple",
        "values['b'] must be an array of numbers, or a shape like (5, 2, 3); got 1.5 of type float",
    )


def test_an_output_like_none_that_there_is():
    net, _, shapes = elman()
    text = "gradcheck: net '{}' does not compute 'zz'; it computes {}"
    computed = names(blob for operator in net.Proto().op for blob in operator.output)
    assert refused(ValueError, net, "zz", shapes) == text.format(net.Name(), computed)


def test_a_loop_that_is_forward_only():
    model = ModelHelper("model")
    LSTM(model, "x", None, None, 2, 3, "lstm", forward_only=True)
    assert refused(ValueError, model, "lstm/hidden_t_all", {"x": (3, 2, 2)}).startswith(
        "gradcheck: a gradient reaches the output 'lstm/hidden_t_all' of a RecurrentNetwork without a backward step; "
    )


def test_all_that_is_wrong_with_the_values_is_named():
    net, _, shapes = elman()
    values = {"x": np.full((4, 2, 3), np.nan), "w": (3, 3), "v": (1,)}
    assert refused(ValueError, net, "h_tt", values, ["timestep"]) == listed(
        "gradcheck",
        "net '{}' does not compute 'h_tt'; did you mean 'h_t_last'?".format(net.Name()),
        "values has 'v'; the inputs of the net are 'x', 'h0', 'w', 'b'",
        "there is no value for 'h0', 'b'; give an array or a shape in values",
        "'x' has elements that are not finite",
        "blobs has 'timestep'; float32 inputs of the net are 'x', 'w'",
    )


def test_all_numbers_out_of_range_are_named():
    net, (h_all, _), shapes = elman()
    numbers = {"rtol": -1, "atol": float("nan"), "step": 0, "most_elements": 0, "seed": -1}
    assert refused(ValueError, net, h_all, shapes, **numbers) == listed(
        "gradcheck",
        "rtol must be 0 or more; got -1",
        "atol must be a finite number; got nan",
        "step must be more than 0; got 0",
        "most_elements must be 1 or more; got 0",
        "seed must be 0 or more; got -1",
    )


def test_numbers_that_are_not_finite():
    net, (h_all, _), shapes = elman()
    assert refused(ValueError, net, h_all, shapes, rtol=float("inf"), step=np.float32("nan")) == listed(
        "gradcheck",
        "rtol must be a finite number; got inf",
        "step must be a finite number; got nan",
    )


def test_an_array_for_a_number():
    net, (h_all, _), shapes = elman()
    assert refused(TypeError, net, h_all, shapes, step=np.array([1.0, 2.0])) == (
        "gradcheck: step must be a number; got array([1., 2.]) of type ndarray"
    )


def test_outputs_that_are_none():
    net, (h_all, _), shapes = elman()
    assert refused(ValueError, net, [], shapes) == (
        "gradcheck: outputs is empty; name at least one blob that the net computes"
    )
    net.AddGradientOperators([h_all])
    assert refused(ValueError, net, h_all, shapes) == (
        "gradcheck: net '{}' has gradient operators already; check it before AddGradientOperators".format(net.Name())
    )


def test_a_net_without_floats():
    net = core.Net("whole")
    net.Cast("n", "y", to=core.DataType.FLOAT)
    assert refused(ValueError, net, "y", {"n": np.arange(3)}) == (
        "gradcheck: there is nothing to check: the net has no float32 input"
    )


def test_a_net_that_draws_numbers():
    net = core.Net("drawing")
    net.Dropout("x", ["y", "mask"], ratio=0.5, is_test=0)
    assert refused(ValueError, net, "y", {"x": (100,)}) == (
        "gradcheck: output 'y' changes from run to run; take what draws random numbers out of the net"
    )


def test_outputs_that_are_not_finite():
    net = core.Net("infinite")
    net.Log("x", "y")
    assert refused(ValueError, net, "y", {"x": np.zeros(2)}) == (
        "gradcheck: output 'y' has elements that are not finite at these values"
    )


def test_a_gradient_that_caffe2_drops_is_named():
    net, outputs, shapes = elman(outputs_with_grads=(0,))
    text = refused(ValueError, net, list(outputs), shapes)
    assert text == (
        "check_gradients: the gradient of '{}' (position 1) is dropped; outputs_with_grads is (0,): add 1 to it or "
        "pass 'auto'".format(outputs[1])
    )


def test_an_output_named_twice():
    net, (h_all, h_last), shapes = elman()
    assert refused(ValueError, net, [h_all, h_last, h_all], shapes) == "gradcheck: outputs names '{}' twice".format(
        h_all
    )


def test_a_step_that_is_lost_in_float32():
    net, (h_all, _), shapes = elman()
    x = np.ones((4, 2, 3), np.float32)
    x[1, 1, 1], x[2, 0, 0] = -3e5, np.float32(4e5)
    w = np.full((3, 3), 2.0, np.float32)
    assert refused(ValueError, net, h_all, {**shapes, "x": x, "w": w}) == (
        "gradcheck: 'x' has 400000, which float32 does not change by a step of 0.015625"
    )
    assert refused(ValueError, net, h_all, {**shapes, "x": x, "w": w}, ["x", "w"], step=1e-9) == listed(
        "gradcheck",
        "'x' has 400000, which float32 does not change by a step of 1e-09",
        "'w' has 2, which float32 does not change by a step of 1e-09",
    )


def test_no_blobs():
    net, (h_all, _), shapes = elman()
    assert refused(ValueError, net, h_all, shapes, []) == (
        "gradcheck: blobs is empty; float32 inputs of the net are 'x', 'h0', 'w', 'b'"
    )


def test_a_seed_that_numpy_does_not_take():
    net, (h_all, _), shapes = elman()
    assert refused(ValueError, net, h_all, shapes, seed=2**32) == (
        "gradcheck: seed must be 4294967295 or less; got 4294967296"
    )
    assert gradcheck(net, h_all, shapes, seed=2**32 - 1).passes


def test_values_with_which_the_net_does_not_run():
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", "lengths", ("h0", "c0"), 3, 4, "lstm")
    values = {"x": (5, 2, 3), "h0": (2, 4), "c0": (2, 4)}
    inputs = (
        "its inputs are 'x' float32 [5, 2, 3], 'lengths' int64 [2], 'h0' float32 [2, 4], 'c0' float32 [2, 4], "
        "'lstm/i2h_w' float32 [16, 3], 'lstm/i2h_b' float32 [16], 'lstm/gates_t_w' float32 [16, 4], "
        "'lstm/gates_t_b' float32 [16]"
    )
    text = refused(ValueError, model, hidden_all, {**values, "lengths": np.array([5, 3])})
    assert text.startswith("gradcheck: the net does not run: Tensor type mismatch, caller expects elements to be int")
    assert "\n" not in text and set(text.split("; ")[1].split(", '")) == set(inputs.split(", '"))


def test_caller_s_nets_alone_are_optimised():
    net, (h_all, _), shapes = elman()
    reports = []
    with install(optimize=True, even_if_slower=True, trials=False, on_report=reports.append):
        assert gradcheck(net, h_all, shapes).passes
    assert reports == []


def test_an_output_that_another_is_made_of():
    """Of both there is a share of the gradient of what they are made of."""
    net = core.Net("net")
    first = net.Tanh("x", "first")
    second = net.Sqr(first, "second")
    assert "ok" in str(gradcheck(net, [first, second], {"x": (2, 3)}))
