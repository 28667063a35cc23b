"""`retrieve_step_blobs`, on the engine."""

import functools
import warnings

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, recurrent, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
from caffe2_recurrent import GRU, LSTM, MILSTM, LSTMWithAttention, recurrent_net, retrieve_step_blobs
from errors_support import listed
from numpy_lstm import Case


def doubling(name="step", state="h_t", sequence="x_t", seen="z"):
    """A step net with h_t = tanh(2 x_t + h_prev), whose blob `seen` is 2 x_t."""
    step = core.Net(name)
    x_t, h_prev = step.AddExternalInputs(sequence, state + "_prev")
    h_t = step.Tanh(step.Add([step.Scale(x_t, seen, scale=2.0), h_prev], seen + "_sum"), state)
    step.AddExternalOutputs(h_t)
    return step


def add_loop(net, step, sequence, scope=None, state="h_t", builder=recurrent_net):
    return builder(
        net,
        step,
        [(step.Proto().external_input[0], core.BlobReference(sequence))],
        [(state + "_prev", core.BlobReference("H"))],
        {state + "_prev": state},
        scope=scope,
    )


def run(net, executor=True, steps=3):
    random = np.random.RandomState(0)
    workspace.FeedBlob("H", np.zeros((2, 2), np.float32))
    for name in ("X", "Y"):
        workspace.FeedBlob(name, random.uniform(-1, 1, size=(steps, 2, 2)).astype(np.float32))
    comparing.configure(net, executor)
    workspace.RunNetOnce(net)


def values(name, steps=3):
    return np.concatenate([workspace.FetchBlob(name + str(step)) for step in range(steps)])


EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])


@EXECUTOR
def test_blobs_of_each_step(executor):
    net = core.Net("net")
    h_all, _ = add_loop(net, doubling(), "X")
    run(net, executor)
    names = [name.decode() for name in retrieve_step_blobs(net)]
    own = ["h_t", "h_t_prev", "x_t", "z", "z_sum"]
    numbers = ["timestep_rnnexec_t{0}{0}", "timestep{0}"]
    expected = {"rnn_{}{}".format(blob, step) for blob in own for step in range(3)}
    expected.update("rnn_" + numbers[not executor].format(step) for step in range(3))
    assert len(names) == len(expected) and set(names) == expected
    assert sorted(workspace.FetchBlob("rnn_1").tolist()) == sorted(name.encode() for name in names)
    np.testing.assert_array_equal(values("rnn_z"), 2 * workspace.FetchBlob("X"))
    np.testing.assert_array_equal(values("rnn_h_t"), workspace.FetchBlob(h_all))


@EXECUTOR
def test_names_and_values_of_one_loop_are_those_of_caffe2(executor):
    net = core.Net("net")
    add_loop(net, doubling(), "X")
    run(net, executor)
    expected = sorted(recurrent.retrieve_step_blobs(net, "seen"))
    fetched = {name: workspace.FetchBlob(name.decode()) for name in expected}
    for name in expected:
        workspace.FeedBlob(name.decode(), np.zeros(1, np.float32))
    assert sorted(retrieve_step_blobs(net, "seen")) == expected
    for name in expected:
        np.testing.assert_array_equal(workspace.FetchBlob(name.decode()), fetched[name])


@EXECUTOR
def test_loops_with_equal_names_keep_apart(executor):
    """Under Caffe2's function the second loop's blobs replace the first one's."""
    net = core.Net("net")
    for sequence in ("X", "Y", "X"):
        add_loop(net, doubling(), sequence)
    run(net, executor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = retrieve_step_blobs(net)
    assert len(set(names)) == len(names)
    x, y = (workspace.FetchBlob(name) for name in ("X", "Y"))
    for prefix, value in (("rnn", x), ("rnn_2", y), ("rnn_3", x)):
        np.testing.assert_array_equal(values(prefix + "_z"), 2 * value)
    recurrent.retrieve_step_blobs(net, "theirs")
    np.testing.assert_array_equal(values("theirs_z"), 2 * x)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(values("theirs_z"), 2 * y)


@EXECUTOR
def test_loops_with_names_of_their_own_keep_the_prefix(executor):
    """The steps' numbers, `timestep` in both, do not count."""
    net = core.Net("net")
    add_loop(net, doubling(), "X")
    add_loop(net, doubling(state="g_t", sequence="y_t", seen="w"), "Y", state="g_t")
    # a third one like the second
    add_loop(net, doubling(state="g_t", sequence="y_t", seen="w"), "X", state="g_t")
    run(net, executor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        retrieve_step_blobs(net)
    x, y = (workspace.FetchBlob(name) for name in ("X", "Y"))
    for name, value in (("rnn_z", x), ("rnn_w", y), ("rnn_3_w", x)):
        np.testing.assert_array_equal(values(name), 2 * value)
    assert not workspace.HasBlob("rnn_2_w0")


@pytest.mark.parametrize("shared", [{"sequence": "x_t"}, {"seen": "z"}], ids=["linked", "computed"])
def test_one_blob_in_common_moves_all_of_a_loop(shared):
    net = core.Net("net")
    add_loop(net, doubling(), "X")
    step = {"state": "g_t", "sequence": "y_t", "seen": "w"}
    add_loop(net, doubling(**dict(step, **shared)), "Y", state="g_t")
    run(net)
    retrieve_step_blobs(net)
    x, y = (workspace.FetchBlob(name) for name in ("X", "Y"))
    np.testing.assert_array_equal(values("rnn_x_t"), x)
    np.testing.assert_array_equal(values("rnn_z"), 2 * x)
    np.testing.assert_array_equal(values("rnn_2_" + dict(step, **shared)["seen"]), 2 * y)
    assert workspace.HasBlob("rnn_2_g_t0") and not workspace.HasBlob("rnn_g_t0")


def test_layers_of_the_package_have_names_of_their_own():
    case = Case()
    model, outputs = case.build(scope="first")
    case.build(lambda model, *rest, **options: LSTM(model, "X", *rest[1:], **options), model=model, scope="second")
    workspace.RunNetOnce(model.param_init_net)
    case.feed("first")
    case.feed("second")
    workspace.RunNetOnce(model.net)
    retrieve_step_blobs(model.net)
    np.testing.assert_array_equal(values("rnn_first/hidden_t"), workspace.FetchBlob(outputs[0]))
    np.testing.assert_array_equal(values("rnn_second/hidden_t"), workspace.FetchBlob(outputs[0]))


def test_after_the_gradient():
    case = Case()
    _, _, model = case.run()
    with_gradient = sorted(retrieve_step_blobs(model.net))
    workspace.ResetWorkspace()
    model, _ = case.build()
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    workspace.RunNetOnce(model.net)
    assert sorted(retrieve_step_blobs(model.net)) == with_gradient


def test_names_that_run_into_each_other_are_told():
    """`z1` at step 0 and `z` at step 10 are both `rnn_z10`: Caffe2's names leave one of them only."""
    net = core.Net("net")
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_t_prev")
    step.AddExternalOutputs(step.Add([step.Scale(step.Scale(x_t, "z"), "z1"), h_prev], "h_t"))
    add_loop(net, step, "X")
    run(net, steps=12)
    with pytest.warns(UserWarning) as caught:
        names = retrieve_step_blobs(net)
    (warning,) = caught
    assert str(warning.message) == (
        "retrieve_step_blobs: different blobs of the steps are called 'rnn_z10', 'rnn_z11' here; only the last of each "
        "is kept: rename those in the step net that end in a digit"
    )
    assert warning.filename == __file__
    assert names.count(b"rnn_z10") == 2


@pytest.mark.parametrize("text", [True, False], ids=["text", "message"])
def test_nets_of_caffe2s_builder(text):
    """Before 2018 it put the step nets into the operator as text; the engine still reads that."""
    net = core.Net("net")
    for sequence in ("X", "Y"):
        step = doubling(state="h_t" if sequence == "X" else "g_t", sequence="x_t")
        add_loop(
            net,
            step,
            sequence,
            scope=sequence,
            state=str(step.Proto().external_output[0]),
            builder=recurrent.recurrent_net,
        )
    if text:
        for operator in net.Proto().op:
            for argument in operator.arg:
                if argument.name in ("step_net", "backward_step_net"):
                    argument.s = str(argument.n).encode()
                    argument.ClearField("n")
    run(net)
    retrieve_step_blobs(net)
    np.testing.assert_array_equal(values("rnn_z"), 2 * workspace.FetchBlob("X"))
    np.testing.assert_array_equal(values("rnn_2_z"), 2 * workspace.FetchBlob("Y"))


def test_a_net_without_loops():
    assert retrieve_step_blobs(core.Net("empty")) == []


NOT_RUN = "retrieve_step_blobs: net '{}' has not run in this workspace; there is nothing in {}"


@pytest.mark.parametrize("created", [True, False], ids=["created", "not created"])
def test_before_the_net_has_run(created):
    net = core.Net("net")
    add_loop(net, doubling(), "X", scope="a")
    run(net)
    add_loop(net, doubling(state="g_t"), "Y", scope="b", state="g_t")
    if created:
        workspace.CreateNet(net)
    before = workspace.Blobs()
    with pytest.raises(ValueError) as caught:
        retrieve_step_blobs(net)
    assert str(caught.value) == NOT_RUN.format(net.Name(), "'b/step_workspaces'")
    assert workspace.Blobs() == before
    workspace.ResetWorkspace()
    with pytest.raises(ValueError) as caught:
        retrieve_step_blobs(net)
    assert str(caught.value) == NOT_RUN.format(net.Name(), "'a/step_workspaces', 'b/step_workspaces'")


def test_whatever_device_the_next_net_is_for():
    net = core.Net("net")
    add_loop(net, doubling(), "X")
    run(net)
    expected = retrieve_step_blobs(net)
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 0)):
        assert retrieve_step_blobs(net) == expected


@pytest.mark.parametrize("form", ["model", "proto"])
def test_the_model_or_the_proto_of_a_net(form):
    model = ModelHelper("model")
    add_loop(model.net, doubling(), "X")
    run(model.net, True)
    expected = retrieve_step_blobs(model.net)
    assert expected and retrieve_step_blobs(model if form == "model" else model.net.Proto()) == expected


def test_wrong_types():
    with pytest.raises(TypeError) as caught:
        retrieve_step_blobs(core.Net("net"), b"rnn")
    assert str(caught.value) == "retrieve_step_blobs: prefix must be a string; got b'rnn' of type bytes"
    with pytest.raises(TypeError) as caught:
        retrieve_step_blobs(None, 3)
    assert str(caught.value) == listed(
        "retrieve_step_blobs",
        "net must be a ModelHelper, a core.Net or a NetDef; got None of type NoneType",
        "prefix must be a string; got 3 of type int",
    )


@pytest.mark.parametrize("executor, workspaces", [(True, 4), (False, 2)])
def test_workspaces_that_no_step_has_had(executor, workspaces):
    """The engine copies those all the same, and crashes."""
    net = core.Net("net")
    add_loop(net, doubling(), "X", scope="a", builder=functools.partial(recurrent_net, forward_only=True))
    run(net, executor, steps=workspaces - 1)
    with pytest.raises(ValueError) as caught:
        retrieve_step_blobs(net)
    assert str(caught.value) == (
        "retrieve_step_blobs: loop 'h_t_all' is forward only, and ran fewer steps ({}) than it has workspaces ({}): "
        "the engine cannot copy what they keep; run it over a longer sequence, or build it without "
        "forward_only".format(workspaces - 1, workspaces)
    )
    workspace.ResetWorkspace()
    run(net, executor, steps=workspaces)
    assert len([name for name in retrieve_step_blobs(net) if name.startswith(b"rnn_z_sum")]) == workspaces


SHAPES = {"x": (5, 2, 3), "h0": (2, 4), "c0": (2, 4), "context0": (2, 6), "encoder": (7, 2, 6)}


def attention(model, memory_optimization):
    return LSTMWithAttention(
        model,
        "x",
        None,
        "h0",
        "c0",
        "context0",
        6,
        "encoder",
        3,
        4,
        "layer",
        outputs_with_grads="auto",
        lstm_memory_optimization=memory_optimization,
        attention_memory_optimization=memory_optimization,
    )


def cell(builder, *states):
    def build(model, memory_optimization):
        return builder(model, "x", None, states, 3, 4, "layer", memory_optimization=memory_optimization)

    return build


LAYERS = {
    "LSTM": cell(LSTM, "h0", "c0"),
    "MILSTM": cell(MILSTM, "h0", "c0"),
    "GRU": cell(GRU, "h0"),
    "LSTMWithAttention": attention,
}


def gradients_of_layer(build, memory_optimization):
    """Of all parameters, by a net of its own in this workspace."""
    model = ModelHelper("model")
    outputs = build(model, memory_optimization)
    found = model.AddGradientOperators([model.net.AveragedLoss(model.net.Sqr(outputs[0]), "loss")])
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(0)
    parameters = {str(blob): workspace.FetchBlob(str(blob)).shape for blob in model.params}
    for blob, shape in {**SHAPES, **parameters}.items():
        workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
    workspace.RunNetOnce(model.net)
    return {blob: workspace.FetchBlob(str(found[blob])) for blob in parameters if blob in found}


@pytest.mark.parametrize("first", [True, False], ids=["recomputes first", "keeps first"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_built_anew_with_the_other_memory_optimization(name, first):
    """What all steps of the first net share outlives it, and must not be what each step of the second one keeps."""
    expected = gradients_of_layer(LAYERS[name], not first)
    workspace.ResetWorkspace()
    gradients_of_layer(LAYERS[name], first)
    found = gradients_of_layer(LAYERS[name], not first)
    assert found.keys() == expected.keys() and found
    for blob, gradient in expected.items():
        np.testing.assert_allclose(found[blob], gradient, rtol=1e-5, atol=1e-6, err_msg=blob)
