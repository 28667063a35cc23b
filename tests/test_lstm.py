"""`LSTM`: values, gradients, names and parameters, on the engine."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, optimizer, rnn_cell, workspace
from caffe2.python.cnn import CNNModelHelper
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.parameter_sharing import ParameterSharing
from hypothesis import given
from hypothesis import strategies as st

import caffe2_checker
import comparing
import numpy_loop
import step_memory
from caffe2_recurrent import LSTM, retrieve_step_blobs
from numpy_lstm import PARAMETERS, Case

STEP_NUMBER_BYTES = 4
ALL_CHOICES = [choice for size in range(1, 5) for choice in itertools.combinations(range(4), size)] + ["auto"]


def assert_right(case, executor=True):
    outputs, gradients, _ = case.run(executor=executor)
    for name, found, expected in zip(("hidden_all", "hidden_last", "cell_all", "cell_last"), outputs, case.reference()):
        comparing.assert_close(found, expected, name)
    for name, expected in case.reference_gradients().items():
        comparing.assert_close(gradients[name], expected, "gradient of " + name)


@st.composite
def cases(draw):
    steps, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lengths = draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    options = {
        "outputs_with_grads": draw(st.sampled_from(ALL_CHOICES)),
        "memory_optimization": draw(st.booleans()),
        "forget_bias": draw(st.sampled_from([0.0, 1.0])),
        "drop_states": draw(st.booleans()),
    }
    return Case(
        steps=steps,
        batch=batch,
        dim_in=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 3)),
        lengths=lengths,
        state_rank=draw(st.integers(1, 3)),
        options=options,
        seed=draw(st.integers(0, 1000)),
    )


@given(cases(), st.booleans())
def test_values_and_gradients_are_those_of_a_numpy_loop(case, executor):
    workspace.ResetWorkspace()
    assert_right(case, executor)


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
@pytest.mark.parametrize("choice", ALL_CHOICES, ids=str)
def test_every_choice_of_outputs_with_grads(choice, executor):
    assert_right(Case(lengths=[3, 1], options={"outputs_with_grads": choice}), executor)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [3, 3], [1, 2], None], ids=str)
@pytest.mark.parametrize("drop_states", [True, False], ids=["drop", "keep"])
def test_lengths(lengths, drop_states):
    assert_right(Case(lengths=lengths, options={"drop_states": drop_states, "outputs_with_grads": (0, 1, 2, 3)}))


def test_no_lengths_is_full_length():
    full, none = Case(lengths=[3, 3]), Case()
    for with_lengths, without in zip(full.run()[0], none.run()[0]):
        np.testing.assert_array_equal(with_lengths, without)


def test_one_step():
    assert_right(Case(steps=1, batch=1, dim_in=1, dim=1, options={"outputs_with_grads": (0, 3)}))


@pytest.mark.parametrize("memory_optimization", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("lengths", [None, [3, 1]], ids=["full", "lengths"])
def test_results_are_those_of_caffe2s_own_lstm(lengths, memory_optimization):
    options = {
        "memory_optimization": memory_optimization,
        "outputs_with_grads": (0, 3),
        "forget_bias": 1.0,
        "drop_states": True,
    }
    case = Case(lengths=lengths, options=options)
    outputs, gradients, _ = case.run(LSTM)
    workspace.ResetWorkspace()
    their_outputs, their_gradients, _ = case.run(rnn_cell.LSTM)
    for ours, theirs in zip(outputs, their_outputs):
        np.testing.assert_array_equal(ours, theirs)
    assert set(gradients) == set(their_gradients) == set(case.values()) - {"lengths"}
    for name, ours in gradients.items():
        np.testing.assert_array_equal(ours, their_gradients[name], err_msg=name)


# Caffe2's own checker adds up the outputs of one check.
SAME_SHAPE = [(0, 2), (1, 3)]


def checked_values(case):
    """All float blobs of the model by full name; the rest is left in the workspace."""
    case.feed()
    named = {("lstm/" + name if name in PARAMETERS else name): value for name, value in case.values().items()}
    return {name: value for name, value in named.items() if value.dtype == np.float32}


@pytest.mark.parametrize("positions", SAME_SHAPE, ids=["all steps", "last step"])
@pytest.mark.parametrize("memory_optimization", [True, False], ids=["recompute", "keep"])
def test_caffe2s_gradient_checker_accepts_every_input_state_and_parameter(memory_optimization, positions):
    options = {"outputs_with_grads": positions, "memory_optimization": memory_optimization}
    case = Case(lengths=[3, 1], options=options)
    model, outputs = case.build()
    values = checked_values(case)
    assert set(values) == {"X", "hidden", "cell", *("lstm/" + name for name in PARAMETERS)}
    for name in values:
        caffe2_checker.check(model.net, [outputs[n] for n in positions], values, name)


def plant(net, gradient):
    """Make the backward step of the loop in `net` multiply one of its gradients by 1.05."""
    operator = next(operator for operator in net.Proto().op if operator.type == "RecurrentNetwork")
    backward = next(argument.n for argument in operator.arg if argument.name == "backward_step_net")
    assert any(gradient in step.output for step in backward.op)
    blob = core.BlobReference(gradient)
    backward.op.extend([core.CreateOperator("Scale", [blob], [blob], scale=1.05)])


@pytest.mark.parametrize(
    "checked, gradient",
    [
        ("X", "lstm/gates_t_grad"),
        ("hidden", "lstm/hidden_t_prev_grad"),
        ("cell", "lstm/cell_t_prev_grad"),
        ("lstm/gates_t_w", "lstm/gates_t_w_grad"),
        ("lstm/gates_t_b", "lstm/gates_t_b_grad"),
    ],
)
def test_caffe2s_gradient_checker_rejects_a_slope_five_percent_off(checked, gradient):
    case = Case(options={"outputs_with_grads": SAME_SHAPE[0]})
    model, outputs = case.build()
    values = checked_values(case)
    plant(model.net, gradient)
    with pytest.raises(AssertionError, match="Error in gradient check"):
        caffe2_checker.check(model.net, [outputs[0], outputs[2]], values, checked)


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_memory_optimization_changes_no_gradient_and_keeps_the_step_number_alone(executor):
    kept = Case(steps=4, batch=3, dim=4, lengths=[4, 2, 0])
    in_place = Case(steps=4, batch=3, dim=4, lengths=[4, 2, 0], options={"memory_optimization": True})
    _, gradients, model = kept.run(executor=executor)
    owned = step_memory.owned_bytes(model.net)
    # gates of 4 * D floats for each of N sequences, beside the step number
    assert owned == [STEP_NUMBER_BYTES + 3 * 16 * 4] * 4
    workspace.ResetWorkspace()
    _, again, model = in_place.run(executor=executor)
    assert step_memory.owned_bytes(model.net) == [STEP_NUMBER_BYTES] * 4
    assert set(again) == set(gradients)
    for name in gradients:
        np.testing.assert_array_equal(gradients[name], again[name], err_msg=name)


@pytest.mark.parametrize("memory_optimization", [True, False])
def test_the_gates_take_the_place_of_the_sequence(memory_optimization):
    """And the backward step computes nothing again; without a backward step nothing is kept."""
    for forward_only in (False, True):
        workspace.ResetWorkspace()
        case = Case(options={"memory_optimization": memory_optimization, "forward_only": forward_only})
        outputs, _, model = case.run()
        x, hidden = (workspace.FetchBlob(blob) for blob in ("X", "hidden"))
        weights = {name: workspace.FetchBlob("lstm/" + name) for name in PARAMETERS}
        of_input = x @ weights["i2h_w"].T + weights["i2h_b"]
        before = np.concatenate([np.broadcast_to(hidden, (1,) + outputs[0].shape[1:]), outputs[0][:-1]])
        gates = of_input + before @ weights["gates_t_w"].T + weights["gates_t_b"]
        in_place = memory_optimization and not forward_only
        comparing.assert_close(workspace.FetchBlob("lstm/i2h"), gates if in_place else of_input, "i2h")
        (loop,) = [operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork"]
        steps = [argument.n.op for argument in loop.arg if argument.name == "backward_step_net"]
        backward = [[operator.type for operator in step] for step in steps]
        assert backward == ([] if forward_only else [["LSTMUnitGradient", "FCGradient", "Sum"]])


def test_retrieved_step_blobs_hold_each_steps_values():
    case = Case(lengths=[3, 1])
    outputs, _, model = case.run()
    names = [name.decode() for name in retrieve_step_blobs(model.net, "seen")]
    for step in range(3):
        assert "seen_lstm/hidden_t{}".format(step) in names
        hidden = workspace.FetchBlob("seen_lstm/hidden_t{}".format(step))
        np.testing.assert_array_equal(hidden, outputs[0][step : step + 1])


def test_forward_only_uses_four_step_workspaces_in_turn():
    case = Case(steps=7, options={"forward_only": True})
    outputs, gradients, model = case.run()
    for found, expected in zip(outputs, case.reference()):
        comparing.assert_close(found, expected, "output")
    assert gradients == {}
    assert len(step_memory.owned_bytes(model.net)) == 4


@pytest.mark.parametrize("Helper", [ModelHelper, CNNModelHelper])
def test_names_and_shapes_are_those_that_checkpoints_carry(Helper):
    with core.NameScope("encoder"):
        model, outputs = Case().build(model=Helper(name="model"))
    assert [str(output) for output in outputs] == [
        "encoder/lstm/hidden_t_all",
        "encoder/lstm/hidden_t_last",
        "encoder/lstm/cell_t_all",
        "encoder/lstm/cell_t_last",
    ]
    names = ["encoder/lstm/" + name for name in PARAMETERS]
    assert [str(blob) for blob in model.params] == names
    assert [str(blob) for blob in model.weights] == names[::2]
    assert [str(blob) for blob in model.biases] == names[1::2]
    assert {"encoder/X", "encoder/hidden", "encoder/cell"} <= set(model.net.Proto().external_input)
    assert model.net.BlobIsDefined("encoder/lstm/i2h")
    workspace.RunNetOnce(model.param_init_net)
    shapes = [workspace.FetchBlob(name).shape for name in names]
    assert shapes == [(12, 2), (12,), (12, 3), (12,)]


def test_returned_parameters():
    _, outputs = Case(options={"return_params": True}).build()
    assert len(outputs) == 5
    names = {kind: {role: str(blob) for role, blob in blobs.items()} for kind, blobs in outputs[4].items()}
    assert names == {
        "input": {"weights": "lstm/i2h_w", "biases": "lstm/i2h_b"},
        "recurrent": {"weights": "lstm/gates_t_w", "biases": "lstm/gates_t_b"},
    }


@pytest.mark.parametrize("Helper", [ModelHelper, CNNModelHelper])
def test_optimizers_train_every_parameter(Helper):
    model = Helper(name="model")
    hidden_all, _, _, _ = LSTM(model, "X", None, ("hidden", "cell"), 2, 3, "lstm")
    error = model.net.Sub([hidden_all, "target"], "error")
    loss = model.net.AveragedLoss(model.net.Mul([error, error], "squared"), "loss")
    model.AddGradientOperators([loss])
    optimizer.build_sgd(model, base_learning_rate=0.5)
    workspace.RunNetOnce(model.param_init_net)
    Case().feed()
    workspace.FeedBlob("target", np.full((3, 2, 3), 0.3, dtype=np.float32))
    before = {name: workspace.FetchBlob("lstm/" + name) for name in PARAMETERS}
    workspace.CreateNet(model.net)
    losses = []
    for _ in range(40):
        workspace.RunNet(model.net)
        losses.append(float(workspace.FetchBlob("loss")))
    assert losses[-1] < 0.5 * losses[0]
    for name, value in before.items():
        assert not np.array_equal(workspace.FetchBlob("lstm/" + name), value), name


def test_initial_states_may_be_parameters():
    model = ModelHelper("model")
    outputs = LSTM(model, "X", None, None, 2, 3, "lstm")
    names = ["lstm/initial_hidden_state", "lstm/initial_cell_state"]
    assert [str(blob) for blob in model.params[4:]] == names
    gradients = model.AddGradientOperators([outputs[0]])
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("X", Case().values()["X"])
    workspace.RunNetOnce(model.net)
    for name in names:
        assert workspace.FetchBlob(name).tolist() == [0, 0, 0]
        assert np.abs(workspace.FetchBlob(str(gradients[name]))).max() > 0


def two_layers(first_scope, second_scope, share=None):
    """Two layers over X and Y in one model; outputs and gradients of all parameters and sequences."""
    model = ModelHelper("model")
    values = Case().values()
    values["Y"] = values["X"][::-1].copy() * 0.5
    with ParameterSharing(share or {}):
        first = LSTM(model, "X", None, ("hidden", "cell"), 2, 3, first_scope)
        second = LSTM(model, "Y", None, ("hidden", "cell"), 2, 3, second_scope)
    gradients = model.AddGradientOperators([first[0], second[0]])
    for parameter in model.params:
        workspace.FeedBlob(str(parameter), values[str(parameter).split("/")[-1]])
    for name in ("X", "Y", "hidden", "cell"):
        workspace.FeedBlob(name, values[name])
    workspace.RunNetOnce(model.net)
    fetched = {str(blob): workspace.FetchBlob(str(gradients[blob])) for blob in [*model.params, "X", "Y"]}
    return model, [workspace.FetchBlob(blob) for blob in first + second], fetched


@pytest.mark.parametrize(
    "scopes, share", [(("lstm", "lstm"), None), (("lstm", "other"), {"other": "lstm"})], ids=["same scope", "sharing"]
)
def test_layers_may_share_parameters_and_nothing_else(scopes, share):
    _, apart, gradients_apart = two_layers("first", "second")
    workspace.ResetWorkspace()
    model, shared, gradients = two_layers(*scopes, share=share)
    assert [str(blob) for blob in model.params] == ["lstm/" + name for name in PARAMETERS]
    for ours, expected in zip(shared, apart):
        np.testing.assert_array_equal(ours, expected)
    for name in ("X", "Y"):
        np.testing.assert_array_equal(gradients[name], gradients_apart[name])
    for name in PARAMETERS:
        expected = gradients_apart["first/" + name] + gradients_apart["second/" + name]
        comparing.assert_close(gradients["lstm/" + name], expected, name, tolerance=1e-6)


def test_stacked_layers():
    model = ModelHelper("model")
    lower = LSTM(model, "X", None, ("hidden", "cell"), 2, 3, "lower")
    upper = LSTM(model, lower[0], None, ("hidden", "cell"), 3, 3, "upper")
    gradients = model.AddGradientOperators([upper[0]])
    case = Case()
    case.feed("lower")
    case.feed("upper")
    values = case.doubles()
    upper_w = np.random.RandomState(5).uniform(-1, 1, size=(12, 3)).astype(np.float32)
    workspace.FeedBlob("upper/i2h_w", upper_w)
    workspace.RunNetOnce(model.net)

    def outputs(values):
        return case.reference(dict(values, X=case.reference(values)[0], i2h_w=np.float64(upper_w)))

    comparing.assert_close(workspace.FetchBlob(upper[0]), outputs(values)[0], "hidden_all")

    expected = numpy_loop.numerical_gradients(lambda values: outputs(values)[0].sum(), values, ["X"])
    comparing.assert_close(workspace.FetchBlob(str(gradients["X"])), expected["X"], "X")


def test_test_model_uses_the_trained_parameters():
    train, _ = Case().build()
    test, outputs = Case(options={"forward_only": True}).build(model=ModelHelper("test", init_params=False))
    assert len(test.param_init_net.Proto().op) == 0
    assert [str(blob) for blob in test.params] == [str(blob) for blob in train.params]
    Case().feed()
    workspace.RunNetOnce(test.net)
    comparing.assert_close(workspace.FetchBlob(outputs[0]), Case().reference()[0], "hidden_all")


def test_states_carried_over_from_run_to_run():
    """Two runs that hand on their last states equal one over the joined sequence."""
    case = Case(steps=6)
    model, outputs = case.build()
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    x = case.values()["X"]
    halves = []
    workspace.FeedBlob("X", x[:3])
    workspace.CreateNet(model.net)
    for half in (x[:3], x[3:]):
        workspace.FeedBlob("X", half)
        workspace.RunNet(model.net)
        halves.append(workspace.FetchBlob(outputs[0]))
        workspace.FeedBlob("hidden", workspace.FetchBlob(outputs[1]))
        workspace.FeedBlob("cell", workspace.FetchBlob(outputs[3]))
    comparing.assert_close(np.concatenate(halves), case.reference()[0], "hidden_all")


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_length_may_change_from_run_to_run_in_one_net(executor):
    model, outputs = Case(lengths=[1, 1]).build()
    gradients = model.net.AddGradientOperators([outputs[0]])
    comparing.configure(model.net, executor)
    created = False
    for steps in (3, 1, 8, 2):
        case = Case(steps=steps, lengths=[steps, steps // 2], seed=steps)
        case.feed()
        created = created or workspace.CreateNet(model.net)
        workspace.RunNet(model.net)
        comparing.assert_close(workspace.FetchBlob(outputs[0]), case.reference()[0], steps)
        expected = case.gradient_of_summed_hidden()
        comparing.assert_close(workspace.FetchBlob(str(gradients["X"])), expected, steps)


RUN_SAVED = """
import sys
import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace
net = caffe2_pb2.NetDef()
with open(sys.argv[1] + "/net.pb", "rb") as file:
    net.ParseFromString(file.read())
for name, value in np.load(sys.argv[1] + "/values.npz").items():
    workspace.FeedBlob(name.replace("|", "/"), value)
workspace.RunNetOnce(net)
fetched = {name.replace("/", "|"): workspace.FetchBlob(name) for name in sys.argv[2:]}
np.savez(sys.argv[1] + "/results.npz", **fetched)
assert "caffe2_recurrent" not in sys.modules
"""


@pytest.mark.parametrize("choice", [(0, 3), "auto"], ids=str)
def test_a_saved_net_runs_in_a_new_process_without_this_package(tmp_path, choice):
    case = Case(lengths=[3, 1], options={"outputs_with_grads": choice})
    model, outputs = case.build()
    gradients = model.net.AddGradientOperators([outputs[0], outputs[3]])
    case.feed()
    wanted = [str(outputs[0]), str(outputs[3]), *(str(gradients[name]) for name in ("X", "hidden", "lstm/gates_t_w"))]
    (tmp_path / "net.pb").write_bytes(model.net.Proto().SerializeToString())
    np.savez(str(tmp_path / "values.npz"), **{name.replace("/", "|"): workspace.FetchBlob(name) for name in fed(case)})
    workspace.RunNetOnce(model.net)
    subprocess.run(
        [sys.executable, "-c", RUN_SAVED, str(tmp_path), *wanted],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    results = np.load(str(tmp_path / "results.npz"))
    for name in wanted:
        np.testing.assert_array_equal(results[name.replace("/", "|")], workspace.FetchBlob(name), err_msg=name)


def fed(case):
    return [("lstm/" + name if name in PARAMETERS else name) for name in case.values()]


def test_the_forward_net_read_back_from_a_file_gets_its_gradients():
    """The operator carries all that the gradient maker needs."""
    case = Case(options={"outputs_with_grads": "auto"})
    model, outputs = case.build()
    case.feed()
    read_back = core.Net(caffe2_pb2.NetDef.FromString(model.net.Proto().SerializeToString()))
    expected = model.net.AddGradientOperators([outputs[0]])
    workspace.RunNetOnce(model.net)
    gradient = workspace.FetchBlob(str(expected["X"]))
    found = read_back.AddGradientOperators([core.BlobReference(str(outputs[0]), read_back)])
    workspace.RunNetOnce(read_back)
    np.testing.assert_array_equal(workspace.FetchBlob(str(found["X"])), gradient)


def test_a_dense_layer_on_top_trains_through_the_loop():
    """The usual use: brew on top, loss, one call of AddGradientOperators."""
    model = ModelHelper("model")
    hidden_all, _, _, _ = LSTM(model, "X", None, ("hidden", "cell"), 2, 3, "lstm")
    scores = brew.fc(model, hidden_all, "scores", dim_in=3, dim_out=2, axis=2)
    loss = model.net.AveragedLoss(model.net.Sigmoid(scores, "probabilities"), "loss")
    model.AddGradientOperators([loss])
    assert {str(blob) for blob in model.params} == set(map(str, model.param_to_grad))


@pytest.mark.gpu
@pytest.mark.parametrize("memory_optimization", [True, False], ids=["recompute", "keep"])
def test_on_a_gpu_values_and_gradients_are_those_of_a_numpy_loop(memory_optimization):
    case = Case(lengths=[3, 1], options={"memory_optimization": memory_optimization})
    with core.DeviceScope(core.DeviceOption(workspace.GpuDeviceType, 0)):
        assert_right(case)
