"""`cudnn_LSTM`: the nets it builds, what they mean, what it refuses; on a GPU that it computes what `LSTM` does."""

import itertools
import warnings

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, optimizer, rnn_cell, workspace
from caffe2.python.cnn import CNNModelHelper
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.parameter_sharing import ParameterSharing

import comparing
import numpy_cudnn
from caffe2_recurrent import LSTM, GetLSTMParamNames, InitFromLSTMParams, check_gradients, cudnn_LSTM, cudnn_machine
from caffe2_recurrent.cudnn import check_can_run
from errors_support import listed, model_snapshot

pytestmark = pytest.mark.filterwarnings("ignore:cudnn_LSTM. this net can be built here but not run")

DIM_IN, DIM = 2, 3
STEPS, BATCH = 4, 2
WEIGHTS = ["input_gate_w", "forget_gate_w", "output_gate_w", "cell_w"]
BIASES = ["input_gate_b", "forget_gate_b", "output_gate_b", "cell_b"]
NAMES = WEIGHTS + BIASES
SIDES = ["input", "recurrent"]
DOCTOR = "`python -m caffe2_recurrent.doctor` says what this installation can do"
NO_GPU = "cuDNN needs a GPU, and this Caffe2 has none to use; " + DOCTOR


def call(model, builder=cudnn_LSTM, **changes):
    given = {
        "input_blob": core.BlobReference("X"),
        "initial_states": (core.BlobReference("hidden"), core.BlobReference("cell")),
        "dim_in": DIM_IN,
        "dim_out": DIM,
        "scope": "s",
    }
    given.update(changes)
    return builder(model, **given)


def of_type(net, kind):
    return [operator for operator in net.Proto().op if operator.type == kind]


def gate_blobs(prefix="mine"):
    return {name: "{}_{}".format(prefix, name) for name in NAMES}


# The nets.


def test_the_operator():
    model = ModelHelper("model")
    outputs = call(model, num_layers=2)
    (operator,) = model.net.Proto().op
    assert (operator.type, operator.engine) == ("Recurrent", "CUDNN")
    assert list(operator.input) == ["X", "hidden", "cell", "s/lstm_weight"]
    names = ["lstm_output", "lstm_hidden_output", "lstm_cell_output", "lstm_rnn_scratch", "lstm_dropout_states"]
    assert list(operator.output) == ["s/" + name for name in names]
    assert [str(blob) for blob in outputs] == list(operator.output)[:3]
    assert list(model.net.Proto().external_output) == list(operator.output)[1:]
    assert numpy_cudnn.arguments(operator) == {
        "hidden_size": DIM,
        "rnn_mode": "lstm",
        "bidirectional": 0,
        "dropout": 1.0,
        "input_mode": "linear",
        "num_layers": 2,
        "seed": 0,
    }


@pytest.mark.parametrize("Helper", [ModelHelper, CNNModelHelper])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_flat_weights_are_one_parameter(Helper, num_layers):
    model = Helper(name="model")
    call(model, num_layers=num_layers)
    first = 4 * (DIM * DIM_IN + DIM * DIM + 2 * DIM)
    further = 4 * (2 * DIM * DIM + 2 * DIM)
    fill = model.param_init_net.Proto().op[0]
    assert list(fill.output) == ["s/lstm_weight"]
    assert numpy_cudnn.arguments(fill)["shape"] == [first + (num_layers - 1) * further]
    assert [str(blob) for blob in model.params] == ["s/lstm_weight"]
    assert [str(blob) for blob in model.weights] == ["s/lstm_weight"]
    assert model.biases == []


@pytest.mark.parametrize("num_layers", [1, 2])
def test_gates_are_set_and_taken_out_in_one_order(num_layers):
    model = ModelHelper("model")
    extractor, mapping = call(model, num_layers=num_layers, return_params=True)[3]
    expected = list(itertools.product(SIDES, NAMES, range(num_layers)))
    for operators in (of_type(model.param_init_net, "RecurrentParamSet"), of_type(extractor, "RecurrentParamGet")):
        given = [numpy_cudnn.arguments(operator) for operator in operators]
        assert [(one["input_type"], one["param_type"], one["layer"]) for one in given] == expected
        assert all(operator.engine == "CUDNN" for operator in operators)
    for operator, (side, name, layer) in zip(of_type(model.param_init_net, "RecurrentParamSet"), expected):
        initial = "s/lstm_init_{}_{}_{}".format(side, name, layer)
        assert list(operator.input) == ["X", "s/lstm_weight", initial]
        assert list(operator.output) == ["s/lstm_weight"]
    assert extractor.Name().startswith("lstm_param_extractor")
    assert list(extractor.Proto().external_input) == ["X", "s/lstm_weight"]
    assert len(extractor.Proto().op) == len(expected)
    for operator, (side, name, layer) in zip(extractor.Proto().op, expected):
        assert list(operator.input) == ["X", "s/lstm_weight"]
        assert list(operator.output) == ["s/lstm_{}_{}_{}".format(side, name, layer)]
        assert str(mapping[side][name][layer]) == operator.output[0]
    assert {side: {name: list(layers) for name, layers in mapping[side].items()} for side in mapping} == {
        side: {name: list(range(num_layers)) for name in NAMES} for side in SIDES
    }


@pytest.mark.parametrize("num_layers", [1, 3])
def test_operators_are_those_of_caffe2s_builder(num_layers):
    """But for the seed, which it draws from Python's `random`, and the initial values."""
    ours, theirs = ModelHelper("ours"), ModelHelper("theirs")
    found = call(ours, num_layers=num_layers, return_params=True)
    expected = call(theirs, rnn_cell.cudnn_LSTM, num_layers=num_layers, return_params=True)
    assert [str(blob) for blob in found[:3]] == [str(blob) for blob in expected[:3]]
    assert comparing.differences(ours.net.Proto().op[0], theirs.net.Proto().op[0]) == ["seed"]
    for kind, our_net, their_net in (
        ("RecurrentParamSet", ours.param_init_net, theirs.param_init_net),
        ("RecurrentParamGet", found[3][0], expected[3][0]),
    ):
        for one, other in itertools.zip_longest(of_type(our_net, kind), of_type(their_net, kind)):
            assert comparing.differences(one, other) == []
    assert found[3][1] == expected[3][1]


def test_building_twice_makes_the_same_nets():
    first, second = ModelHelper("first"), ModelHelper("second")
    call(first)
    call(second)
    assert list(first.net.Proto().op) == list(second.net.Proto().op)
    assert list(first.param_init_net.Proto().op) == list(second.param_init_net.Proto().op)


def test_strings_are_blobs_under_the_scope():
    model = ModelHelper("model")
    with core.NameScope("outer"):
        call(model, input_blob="X", initial_states=["h", core.BlobReference("cell")], input_params=gate_blobs())
    operator = model.net.Proto().op[0]
    assert list(operator.input) == ["outer/s/X", "outer/s/h", "cell", "outer/s/lstm_weight"]
    setting = of_type(model.param_init_net, "RecurrentParamSet")
    assert [operator.input[2] for operator in setting[:8]] == ["outer/s/mine_" + name for name in NAMES]
    assert operator.output[0] == "outer/s/lstm_output"


def test_device_of_the_scope():
    model = ModelHelper("model")
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 1)):
        extractor, _ = call(model, return_params=True)[3]
    for net in (model.net, model.param_init_net, extractor):
        for operator in net.Proto().op:
            assert (operator.device_option.device_type, operator.device_option.device_id) == (caffe2_pb2.CUDA, 1)


def test_input_from_the_net_itself():
    model = ModelHelper("model")
    x = model.net.Copy("raw", "X")
    output = call(model, input_blob=x)[0]
    call(model, input_blob=output, dim_in=DIM, scope="upper")
    assert list(model.net.Proto().op[2].input)[0] == "s/lstm_output"
    assert "X" not in model.net.Proto().external_input


# Parameters.


def test_given_parameters():
    model = ModelHelper("model")
    given = {name: core.BlobReference("mine/" + name) for name in NAMES}
    call(model, recurrent_params=given)
    setting = of_type(model.param_init_net, "RecurrentParamSet")
    assert [operator.input[2] for operator in setting[8:]] == ["mine/" + name for name in NAMES]
    assert [operator.input[2] for operator in setting[:8]] == ["s/lstm_init_input_{}_0".format(name) for name in NAMES]
    assert {"mine/" + name for name in NAMES} <= set(model.param_init_net.Proto().external_input)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_given_parameters_by_layer(num_layers):
    model = ModelHelper("model")
    layers = range(num_layers)
    params = {
        side + "_params": {name: {layer: "{}{}{}".format(side, name, layer) for layer in layers} for name in NAMES}
        for side in SIDES
    }
    call(model, num_layers=num_layers, **params)
    setting = of_type(model.param_init_net, "RecurrentParamSet")
    assert [operator.input[2] for operator in setting] == [
        "s/{}{}{}".format(*gate) for gate in itertools.product(SIDES, NAMES, layers)
    ]
    # No initial values are made for what is given.
    assert len(model.param_init_net.Proto().op) == 1 + len(setting)


def test_initial_values_are_those_of_lstm():
    """Weights uniform with variance 1 / (size of what they multiply), biases 0."""
    model = ModelHelper("model")
    call(model, dim_in=300, dim_out=40, num_layers=2)
    model.param_init_net.ConstantFill([], "X", shape=[1, 1, 300])
    proto = model.param_init_net.Proto()
    fills = [operator for operator in proto.op if operator.type != "RecurrentParamSet"]
    for operator in fills:
        workspace.RunOperatorOnce(operator)
    for side, name, layer in itertools.product(SIDES, NAMES, range(2)):
        value = workspace.FetchBlob("s/lstm_init_{}_{}_{}".format(side, name, layer))
        if name in BIASES:
            assert value.tolist() == [0] * 40
            continue
        width = 300 if (side, layer) == ("input", 0) else 40
        assert value.shape == (40 * width,)
        bound = np.sqrt(3 / width)
        assert np.abs(value).max() <= bound * (1 + 1e-6)
        # of 1600 numbers or more; five deviations of the mean and of the variance
        assert abs(value.mean()) < 5 / np.sqrt(width * value.size)
        np.testing.assert_allclose(value.var() * width, 1, rtol=5 * np.sqrt(0.8 / value.size))


def test_a_model_that_fills_nothing():
    model = ModelHelper("model", init_params=False)
    call(model)
    assert len(model.param_init_net.Proto().op) == 0
    assert [str(blob) for blob in model.params] == ["s/lstm_weight"]


@pytest.mark.parametrize("share", [None, {"other": "s"}], ids=["same scope", "sharing"])
def test_layers_may_share_the_parameter(share):
    model = ModelHelper("model")
    with ParameterSharing(share or {}):
        first = call(model, input_params=gate_blobs())
        filled = len(model.param_init_net.Proto().op)
        second = call(model, scope="other" if share else "s")
    assert [str(blob) for blob in model.params] == [str(blob) for blob in model.weights] == ["s/lstm_weight"]
    # The second layer does not fill it again.
    assert len(model.param_init_net.Proto().op) == filled
    assert [operator.input[3] for operator in model.net.Proto().op] == ["s/lstm_weight"] * 2
    expected = "other/lstm_output" if share else "s/lstm_output_1"
    assert [str(first[0]), str(second[0])] == ["s/lstm_output", expected]
    gradients = model.AddGradientOperators([first[0], second[0]])
    assert str(gradients["s/lstm_weight"]) == "s/lstm_weight_grad"


def test_third_layer_of_a_scope():
    model = ModelHelper("model")
    outputs = [str(call(model)[2]) for _ in range(3)]
    assert outputs == ["s/lstm_cell_output", "s/lstm_cell_output_1", "s/lstm_cell_output_2"]


def test_parameter_added_by_hand_is_used():
    model = ModelHelper("model")
    weight = model.param_init_net.ConstantFill([], "s/lstm_weight", shape=[84], value=0.5)
    model.AddParameter(weight)
    call(model)
    assert [str(blob) for blob in model.params] == ["s/lstm_weight"]
    assert len(model.param_init_net.Proto().op) == 1


# Gradients.


def test_gradient_operator():
    model = ModelHelper("model")
    output, _, _ = call(model)
    gradients = model.AddGradientOperators([output])
    (operator,) = of_type(model.net, "RecurrentGradient")
    assert list(operator.input)[:6] == ["X", "hidden", "cell", "s/lstm_weight", "s/lstm_rnn_scratch", "s/lstm_output"]
    assert operator.input[6] == str(gradients["s/lstm_output"])
    made = ["X_grad", "hidden_grad", "cell_grad", "s/lstm_weight_grad", "s/lstm_dropout_states", "s/lstm_rnn_scratch"]
    assert list(operator.output) == made
    assert operator.engine == "CUDNN"
    for blob, gradient in zip(("X", "hidden", "cell", "s/lstm_weight"), made):
        assert str(gradients[blob]) == gradient
    assert str(model.param_to_grad[model.params[0]]) == "s/lstm_weight_grad"


def test_optimizers_take_the_parameter():
    model = ModelHelper("model")
    loss = model.net.AveragedLoss(call(model)[0], "loss")
    model.AddGradientOperators([loss])
    optimizer.build_sgd(model, base_learning_rate=0.1)
    (update,) = of_type(model.net, "WeightedSum")
    assert list(update.output) == ["s/lstm_weight"]


@pytest.mark.parametrize("position", [1, 2])
def test_gradient_of_the_last_states_alone(position):
    model = ModelHelper("model")
    outputs = call(model)
    with pytest.raises(ValueError) as caught:
        model.AddGradientOperators([outputs[position]])
    assert str(caught.value) == (
        "cudnn_LSTM: the engine passes back a dense gradient of 's/lstm_output' and nothing else; gradients arrived at "
        "'{}'. The last hidden state of the last layer is the last step of 's/lstm_output'".format(outputs[position])
    )


# What the nets mean.


def feed(num_layers=1):
    random = np.random.RandomState(3)
    shapes = {"X": (STEPS, BATCH, DIM_IN), "hidden": (num_layers, BATCH, DIM), "cell": (num_layers, BATCH, DIM)}
    for name, shape in shapes.items():
        workspace.FeedBlob(name, random.uniform(-1, 1, size=shape).astype(np.float32))


def layers_of_lstm(num_layers):
    """The same layers as `LSTM`s: the model, the outputs of the upper one, and the parameters of all."""
    model = ModelHelper("layers")
    sequence, width, outputs, params = "X", DIM_IN, [], []
    for layer in range(num_layers):
        states = []
        for state in ("hidden", "cell"):
            starts, ends = [layer, 0, 0], [layer + 1, -1, -1]
            states.append(model.net.Slice(state, "{}_{}".format(state, layer), starts=starts, ends=ends))
        *outputs, of_layer = LSTM(
            model,
            sequence,
            None,
            states,
            width,
            DIM,
            "layer{}".format(layer),
            outputs_with_grads=(0,),
            return_params=True,
        )
        sequence, width = outputs[0], DIM
        params.append(of_layer)
    return model, outputs, params


def move(mapping, params):
    """Move extracted weights into the layers as a script does it."""
    for layer, blobs in enumerate(params):
        values = {
            side: {name: workspace.FetchBlob(layers[layer]) for name, layers in mapping[side].items()}
            for side in mapping
        }
        InitFromLSTMParams(blobs, values)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_extracted_weights_make_an_equal_lstm(num_layers):
    """With a numpy stand-in for cuDNN: sizes, gate names, layers and states all mean the same to both."""
    feed(num_layers)
    model = ModelHelper("model")
    *found, (extractor, mapping) = call(model, num_layers=num_layers, return_params=True)
    slices = numpy_cudnn.run(model.param_init_net)
    size = workspace.FetchBlob("s/lstm_weight").size
    # Every number of the blob is set, and set once.
    assert sorted(number for one in slices for number in range(one.start, one.stop)) == list(range(size))
    numpy_cudnn.run(extractor)
    numpy_cudnn.run(model.net)

    layers, outputs, params = layers_of_lstm(num_layers)
    workspace.RunNetOnce(layers.param_init_net)
    move(mapping, params)
    workspace.RunNetOnce(layers.net)
    comparing.assert_close(workspace.FetchBlob(outputs[0]), workspace.FetchBlob(found[0]), "all", tolerance=1e-6)
    for ours, of_cudnn in ((outputs[1], found[1]), (outputs[3], found[2])):
        comparing.assert_close(workspace.FetchBlob(ours)[0], workspace.FetchBlob(of_cudnn)[-1], ours, tolerance=1e-6)
    assert np.abs(workspace.FetchBlob("hidden") - workspace.FetchBlob("cell")).max() > 0.1


def test_given_values_reach_the_flat_weights():
    feed()
    model = ModelHelper("model")
    values = {name: np.full((DIM, DIM) if name in WEIGHTS else DIM, n, np.float32) for n, name in enumerate(NAMES)}
    for name, value in values.items():
        workspace.FeedBlob("s/mine_" + name, value)
    extractor, mapping = call(model, recurrent_params=gate_blobs(), return_params=True)[3]
    numpy_cudnn.run(model.param_init_net)
    numpy_cudnn.run(extractor)
    for n, name in enumerate(NAMES):
        assert set(workspace.FetchBlob(mapping["recurrent"][name][0]).ravel()) == {n}


@pytest.mark.gpu
@pytest.mark.parametrize("num_layers", [1, 2])
def test_equals_lstm_in_values_and_gradients(num_layers):
    on_gpu = core.DeviceOption(caffe2_pb2.CUDA, 0)
    model = ModelHelper("model")
    with core.DeviceScope(on_gpu):
        feed(num_layers)
        workspace.FeedBlob("given", np.random.RandomState(4).rand(STEPS, BATCH, DIM).astype(np.float32))
        *found, (extractor, mapping) = call(model, num_layers=num_layers, return_params=True)
        gradients = model.AddGradientOperators({found[0]: model.net.AddExternalInput("given")})
    check_can_run(model)
    for net in (model.param_init_net, model.net, extractor):
        workspace.RunNetOnce(net)
    seen = [workspace.FetchBlob(blob) for blob in found]
    seen_gradients = {name: workspace.FetchBlob(str(gradients[name])) for name in ("X", "hidden", "cell")}
    gates = {
        (side, name, layer): workspace.FetchBlob(blob)
        for side, by_name in mapping.items()
        for name, by_layer in by_name.items()
        for layer, blob in by_layer.items()
    }
    # The gradient lies as the weights do, so the same net takes it apart.
    with core.DeviceScope(on_gpu):
        workspace.FeedBlob("s/lstm_weight", workspace.FetchBlob(str(gradients["s/lstm_weight"])))
    workspace.RunNetOnce(extractor)
    gate_gradients = {
        (side, name, layer): workspace.FetchBlob(mapping[side][name][layer]) for side, name, layer in gates
    }

    workspace.ResetWorkspace()
    feed(num_layers)
    workspace.FeedBlob("given", np.random.RandomState(4).rand(STEPS, BATCH, DIM).astype(np.float32))
    layers, outputs, params = layers_of_lstm(num_layers)
    expected_gradients = layers.AddGradientOperators({outputs[0]: layers.net.AddExternalInput("given")})
    workspace.RunNetOnce(layers.param_init_net)
    for layer, blobs in enumerate(params):
        InitFromLSTMParams(blobs, {side: {name: gates[side, name, layer] for name in NAMES} for side in SIDES})
    workspace.RunNetOnce(layers.net)
    comparing.assert_close(seen[0], workspace.FetchBlob(outputs[0]), "all steps", tolerance=1e-5)
    comparing.assert_close(seen[1][-1], workspace.FetchBlob(outputs[1])[0], "last hidden", tolerance=1e-5)
    comparing.assert_close(seen[2][-1], workspace.FetchBlob(outputs[3])[0], "last cell", tolerance=1e-5)
    for name, value in seen_gradients.items():
        comparing.assert_close(value, workspace.FetchBlob(str(expected_gradients[name])), name, tolerance=1e-5)
    for layer, blobs in enumerate(params):
        for side, (role, names) in itertools.product(SIDES, GetLSTMParamNames().items()):
            expected = workspace.FetchBlob(str(expected_gradients[blobs[side][role]]))
            stacked = np.concatenate([gate_gradients[side, name, layer].ravel() for name in names])
            comparing.assert_close(stacked, expected.ravel(), (layer, side, role), tolerance=1e-5)


# Where it cannot run.


class Machine:
    """What `workspace` says on a machine with a number of GPUs."""

    def __init__(self, gpus):
        self.has_gpu_support = gpus > 0
        self.gpus = gpus

    def NumCudaDevices(self):  # noqa: N802
        return self.gpus


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(cudnn_machine, "workspace", Machine(0))


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(cudnn_machine, "workspace", Machine(1))


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(without_gpu):
    model = ModelHelper("model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="can be built here but not run"):
            call(model)
    assert not model.net.Proto().op and not model.param_init_net.Proto().op and not model.params


def test_building_without_a_gpu_warns(without_gpu):
    with pytest.warns(UserWarning) as caught:
        call(ModelHelper("model"))
    (warning,) = caught
    assert str(warning.message) == "cudnn_LSTM: this net can be built here but not run: " + NO_GPU
    # It points at the line that called.
    assert warning.filename == __file__


def test_building_with_a_gpu_does_not(with_gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(ModelHelper("model"))


def test_check_names_every_net_that_cannot_run(without_gpu):
    model = ModelHelper("unrunnable")
    extractor, _ = call(model, return_params=True)[3]
    model.AddGradientOperators(["s/lstm_output"])
    with pytest.raises(RuntimeError) as caught:
        check_can_run(model)
    assert str(caught.value) == listed(
        "check_can_run",
        "net '{}' has 16 operators of cuDNN: {}".format(model.param_init_net.Name(), NO_GPU),
        "net '{}' has 2 operators of cuDNN: {}".format(model.net.Name(), NO_GPU),
    )
    for net in (extractor, extractor.Proto()):
        with pytest.raises(RuntimeError) as caught:
            check_can_run(net)
        assert str(caught.value) == "check_can_run: net '{}' has 16 operators of cuDNN: {}".format(
            extractor.Name(), NO_GPU
        )


def test_check_accepts_what_runs_anywhere(without_gpu):
    model = ModelHelper("model")
    LSTM(model, "X", None, ("hidden", "cell"), DIM_IN, DIM, "s")
    check_can_run(model)
    check_can_run(core.Net("empty"))


def test_check_wants_a_gpu_as_device(with_gpu):
    model = ModelHelper("misplaced")
    extractor, _ = call(model, return_params=True)[3]
    with pytest.raises(RuntimeError) as caught:
        check_can_run(model.net)
    assert str(caught.value) == (
        "check_can_run: net '{}': 1 of 1 operators of cuDNN that compute 's/lstm_output' are not on a GPU; build them "
        "in a DeviceScope of one, or call net.RunAllOnGPU()".format(model.net.Name())
    )
    model.net.RunAllOnGPU()
    check_can_run(model.net)
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA)):
        call(ModelHelper("placed"), scope="placed")
    extractor.Proto().op[3].device_option.device_type = caffe2_pb2.CUDA
    with pytest.raises(RuntimeError, match="15 of 16 operators of cuDNN that compute 's/lstm_input_input_gate_w_0'"):
        check_can_run(extractor)


@pytest.mark.parametrize("value", [None, "net", 3], ids=repr)
def test_check_of_something_else(value):
    with pytest.raises(TypeError) as caught:
        check_can_run(value)
    shown = "{!r} of type {}".format(value, type(value).__name__)
    assert str(caught.value) == "check_can_run takes a model, a core.Net or a NetDef; got " + shown


@pytest.mark.skipif(workspace.has_gpu_support, reason="needs a Caffe2 without a GPU")
def test_the_engine_alone_would_not_say_so():
    """Why there is a check: the engine's own error names neither cuDNN nor a GPU as what is missing."""
    model = ModelHelper("model")
    call(model)
    for blob in model.net.Proto().external_input:
        workspace.FeedBlob(blob, np.zeros(1, np.float32))
    with pytest.raises(RuntimeError, match="Cannot create operator of type 'Recurrent' on the device 'CPU'"):
        workspace.CreateNet(model.net)


# Errors.


def refused(kind, model=None, **changes):
    """The text of the error, which is a `kind`; the model is as it was."""
    model = model or ModelHelper("model")
    before = model_snapshot(model)
    with pytest.raises(kind) as caught:
        call(model, **changes)
    assert type(caught.value) is kind
    assert model_snapshot(model) == before
    assert core.ScopedName("") == ""
    return str(caught.value)


STATES = "initial_states must be (hidden, cell) blobs; got "
PARAMS = "{} must be a blob, its name, or a dict {{layer: blob}}; got {}"
WRONG_TYPES = {
    "input missing": ({"input_blob": None}, "input_blob must be a blob or its name; got None of type NoneType"),
    "states missing": ({"initial_states": None}, STATES + "None of type NoneType"),
    "states a name": ({"initial_states": "hc"}, STATES + "'hc' of type str"),
    "one state missing": ({"initial_states": ("h", None)}, STATES + "('h', None) of type tuple"),
    "dim_in a float": ({"dim_in": 2.0}, "dim_in must be a whole number; got 2.0 of type float"),
    "dim_out missing": ({"dim_out": None}, "dim_out must be a whole number; got None of type NoneType"),
    "layers a flag": ({"num_layers": True}, "num_layers must be a whole number; got True of type bool"),
    "scope missing": ({"scope": None}, "scope must be a string; got None of type NoneType"),
    "flag": ({"return_params": "yes"}, "return_params must be True or False; got 'yes' of type str"),
    "params a list": ({"input_params": [1]}, "input_params must be a dict of blobs or None; got [1] of type list"),
    "a gate": (
        {"recurrent_params": dict(gate_blobs(), cell_w=3)},
        PARAMS.format("recurrent_params['cell_w']", "3 of type int"),
    ),
    "a layer": (
        {"input_params": dict(gate_blobs(), cell_b={0: None})},
        PARAMS.format("input_params['cell_b']", "{0: None} of type dict"),
    ),
}


@pytest.mark.parametrize("changes, text", WRONG_TYPES.values(), ids=list(WRONG_TYPES))
def test_argument_of_the_wrong_type(changes, text):
    assert refused(TypeError, **changes) == "cudnn_LSTM: " + text


@pytest.mark.parametrize("value", [None, core.Net("net")], ids=["nothing", "a net"])
def test_not_a_model(value):
    with pytest.raises(TypeError) as caught:
        call(value)
    assert str(caught.value).startswith("cudnn_LSTM: model must be a ModelHelper or CNNModelHelper; got ")


def without(*names):
    return {name: blob for name, blob in gate_blobs().items() if name not in names}


WRONG_VALUES = {
    "one state": ({"initial_states": ["h"]}, "initial_states must be two blobs (hidden, cell); got 1"),
    "dim_in zero": ({"dim_in": 0}, "dim_in must be 1 or more; got 0"),
    "a state without a name": ({"initial_states": ("h", "")}, "initial_states[1] is an empty name"),
    "no layers": ({"num_layers": 0}, "num_layers must be 1 or more; got 0"),
    "layers below zero": (
        {"num_layers": -1, "input_params": {name: {0: "a"} for name in NAMES}},
        "num_layers must be 1 or more; got -1",
    ),
    "scope empty": ({"scope": ""}, "scope is empty; parameters need a prefix that tells this layer from others"),
    "gates missing": (
        {"input_params": without("cell_w", "input_gate_b")},
        "input_params lacks 'cell_w', 'input_gate_b'",
    ),
    "none given": ({"recurrent_params": {}}, "recurrent_params lacks " + ", ".join(map(repr, NAMES))),
    "gate unknown": (
        {"recurrent_params": dict(gate_blobs(), cell_weight="b")},
        "recurrent_params has 'cell_weight'; GetLSTMParamNames lists what it takes",
    ),
    "layer unknown": (
        {"input_params": dict(gate_blobs(), cell_b={0: "a", 1: "b"})},
        "input_params['cell_b'] has blobs for layers [0, 1]; there are [0]",
    ),
    "layer missing": (
        {"input_params": {name: {0: "a", 1: "b"} if name != "cell_b" else {1: "a"} for name in NAMES}, "num_layers": 2},
        "input_params['cell_b'] has blobs for layers [1]; there are [0, 1]",
    ),
}


@pytest.mark.parametrize("changes, text", WRONG_VALUES.values(), ids=list(WRONG_VALUES))
def test_argument_out_of_range(changes, text):
    assert refused(ValueError, **changes) == "cudnn_LSTM: " + text


def test_one_blob_for_several_layers():
    """Layers differ in the size of their weights, so one blob cannot serve them all."""
    text = refused(ValueError, num_layers=2, input_params=gate_blobs())
    one = "input_params['{}'] must be a dict {{layer: blob}}, as there are 2 layers"
    assert text == listed("cudnn_LSTM", *(one.format(name) for name in NAMES))


def test_all_wrong_types_in_one_error():
    text = refused(
        TypeError,
        input_blob=1,
        initial_states=2,
        dim_in="a",
        dim_out=None,
        scope=5,
        num_layers=1.5,
        return_params=7,
        recurrent_params=8,
        input_params=dict(gate_blobs(), cell_w=9),
    )
    assert text == listed(
        "cudnn_LSTM",
        "input_blob must be a blob or its name; got 1 of type int",
        STATES + "2 of type int",
        "dim_in must be a whole number; got 'a' of type str",
        "dim_out must be a whole number; got None of type NoneType",
        "scope must be a string; got 5 of type int",
        "num_layers must be a whole number; got 1.5 of type float",
        "return_params must be True or False; got 7 of type int",
        "recurrent_params must be a dict of blobs or None; got 8 of type int",
        PARAMS.format("input_params['cell_w']", "9 of type int"),
    )


def test_all_wrong_values_in_one_error():
    text = refused(
        ValueError,
        initial_states=(),
        dim_in=0,
        dim_out=-1,
        scope="",
        recurrent_params=without("cell_w"),
        input_params=dict(without("cell_b"), other="b"),
    )
    assert text == listed(
        "cudnn_LSTM",
        "initial_states must be two blobs (hidden, cell); got 0",
        "dim_in must be 1 or more; got 0",
        "dim_out must be 1 or more; got -1",
        "scope is empty; parameters need a prefix that tells this layer from others",
        "recurrent_params lacks 'cell_w'",
        "input_params lacks 'cell_b'",
        "input_params has 'other'; GetLSTMParamNames lists what it takes",
    )


def test_parameter_of_another_size_that_values_are_given_for():
    model = ModelHelper("model")
    call(model)
    text = refused(ValueError, model, dim_in=5, input_params=gate_blobs())
    assert text == listed(
        "cudnn_LSTM",
        "parameter 's/lstm_weight' has shape [84], but this cell needs [120]",
        "the model has parameter 's/lstm_weight' already; leave out input_params and recurrent_params to share it",
    )


def test_values_for_a_model_that_fills_nothing():
    text = refused(ValueError, ModelHelper("model", init_params=False), input_params=gate_blobs())
    assert text == (
        "cudnn_LSTM: the model fills no parameters (init_params=False): input_params and recurrent_params do nothing"
    )


def test_caffe2_without_the_operator(monkeypatch):
    monkeypatch.setattr(core, "IsOperatorWithEngine", lambda kind, engine: False)
    assert refused(RuntimeError) == (
        "cudnn_LSTM: this Caffe2 was built without cuDNN and does not know its operator Recurrent; " + DOCTOR
    )


def test_failure_halfway_leaves_the_model(monkeypatch):
    def fail(*_):
        raise RuntimeError("half way")

    monkeypatch.setattr("caffe2_recurrent.cudnn._Cudnn.extract", fail)
    assert refused(RuntimeError, return_params=True) == "half way"
    model = ModelHelper("model")
    refused(RuntimeError, model, return_params=True)
    assert [str(blob) for blob in call(model)][0] == "s/lstm_output"
    assert len(of_type(model.param_init_net, "RecurrentParamSet")) == 16


def test_numbers_of_numpy():
    plain, of_numpy = ModelHelper("plain"), ModelHelper("numpy")
    call(plain, dim_out=100, num_layers=2)
    call(
        of_numpy, dim_in=np.int32(DIM_IN), dim_out=np.uint8(100), num_layers=np.int64(2), return_params=np.bool_(False)
    )
    assert list(of_numpy.net.Proto().op) == list(plain.net.Proto().op)
    assert list(of_numpy.param_init_net.Proto().op) == list(plain.param_init_net.Proto().op)


def test_check_gradients_accepts_a_gradient_of_the_output_alone():
    model, outputs = build_and_ignore_the_warning()
    check_gradients(model.net, model.net.AddGradientOperators([outputs[0]]))


def build_and_ignore_the_warning():
    model = ModelHelper("model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        outputs = cudnn_LSTM(model, core.BlobReference("X"), ("H", "C"), 2, 3, "s")
    return model, outputs
