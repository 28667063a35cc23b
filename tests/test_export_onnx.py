"""`export_onnx`: onnxruntime computes from the file what Caffe2 does from the net, past the ends of sequences too."""

import itertools
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from caffe2.proto import caffe2_pb2
from caffe2.python import core, optimizer, rnn_cell, workspace
from caffe2.python.model_helper import ExtractPredictorNet, ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
from caffe2_recurrent import GRU, LSTM, export_onnx, files, lstm_from_torch, optimize
from caffe2_recurrent.exchange import onnx_graph, onnx_lstm
from errors_support import listed
from every_pair import every_pair
from exchanged_lstms import DIRECTIONS, FORGET_BIAS, LAYERS, Stack, refused

TOLERANCE = 2e-6
# (hidden_all, hidden_last, cell_last) among what LSTM returns.
POSITIONS = (0, 1, 3)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "lstm.onnx")


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_onnx(path):
    """The outputs by name, from the blobs of the workspace that the inputs are named after."""
    loaded = session(path)
    outputs = [output.name for output in loaded.get_outputs()]
    fed = {given.name: workspace.FetchBlob(given.name) for given in loaded.get_inputs()}
    return dict(zip(outputs, loaded.run(outputs, fed)))


def assert_same(path, model, outputs):
    """Every output, and no others."""
    workspace.RunNetOnce(model.net)
    found = run_onnx(path)
    assert list(found) == [str(outputs[position]) for position in POSITIONS]
    for name, value in found.items():
        expected = workspace.FetchBlob(name)
        assert value.shape == expected.shape and value.dtype == expected.dtype
        comparing.assert_close(value, expected, name, TOLERANCE)


# The same numbers come out.


@LAYERS
@DIRECTIONS
@FORGET_BIAS
def test_sequences_of_full_length(layers, bidirectional, forget_bias, path):
    model, outputs = Stack(layers, bidirectional, forget_bias).built()
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)


@every_pair
@LAYERS
@DIRECTIONS
@pytest.mark.parametrize("drop_states", [False, True], ids=["states kept", "states dropped"])
@pytest.mark.parametrize("lengths", [[4, 2, 1], [3, 3, 2], [2, 0, 4], [0, 0, 0], [4, 4, 4]], ids=str)
def test_lengths(layers, bidirectional, drop_states, lengths, path):
    options = {"drop_states": drop_states}
    model, outputs = Stack(layers, bidirectional, lengths=lengths, options=options).built()
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)


@DIRECTIONS
@pytest.mark.parametrize("lengths", [None, [4, 0, 1]], ids=["full", "lengths"])
@pytest.mark.parametrize("state_axes", [1, 2, 3])
def test_initial_states_of_all_shapes(bidirectional, lengths, state_axes, path):
    stack = Stack(2, bidirectional, lengths=lengths, state_axes=state_axes)
    model, outputs = stack.built()
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)
    shape = [["N", 3], [1, "N", 3]][state_axes - 2] if state_axes > 1 else [3]
    shapes = {given.name: given.shape for given in session(path).get_inputs()}
    assert shapes == {
        "x": ["T", "N", 2],
        **({} if lengths is None else {"lengths": ["N"]}),
        **{blob: shape for states in stack.states for blob in states},
    }


@LAYERS
@DIRECTIONS
def test_initial_states_that_are_parameters_are_stored(layers, bidirectional, path):
    stack = Stack(layers, bidirectional, lengths=[4, 0, 1], own_states=True)
    model, outputs = stack.built()
    export_onnx(path, model, "lstm")
    assert [given.name for given in session(path).get_inputs()] == ["x", "lengths"]
    assert_same(path, model, outputs)


@given(st.data())
@settings(max_examples=25)
def test_sizes_and_lengths(tmp_path_factory, data):
    workspace.ResetWorkspace()
    steps, batch = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    stack = Stack(
        data.draw(st.integers(1, 3)),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([0.0, 1.0, -0.7])),
        lengths,
        steps,
        batch,
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
        data.draw(st.booleans()),
        data.draw(st.integers(1, 3)),
        seed=data.draw(st.integers(0, 1000)),
        options={"drop_states": data.draw(st.booleans())},
    )
    model, outputs = stack.built()
    path = str(tmp_path_factory.mktemp("sizes") / "lstm.onnx")
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)


@DIRECTIONS
@pytest.mark.parametrize("drop_states", [False, True])
def test_other_steps_and_batches_than_when_it_was_exported(bidirectional, drop_states, path):
    stack = Stack(2, bidirectional, lengths=[4, 2, 1], options={"drop_states": drop_states})
    model, outputs = stack.built()
    export_onnx(path, model, "lstm")
    random = np.random.RandomState(3)
    for steps, lengths in ((1, [1]), (7, [3, 7, 0, 1, 2]), (2, [0, 0])):
        workspace.FeedBlob("x", random.randn(steps, len(lengths), 2).astype(np.float32))
        workspace.FeedBlob("lengths", np.array(lengths, dtype=np.int32))
        for blob in itertools.chain(*stack.states):
            workspace.FeedBlob(blob, random.randn(len(lengths), 3).astype(np.float32))
        assert_same(path, model, outputs)


@DIRECTIONS
def test_what_stands_past_the_ends_does_not_matter(bidirectional, path):
    stack = Stack(2, bidirectional, lengths=[3, 2, 0])
    model, outputs = stack.built()
    export_onnx(path, model, "lstm")
    before = run_onnx(path)
    x = stack.values()["x"]
    x[np.arange(4)[:, None] >= np.array([3, 2, 0])] = np.nan
    workspace.FeedBlob("x", x)
    for name, value in run_onnx(path).items():
        np.testing.assert_array_equal(value, before[name])
    assert_same(path, model, outputs)


def test_layers_of_several_sizes(path):
    model = ModelHelper("model")
    outputs = LSTM(model, "x", "lengths", None, 2, [4, 3, 5], "lstm", bidirectional=True)
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("x", np.random.RandomState(0).randn(4, 3, 2).astype(np.float32))
    workspace.FeedBlob("lengths", np.array([4, 1, 3], dtype=np.int32))
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)


ORDERS = ["".join(order) for order in itertools.permutations("iofg") if order != tuple("iofg")]


@pytest.mark.parametrize("order", ORDERS)
def test_the_comparison_notices_another_order_of_gates(order, path, monkeypatch):
    model, outputs = Stack().built()
    monkeypatch.setattr(onnx_lstm, "ONNX", order)
    export_onnx(path, model, "lstm")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(path, model, outputs)


@pytest.mark.parametrize("planted", ["_kept", "_dropped"])
def test_the_comparison_notices_the_ends_that_onnx_has(planted, path, monkeypatch):
    """Without what is put in past the ends, the values differ."""
    model, outputs = Stack(lengths=[4, 2, 0], options={"drop_states": planted == "_dropped"}).built()
    monkeypatch.setattr(onnx_lstm, planted, lambda graph, ends, *_: ends)
    export_onnx(path, model, "lstm")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(path, model, outputs)


# What is in the file.


@every_pair
@LAYERS
@DIRECTIONS
@pytest.mark.parametrize("lengths", [None, [4, 2, 1]], ids=["full", "lengths"])
@pytest.mark.parametrize("drop_states", [False, True])
def test_the_model(layers, bidirectional, lengths, drop_states, path):
    stack = Stack(layers, bidirectional, lengths=lengths, options={"drop_states": drop_states})
    model, outputs = stack.built()
    export_onnx(path, model, "lstm")
    loaded = onnx.load(path)
    onnx.checker.check_model(loaded, full_check=True)
    assert (loaded.ir_version, loaded.producer_name) == (7, "caffe2_recurrent")
    assert [(opset.domain, opset.version) for opset in loaded.opset_import] == [("", 14)]
    graph = loaded.graph
    nodes = [node for node in graph.node if node.op_type == "LSTM"]
    assert len(nodes) == layers
    for index, node in enumerate(nodes):
        found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert found == {"hidden_size": 3, "direction": b"bidirectional" if bidirectional else b"forward"}
        shapes = {constant.name: list(constant.dims) for constant in graph.initializer}
        width = stack.directions * 3 if index else 2
        assert [shapes[name] for name in node.input[1:4]] == [
            [stack.directions, 12, width],
            [stack.directions, 12, 3],
            [stack.directions, 24],
        ]
        assert node.input[4] == ("" if lengths is None else "lengths")
    # Nothing in it is of no use.
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    last = set(nodes[-1].output)
    assert {constant.name for constant in graph.initializer} <= read
    for node in graph.node:
        assert node.op_type == "LSTM" or set(node.output) <= read
    assert last <= read
    kinds = {given.name: given.type.tensor_type.elem_type for given in graph.input}
    assert kinds.pop("lengths", None) == (None if lengths is None else onnx.TensorProto.INT32)
    assert set(kinds.values()) == {onnx.TensorProto.FLOAT}
    width = 3 * stack.directions
    assert [(output.name, output.shape) for output in session(path).get_outputs()] == [
        (str(outputs[0]), ["T", "N", width]),
        (str(outputs[1]), [1, "N", width]),
        (str(outputs[3]), [1, "N", width]),
    ]


def test_weights_of_the_file(path):
    stack = Stack(bidirectional=True, forget_bias=0.5)
    model, _ = stack.built()
    export_onnx(path, model, "lstm")
    graph = onnx.load(path).graph
    (node,) = [node for node in graph.node if node.op_type == "LSTM"]
    constants = {constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer}
    w, r, b = (constants[name] for name in node.input[1:4])
    for direction, blobs in enumerate(stack.parameters):
        values = [workspace.FetchBlob(blob) for blob in blobs]
        values[2][3:6] += np.float32(0.5)
        # input, forget, output, cell to input, output, forget, cell
        turned = [np.concatenate([value[:3], value[6:9], value[3:6], value[9:]]) for value in values]
        np.testing.assert_array_equal(w[direction], turned[0])
        np.testing.assert_array_equal(r[direction], turned[1])
        np.testing.assert_array_equal(b[direction], np.concatenate(turned[2:]))


def test_two_exports_make_the_same_file(path):
    model, _ = Stack(2, True, lengths=[4, 2, 1]).built()
    export_onnx(path, model, "lstm")
    with open(path, "rb") as stream:
        first = stream.read()
    export_onnx(path, model, "lstm")
    with open(path, "rb") as stream:
        assert stream.read() == first


def test_names_that_the_nodes_would_have_too(path):
    model = ModelHelper("model")
    states = ("lstm/onnx/shape", "lstm/onnx/W")
    outputs = LSTM(model, "lstm/onnx/Y", "lstm/onnx/inside", states, 2, 3, "lstm")
    workspace.RunNetOnce(model.param_init_net)
    random = np.random.RandomState(0)
    for blob, shape in {"lstm/onnx/Y": (4, 3, 2), states[0]: (3,), states[1]: (3, 3)}.items():
        workspace.FeedBlob(blob, random.randn(*shape).astype(np.float32))
    workspace.FeedBlob("lstm/onnx/inside", np.array([4, 1, 0], dtype=np.int32))
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)


def test_a_state_of_several_loops_is_one_input(path):
    model = ModelHelper("model")
    outputs = LSTM(model, "x", None, ["zero"] * 8, 2, [3, 3], "lstm", bidirectional=True)
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("x", np.random.RandomState(0).randn(4, 3, 2).astype(np.float32))
    workspace.FeedBlob("zero", np.full(3, 0.1, np.float32))
    export_onnx(path, model, "lstm")
    assert [given.name for given in session(path).get_inputs()] == ["x", "zero"]
    assert_same(path, model, outputs)


# Which nets can be exported.


def test_nets_of_all_kinds(path):
    """Which states are parameters only a model knows; of other nets those count that have the names of LSTM's own."""
    model, outputs = Stack(2, True, own_states=True, lengths=[4, 2, 1]).built()
    model.AddGradientOperators([outputs[0]])
    read = caffe2_pb2.NetDef()
    read.ParseFromString(model.net.Proto().SerializeToString())
    for net in (model, model.net, read):
        export_onnx(path, net, "lstm")
        assert [given.name for given in session(path).get_inputs()] == ["x", "lengths"]
        assert_same(path, model, outputs)


def test_after_training(path):
    stack = Stack(2, True, own_states=True, lengths=[4, 2, 1])
    model, outputs = stack.built()
    model.AddGradientOperators([model.net.AveragedLoss(outputs[0], "loss")])
    optimizer.build_adam(model, base_learning_rate=0.1)
    workspace.RunNetOnce(model.param_init_net)
    stack.feed()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 3)
    export_onnx(path, model, "lstm")
    serving, outputs = stack.build(ModelHelper("serving", init_params=False))
    assert_same(path, serving, outputs)


def test_parameters_of_a_model_with_names_of_their_own(path):
    model = ModelHelper("model")
    for blob in ("h0", "c0"):
        model.AddParameter(model.param_init_net.GaussianFill([], blob, shape=[3]))
    outputs = LSTM(model, "x", None, ("h0", "c0"), 2, 3, "lstm")
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("x", np.random.RandomState(0).randn(4, 3, 2).astype(np.float32))
    export_onnx(path, model, "lstm")
    assert [given.name for given in session(path).get_inputs()] == ["x"]
    assert_same(path, model, outputs)
    export_onnx(path, model.net, "lstm")
    assert [given.name for given in session(path).get_inputs()] == ["x", "h0", "c0"]
    assert_same(path, model, outputs)


OPTIONS = {
    "forward only": {"forward_only": True},
    "memory optimised": {"memory_optimization": True},
    "with dropout, testing": {"dropout_ratio": 0.5, "is_test": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@DIRECTIONS
def test_options(options, bidirectional, path):
    model, outputs = Stack(2, bidirectional, lengths=[4, 2, 1], options=options).built()
    export_onnx(path, model, "lstm")
    assert_same(path, model, outputs)


def test_dropout_is_left_out(path):
    training, _ = Stack(2, options={"dropout_ratio": 0.5}).built()
    export_onnx(path, training, "lstm")
    testing, outputs = Stack(2, options={"dropout_ratio": 0.5, "is_test": True}).build()
    assert_same(path, testing, outputs)


def test_under_a_name_scope(path):
    model = ModelHelper("model")
    with core.NameScope("outer"):
        outputs = LSTM(model, "x", None, None, 2, 3, "lstm")
        Stack(own_states=True, scope="outer/lstm").feed()
        workspace.FeedBlob("outer/x", workspace.FetchBlob("x"))
        export_onnx(path, model, "lstm")
    assert str(outputs[0]) == "outer/lstm/hidden_t_all"
    assert_same(path, model, outputs)


def test_one_of_several_in_a_net(path):
    model = ModelHelper("model")
    lower = LSTM(model, "x", "lengths", None, 2, 3, "lower")
    upper = LSTM(model, lower[0], "lengths", None, 3, 4, "upper")
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("x", np.random.RandomState(0).randn(4, 3, 2).astype(np.float32))
    workspace.FeedBlob("lengths", np.array([4, 2, 1], dtype=np.int32))
    for scope, outputs in (("upper", upper), ("lower", lower)):
        export_onnx(path, model, scope)
        assert_same(path, model, outputs)


def test_a_single_layer_of_several(path):
    model, outputs = Stack(2, True, lengths=[4, 2, 1]).built()
    export_onnx(path, model, "lstm/layer_1")
    assert_same(path, model, outputs)


def test_the_lstm_of_caffe2s_rnn_cell(path):
    model = ModelHelper("model")
    outputs = rnn_cell.LSTM(model, "x", "lengths", ("s0", "s1"), 2, 3, "stock", forget_bias=0.5)
    Stack(lengths=[4, 2, 1], scope="stock").feed()
    export_onnx(path, model, "stock")
    assert_same(path, model, outputs)


@pytest.mark.parametrize("kept", [[0], [0, 1]], ids=["all steps", "and the last"])
@DIRECTIONS
def test_a_predictor(kept, bidirectional, path):
    """With two directions, a predictor may join only what it gives out; with one, the loop makes all of it."""
    stack = Stack(2, bidirectional, lengths=[4, 2, 1])
    model, outputs = stack.built()
    wanted = [str(outputs[position]) for position in kept]
    inputs = ["x", "lengths", *(blob for states in stack.states for blob in states)]
    predictor, _ = ExtractPredictorNet(model.net.Proto(), inputs, wanted)
    workspace.RunNetOnce(predictor)
    export_onnx(path, predictor, "lstm")
    found = run_onnx(path)
    assert list(found) == (wanted if bidirectional else [str(outputs[position]) for position in POSITIONS])
    for name in found:
        comparing.assert_close(found[name], workspace.FetchBlob(name), name, TOLERANCE)


def joining_alone(stack, position):
    """A net that joins the directions of one output and of no other; and that output."""
    model, outputs = stack.built()
    net = caffe2_pb2.NetDef()
    net.CopyFrom(model.net.Proto())
    wanted = str(outputs[position])
    kept = [operator for operator in net.op if operator.type != "Concat" or operator.output[0] == wanted]
    del net.op[:]
    net.op.extend(kept)
    return net, wanted


def test_a_net_that_joins_the_last_cells_alone(path):
    net, cell_last = joining_alone(Stack(1, True), 3)
    workspace.RunNetOnce(net)
    export_onnx(path, net, "lstm")
    (found,) = run_onnx(path).items()
    assert found[0] == cell_last
    comparing.assert_close(found[1], workspace.FetchBlob(cell_last), "cell_last", TOLERANCE)


def test_from_torch_to_onnx(path):
    model, _ = Stack(2, True).built()
    module = torch.nn.LSTM(2, 3, 2, bidirectional=True)
    lstm_from_torch(model, "lstm", module)
    export_onnx(path, model, "lstm")
    values = Stack(2, True).values()
    states = tuple(torch.tensor(np.stack([values[blobs[side]] for blobs in Stack(2, True).states])) for side in (0, 1))
    expected, _ = module(torch.tensor(values["x"]), states)
    found = run_onnx(path)
    hidden_all = found["lstm/layer_1/joined_hidden_t_all"]
    comparing.assert_close(hidden_all, expected.detach().numpy(), "hidden_all", TOLERANCE)


# The file.


def test_a_path_object(tmp_path):
    model, outputs = Stack().built()
    export_onnx(tmp_path / "lstm.onnx", model, "lstm")
    assert_same(str(tmp_path / "lstm.onnx"), model, outputs)
    assert os.listdir(str(tmp_path)) == ["lstm.onnx"]


def write_old(path):
    with open(path, "wb") as stream:
        stream.write(b"old")


def assert_old(path):
    with open(path, "rb") as stream:
        assert stream.read() == b"old"
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_an_interrupted_write_leaves_the_old_file(path, monkeypatch):
    def fail(_):
        raise KeyboardInterrupt

    model, _ = Stack().built()
    write_old(path)
    monkeypatch.setattr(files, "_flush_to_disk", fail)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(path, model, "lstm")
    assert_old(path)


def test_a_model_that_onnx_refuses_is_not_written(path, monkeypatch):
    """`onnx.checker` sees every model before it is written."""
    model, _ = Stack(2).built()
    write_old(path)
    monkeypatch.setattr(onnx_graph, "OPSET", 6)
    with pytest.raises(onnx.checker.ValidationError):
        export_onnx(path, model, "lstm")
    assert_old(path)


def test_a_folder_that_is_not_there(tmp_path):
    model, _ = Stack().built()
    with pytest.raises(FileNotFoundError):
        export_onnx(str(tmp_path / "nowhere" / "lstm.onnx"), model, "lstm")
    assert os.listdir(str(tmp_path)) == []


def test_a_path_that_is_a_folder(tmp_path):
    model, _ = Stack().built()
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        export_onnx(folder, model, "lstm")
    assert os.listdir(str(tmp_path)) == ["folder"] and os.listdir(str(folder)) == []


# Errors.


def export_refused(path, kind, net, scope="lstm"):
    """The text of the error; a file that was there is as it was."""
    write_old(path)
    text = refused(kind, export_onnx, path, net, scope)
    assert_old(path)
    return text


def test_without_onnx(path, monkeypatch):
    model, _ = Stack().built()
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert export_refused(path, ImportError, model) == (
        "export_onnx needs the package onnx: pip install 'caffe2_recurrent[onnx]'"
    )


def test_the_package_does_not_import_onnx():
    code = "import sys, caffe2_recurrent; print([name for name in ('onnx', 'onnxruntime') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    assert result.stdout.strip() == "[]"


def test_arguments_of_the_wrong_type():
    assert refused(TypeError, export_onnx, 3, "net", None) == listed(
        "export_onnx",
        "net must be a ModelHelper, a core.Net or a NetDef; got 'net' of type str",
        "scope must be a string; got None of type NoneType",
        "path must be a string or a pathlib.Path; got 3 of type int",
    )


def test_no_such_lstm(path):
    model, _ = Stack().built()
    assert export_refused(path, ValueError, model, "other") == (
        "export_onnx: net '{}' has no LSTM under 'other'; it has loops under 'lstm'".format(model.net.Name())
    )


def test_several_lstms_under_a_scope(path):
    model, _ = Stack(2, True).built()
    Stack(2, True).build(model)
    assert export_refused(path, ValueError, model) == (
        "export_onnx: 'lstm' has 2 LSTMs; build the one that is wanted in a model of its own, with the same scope and "
        "init_params=False"
    )
    alone, outputs = Stack(2, True).build(ModelHelper("alone", init_params=False))
    export_onnx(path, alone, "lstm")
    assert_same(path, alone, outputs)


def test_other_cells(path):
    model = ModelHelper("model")
    GRU(model, "x", None, ("h",), 2, 3, "gru")
    assert "'GRUUnit'" in export_refused(path, ValueError, model, "gru")


def test_after_optimize(path):
    stack = Stack(steps=20, batch=16, dim_in=8, dim=128, options={"forward_only": True})
    model, _ = stack.built()
    optimize(model, shapes={"x": (20, 16, 8)})
    text = export_refused(path, ValueError, model)
    assert "a net must be read before `optimize` rewrites it" in text


@pytest.mark.usefixtures("unrolled_steps")
def test_after_steps_have_been_written_out(path):
    model, _ = Stack(options={"forward_only": True}).built()
    assert optimize(model, ["unrolled_steps"], even_if_slower=True).total == 1
    name = model.net.Name()
    assert export_refused(path, ValueError, model) == (
        "export_onnx: net '{}' has its steps written out; it must be read before `optimize` rewrites it".format(name)
    )
    LSTM(model, "x", None, None, 2, 3, "other")
    assert export_refused(path, ValueError, model) == listed(
        "export_onnx",
        "net '{}' has no LSTM under 'lstm'; it has loops under 'other'".format(name),
        "`optimize` has written out steps of net '{}', or parted its batch, and must be called behind this".format(
            name
        ),
    )


def test_a_net_that_joins_the_cells_of_all_steps_alone(path):
    net = joining_alone(Stack(1, True), 2)[0]
    text = "export_onnx: net '{}' has none of the outputs that ONNX knows: hidden_all, hidden_last, cell_last"
    assert export_refused(path, ValueError, net) == text.format(net.name)


def test_states_of_its_own_that_are_not_there(path):
    model = ModelHelper("model")
    LSTM(model, "x", None, None, 2, 3, "lstm")
    text = export_refused(path, ValueError, model)
    state = "initial state 'lstm/initial_{}_state' is not in the workspace, which tells its shape; run the model's "
    for kind in ("hidden", "cell"):
        assert state.format(kind) + "param_init_net first" in text


def test_all_blobs_that_are_missing_in_one_error(path):
    model, _ = Stack().build()
    workspace.FeedBlob("s1", "text")
    state = "initial state '{}' is not in the workspace, which tells its shape; feed it first"
    blob = "blob 'lstm/{}' is not in the workspace; run the model's param_init_net first"
    assert export_refused(path, ValueError, model) == listed(
        "export_onnx",
        state.format("s0"),
        state.format("s1"),
        *map(blob.format, ("i2h_w", "gates_t_w", "i2h_b", "gates_t_b")),
    )


def test_states_that_do_not_fit(path):
    model, _ = Stack(2, True).built()
    shapes = {"s1": (4,), "s2": (2, 3, 3), "s4": (1, 1, 3, 3), "s5": (), "s6": (3, 2)}
    for blob, shape in shapes.items():
        workspace.FeedBlob(blob, np.zeros(shape, np.float32))
    text = "initial state '{}' has shape {}; it takes [3], [N, 3] or [1, N, 3]"
    assert export_refused(path, ValueError, model) == listed(
        "export_onnx", *(text.format(blob, list(shape)) for blob, shape in shapes.items())
    )
