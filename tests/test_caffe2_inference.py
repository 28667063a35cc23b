"""Of operators of which Caffe2 infers another shape than they make: what is inferred is what a run makes."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import LSTM, check_inputs, describe, optimize, recurrent_net
from caffe2_recurrent.loops.shape_inference import Inference
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.viewing.loop_sizes import find_outer_tensors
from caffe2_recurrent.viewing.tensors import Tensor, infer

RANDOM = np.random.RandomState(0)
X = RANDOM.rand(5, 2, 3).astype(np.float32)
IMAGES, FILTERS = RANDOM.rand(2, 4, 8, 8).astype(np.float32), RANDOM.rand(4, 4, 3, 3).astype(np.float32)
LENGTHS = np.array([5, 3], np.int32)


def operator(kind, inputs, **arguments):
    blobs = ["input_{}".format(position) for position in range(len(inputs))]
    return core.CreateOperator(kind, blobs, ["output"], **arguments)


def followed(made, inputs):
    """What is inferred of the output where sizes are looked for, and where a loop is described."""
    inference = Inference({blob: value.shape for blob, value in zip(made.input, inputs)})
    inference.follow([made])
    shown = infer(made, [Tensor(value.shape, value.dtype) for value in inputs])
    return inference.shapes.get("output"), shown.get(0)


@pytest.mark.parametrize(
    "kind, inputs, arguments",
    [
        ("ConstantFill", [LENGTHS], {"extra_shape": [4], "value": 0.0}),
        ("ConstantFill", [LENGTHS], {"extra_shape": [4, 2], "value": 0, "dtype": core.DataType.INT32}),
        ("GaussianFill", [LENGTHS], {"extra_shape": [4]}),
        ("UniformFill", [X], {"extra_shape": [4]}),
        ("XavierFill", [X], {"extra_shape": [4]}),
        ("UniformIntFill", [X], {"extra_shape": [2]}),
        ("GivenTensorFill", [LENGTHS], {"extra_shape": [1], "values": [1.0, 2.0]}),
        ("Gather", [X, np.zeros((2, 2), np.int32)], {"axis": -1}),
        ("Gather", [X, np.zeros(4, np.int32)], {"axis": -3}),
        ("Slice", [X], {"starts": [0, 0, 0], "ends": [10, -1, -1]}),
        ("Slice", [X], {"starts": [2, 0, 0], "ends": [4, -1, -1]}),
        ("Slice", [X], {"starts": [-3, 0, 0], "ends": [-1, -1, -1]}),
        ("ReduceSum", [X], {}),
        ("ReduceMean", [X], {}),
        ("SumReduceLike", [X, X[0, 0]], {}),
        ("BatchMatMul", [X, X], {"trans_b": 1}),
        ("BatchMatMul", [X[:1], RANDOM.rand(4, 3, 5).astype(np.float32)], {"broadcast": 1}),
        ("ATen", [X, X[0, 0]], {"operator": "tanh_backward"}),
        ("ATen", [X, X.reshape(6, 5)], {"operator": "view_as"}),
        ("ResizeLike", [X, X.reshape(6, 5)], {}),
        ("TanhGradient", [X, X], {}),
        ("TanhGradient", [X[:1], X[np.newaxis, :1]], {}),
        ("SigmoidGradient", [X[np.newaxis, :1], X[:1]], {}),
        ("Conv", [IMAGES, FILTERS], {"kernel": 3, "pad": 1, "dilation": 1}),
    ],
)
def test_it_is_what_a_run_makes(kind, inputs, arguments):
    made = operator(kind, inputs, **arguments)
    for blob, value in zip(made.input, inputs):
        workspace.FeedBlob(blob, value)
    workspace.RunOperatorOnce(made)
    value = workspace.FetchBlob("output")
    assert followed(made, inputs) == (value.shape, Tensor(value.shape, value.dtype))


@pytest.mark.parametrize(
    "kind, inputs, arguments",
    [
        ("Conv", [IMAGES, FILTERS], {"kernel": 3, "dilation": 2}),
        ("Conv", [IMAGES, FILTERS], {"kernels": [3, 3], "dilations": [1, 2]}),
        ("Conv", [IMAGES, FILTERS], {"kernel": 3, "dilation_h": 2, "dilation_w": 1}),
        ("Conv", [X[0, 0], FILTERS], {"kernel": 3}),
        ("Gather", [np.float32(1.5), LENGTHS], {}),
        ("Gather", [X, LENGTHS], {"axis": 3}),
        ("Gather", [X, LENGTHS], {"axis": -4}),
        ("ReduceSum", [X], {"keepdims": 0}),
        ("ReduceMean", [X[:0]], {}),
        ("TanhGradient", [X, X[:, :, :2]], {}),
        ("BatchMatMul", [X, X[0, 0, :2]], {"broadcast": 1, "trans_a": 1}),
        ("Slice", [X], {"starts": [3, 0, 0], "ends": [2, -1, -1]}),
        ("Slice", [X], {"starts": [-1, 0, 0], "ends": [2, -1, -1]}),
        ("GatherRanges", [X[0, 0], np.zeros((2, 1, 2), np.int32)], {}),
    ],
)
def test_nothing_is_better_than_what_is_wrong(kind, inputs, arguments):
    assert followed(operator(kind, inputs, **arguments), inputs) == (None, None)


BOUNDS = {"starts": [1, 0, 0], "ends": [4, -1, -1]}


@pytest.mark.parametrize(
    "sizes, kind, inputs, arguments",
    [
        ([3, 4], "ConstantFill", [], {"input_as_shape": 1, "extra_shape": [5]}),
        ([3, 4], "ConstantFill", [], {"input_as_shape": 1, "dtype": core.DataType.INT32, "value": 1}),
        ([3, 4], "GaussianFill", [], {"input_as_shape": 1}),
        ([6, 5], "Reshape", [X], {}),
        ([-1, 3], "Reshape", [X], {}),
        ([0, -1], "Reshape", [X], {}),
    ],
)
def test_a_shape_that_a_blob_holds(sizes, kind, inputs, arguments):
    """As it is followed on the way to a loop, and where an `If` is described."""
    net = core.Net("net")
    read = [
        *(net.AddExternalInput("input") for _ in inputs),
        net.GivenTensorInt64Fill([], "sizes", values=sizes, shape=[2]),
    ]
    getattr(net, kind)(read, ["output", "old"] if kind == "Reshape" else "output", **arguments)
    for value in inputs:
        workspace.FeedBlob("input", value)
    workspace.RunNetOnce(net)
    value = workspace.FetchBlob("output")
    inference = Inference({"input": X.shape})
    inference.follow(net.Proto().op)
    shown = find_outer_tensors(net.Proto(), Sizes({"input": X.shape}))
    assert (inference.shapes["output"], shown["output"]) == (value.shape, Tensor(value.shape, value.dtype))


BY_ELEMENT = [
    "Abs",
    "Acos",
    "Asin",
    "Atan",
    "Cbrt",
    "Cos",
    "Cosh",
    "Cube",
    "Gelu",
    "HardSigmoid",
    "Log1p",
    "Reciprocal",
]
BY_ELEMENT += ["LeakyRelu", "Relu", "Rsqrt", "Sigmoid", "Sin", "Sinh", "Softsign", "Tan", "Tanh"]


@pytest.mark.parametrize("shapes", [((2, 3), (1, 2, 3)), ((1, 2, 3), (2, 3))], ids=str)
@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_a_gradient_that_comes_in_another_shape(kind, shapes):
    """As of a state that a step has squeezed."""
    inputs = [np.full(shape, 0.3, np.float32) for shape in shapes]
    made = operator(kind + "Gradient", inputs)
    for blob, value in zip(made.input, inputs):
        workspace.FeedBlob(blob, value)
    workspace.RunOperatorOnce(made)
    value = workspace.FetchBlob("output")
    assert followed(made, inputs) == (value.shape, Tensor(value.shape, value.dtype))


def test_places_of_the_largest():
    """Caffe2 infers numbers of 32 bits."""
    made = core.CreateOperator("TopK", ["input"], ["largest", "places"], k=2)
    workspace.FeedBlob("input", X)
    workspace.RunOperatorOnce(made)
    found = infer(made, [Tensor(X.shape, X.dtype)])
    for position, blob in enumerate(made.output):
        value = workspace.FetchBlob(blob)
        assert found[position] == Tensor(value.shape, value.dtype)


def test_a_shape_that_is_gone_back_to():
    net = core.Net("net")
    flat, old = net.Reshape("input", ["flat", "old"], shape=[-1])
    net.Reshape([net.Copy(flat, "copied"), old], ["output", "older"])
    inference = Inference({"input": X.shape})
    inference.follow(net.Proto().op)
    assert inference.shapes["output"] == X.shape


@pytest.mark.parametrize("is_fed", [False, True])
def test_a_blob_that_is_written_again(is_fed):
    """Of a `Slice` whose bounds are blobs nothing is known: the blob has no longer the shape that it had."""
    net = core.Net("net")
    if is_fed:
        workspace.FeedBlob("sequence", X)
        net.Copy("sequence", "seen")
    else:
        net.Copy("x", "sequence")
    starts, ends = (net.GivenTensorInt64Fill([], name, shape=[3], values=at) for name, at in BOUNDS.items())
    net.Slice(["x", starts, ends], "sequence")
    step = core.Net("step")
    x, h = step.AddExternalInputs("x_t", "h_prev")
    new = step.Tanh(step.Sum([x, h], "z"), "h_t")
    step.AddExternalOutput(new)
    recurrent_net(net, step, [(x, "sequence")], [(h, "h0")], {h: new}, scope="layer", forward_only=True)
    workspace.FeedBlob("x", X)
    workspace.FeedBlob("h0", X[0])
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("sequence").shape == (3, 2, 3)
    workspace.ResetWorkspace()
    for blob in ("x", "h0", *(["sequence"] if is_fed else [])):
        workspace.FeedBlob(blob, X[0] if blob == "h0" else X)
    assert "T = ? steps" in str(describe(net))


def test_shapes_of_the_given_operator_stay():
    """What it is taken for is another one."""
    made = operator("ConstantFill", [LENGTHS], extra_shape=[4], value=0.0)
    before = caffe2_pb2.OperatorDef.FromString(made.SerializeToString())
    followed(made, [LENGTHS])
    assert made == before


@pytest.mark.parametrize("trials", [True, False])
def test_states_that_are_filled_like_the_lengths(trials):
    """As scripts have them: one row for each length."""
    steps, batch, size = 5, 2, 4
    workspace.FeedBlob("x", X)
    workspace.FeedBlob("lengths", LENGTHS)
    model = ModelHelper("model")
    zero = model.net.ConstantFill("lengths", "zero", extra_shape=[size], value=0.0)
    hidden, *_ = LSTM(model, "x", "lengths", (zero, zero), X.shape[-1], size, "layer", forward_only=True)
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    expected = workspace.FetchBlob(hidden)
    assert expected.shape == (steps, batch, size)
    check_inputs(model)
    assert "initial value zero [2, 4]" in str(describe(model))
    optimize(model, even_if_slower=True, trials=trials)
    workspace.RunNetOnce(model.net)
    np.testing.assert_allclose(workspace.FetchBlob(hidden), expected, atol=1e-6)


def test_nets_that_gather_along_their_last_axis_can_be_looked_at():
    model = ModelHelper("model")
    workspace.FeedBlob("x", X)
    workspace.FeedBlob("columns", np.array([0, 2, 1, 0], np.int32))
    gathered = model.net.Gather(["x", "columns"], "gathered", axis=-1)
    LSTM(model, gathered, None, None, 4, 3, "layer", forward_only=True)
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    check_inputs(model)
    assert "T = 5 steps, N = 2 sequences" in str(describe(model))
    assert optimize(model, even_if_slower=True, dry_run=True)
