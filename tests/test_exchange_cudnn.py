"""`lstm_to_cudnn` and `lstm_from_cudnn`: the flat blob as the engine reads it, followed in numpy; on a GPU, by cuDNN.

In numpy a gate is where the engine finds it: by the number that it gives cuDNN for it, in the order of these numbers,
all matrices before all biases.
"""

import itertools

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import numpy_cudnn
from caffe2_recurrent import LSTM, GetLSTMParamNames, InitFromLSTMParams, cudnn_LSTM, lstm_from_cudnn, lstm_to_cudnn
from caffe2_recurrent.cudnn import check_can_run
from caffe2_recurrent.exchange import cudnn_weights
from errors_support import listed
from exchanged_lstms import DIRECTIONS, FORGET_BIAS, LAYERS, Stack, assert_brought_back, bits, gates, refused, weights
from numpy_lstm import sigmoid

pytestmark = pytest.mark.filterwarnings("ignore:cudnn_LSTM. this net can be built here but not run")

# The numbers of the gates in recurrent_op_cudnn.cc; 4 more on the side of the state.
NUMBERS = {"input_gate": 0, "forget_gate": 1, "cell": 2, "output_gate": 3}
SIDES = ("input", "recurrent")


def engines_layout(dim_in, dim, num_layers, directions=1):
    """(layer, side, name) -> where it lies in the flat weights, and its shape; and the size of all.

    A backward direction is a layer of its own to cuDNN, behind the forward one.
    """
    places, position = {}, 0
    order = sorted(itertools.product(SIDES, NUMBERS), key=lambda gate: NUMBERS[gate[1]] + 4 * (gate[0] == "recurrent"))
    for kind in ("_w", "_b"):
        for layer in range(num_layers * directions):
            for side, gate in order:
                below = dim_in if layer < directions else dim * directions
                shape = (dim,) if kind == "_b" else (dim, below if side == "input" else dim)
                size = int(np.prod(shape))
                places[layer, side, gate + kind] = slice(position, position + size), shape
                position += size
    return places, position


@pytest.fixture
def engine(monkeypatch):
    """Lets `numpy_cudnn` find gates where cuDNN has them."""
    monkeypatch.setattr(numpy_cudnn, "layout", engines_layout)


def add_cudnn(stack, model=None):
    """A `cudnn_LSTM` over the blobs of the stack, with its states in cudnn_hidden and cudnn_cell."""
    model = model or ModelHelper("cudnn")
    values = stack.values()
    for side, name in enumerate(("cudnn_hidden", "cudnn_cell")):
        workspace.FeedBlob(name, np.stack([values[states[side]] for states in stack.states]))
    blobs = [core.BlobReference(name) for name in ("x", "cudnn_hidden", "cudnn_cell")]
    outputs = cudnn_LSTM(
        model, blobs[0], blobs[1:], stack.dim_in, stack.dim, "gpu", num_layers=stack.layers, return_params=True
    )
    return model, outputs


def last(array):
    """The last layer of `[L, N, D]` as LSTM gives it."""
    return array[-1:]


@LAYERS
@FORGET_BIAS
def test_a_model_trained_with_cudnn_serves_with_lstm(engine, layers, forget_bias):
    stack = Stack(layers, forget_bias=forget_bias)
    model, outputs = stack.built()
    trained, (every, hidden, cell, _) = add_cudnn(stack)
    numpy_cudnn.run(trained.param_init_net)
    random = np.random.RandomState(1)
    flat = random.uniform(-1, 1, size=workspace.FetchBlob("gpu/lstm_weight").shape).astype(np.float32)
    workspace.FeedBlob("gpu/lstm_weight", flat)
    numpy_cudnn.run(trained.net)
    lstm_from_cudnn(model, "lstm", workspace.FetchBlob("gpu/lstm_weight"))
    workspace.RunNetOnce(model.net)
    comparing.assert_close(workspace.FetchBlob(outputs[0]), workspace.FetchBlob(every), "all steps", 2e-6)
    comparing.assert_close(workspace.FetchBlob(outputs[1]), last(workspace.FetchBlob(hidden)), "hidden", 2e-6)
    comparing.assert_close(workspace.FetchBlob(outputs[3]), last(workspace.FetchBlob(cell)), "cell", 2e-6)


@LAYERS
@FORGET_BIAS
def test_a_model_trained_with_lstm_goes_on_with_cudnn(engine, layers, forget_bias):
    stack = Stack(layers, forget_bias=forget_bias)
    model, outputs = stack.built()
    workspace.RunNetOnce(model.net)
    expected = [workspace.FetchBlob(outputs[position]) for position in (0, 1, 3)]
    going_on, (every, hidden, cell, _) = add_cudnn(stack)
    numpy_cudnn.run(going_on.param_init_net)
    workspace.FeedBlob("gpu/lstm_weight", lstm_to_cudnn(model, "lstm"))
    numpy_cudnn.run(going_on.net)
    comparing.assert_close(workspace.FetchBlob(every), expected[0], "all steps", 2e-6)
    comparing.assert_close(last(workspace.FetchBlob(hidden)), expected[1], "hidden", 2e-6)
    comparing.assert_close(last(workspace.FetchBlob(cell)), expected[2], "cell", 2e-6)


@LAYERS
def test_what_the_extractor_takes_out(engine, layers):
    """Gate by gate through the net that `cudnn_LSTM` returns, and all at once: the same bits in the same places."""
    stack = Stack(layers)
    model, _ = stack.built()
    trained, (_, _, _, (extractor, mapping)) = add_cudnn(stack)
    numpy_cudnn.run(trained.param_init_net)
    workspace.FeedBlob("gpu/lstm_weight", lstm_to_cudnn(model, "lstm"))
    numpy_cudnn.run(extractor)
    for layer, (i2h_w, gates_w, i2h_b, gates_b) in enumerate(stack.parameters):
        for side, blobs in (("input", (i2h_w, i2h_b)), ("recurrent", (gates_w, gates_b))):
            for blob, names in zip(blobs, GetLSTMParamNames().values()):
                for part, name in zip(np.split(workspace.FetchBlob(blob), 4), names):
                    found = workspace.FetchBlob(mapping[side][name][layer])
                    np.testing.assert_array_equal(bits(found.ravel()), bits(part.ravel()))
    before = weights(stack)
    for blob, value in before.items():
        workspace.FeedBlob(blob, np.zeros_like(value))
    for layer, (i2h_w, gates_w, i2h_b, gates_b) in enumerate(stack.parameters):
        blobs = {
            "input": {"weights": i2h_w, "biases": i2h_b},
            "recurrent": {"weights": gates_w, "biases": gates_b},
        }
        values = {
            side: {name: workspace.FetchBlob(by_layer[layer]) for name, by_layer in mapping[side].items()}
            for side in SIDES
        }
        InitFromLSTMParams(blobs, values)
    for blob, value in before.items():
        np.testing.assert_array_equal(bits(workspace.FetchBlob(blob)), bits(value))


@LAYERS
def test_the_size_is_what_cudnn_LSTM_makes(layers):
    stack = Stack(layers, dim_in=5, dim=4)
    flat = lstm_to_cudnn(stack.built()[0], "lstm")
    assert flat.dtype == np.float32 and flat.ndim == 1
    model, _ = add_cudnn(stack)
    assert numpy_cudnn.arguments(model.param_init_net.Proto().op[0])["shape"] == [flat.size]
    assert flat.size == 4 * (4 * 5 + 4 * 4 + 2 * 4) + (layers - 1) * 4 * (2 * 4 * 4 + 2 * 4)


def test_layout_of_a_small_one():
    stack = Stack(dim_in=2, dim=1)
    model, _ = stack.build()
    for number, blob in enumerate(stack.parameters[0]):
        rows = np.array([[10, 11], [20, 21], [40, 41], [30, 31]])  # input, forget, output, cell
        value = rows + 100 * number
        workspace.FeedBlob(blob, (value if number == 0 else value[:, :1] if number == 1 else value[:, 0]).astype("f"))
    assert lstm_to_cudnn(model, "lstm").tolist() == [
        *(10, 11, 20, 21, 30, 31, 40, 41),
        *(110, 120, 130, 140),
        *(210, 220, 230, 240),
        *(310, 320, 330, 340),
    ]


@LAYERS
@DIRECTIONS
def test_every_gate_is_where_the_engine_finds_it(layers, bidirectional):
    stack = Stack(layers, bidirectional, forget_bias=0.5)
    model, _ = stack.built()
    flat = lstm_to_cudnn(model, "lstm")
    places, size = engines_layout(stack.dim_in, stack.dim, layers, stack.directions)
    assert flat.shape == (size,)
    for loop, (i2h_w, gates_w, i2h_b, gates_b) in enumerate(stack.parameters):
        for side, kind, blob in (
            ("input", "_w", i2h_w),
            ("recurrent", "_w", gates_w),
            ("input", "_b", i2h_b),
            ("recurrent", "_b", gates_b),
        ):
            for number, gate in enumerate(("input_gate", "forget_gate", "output_gate", "cell")):
                place, shape = places[loop, side, gate + kind]
                expected = np.split(workspace.FetchBlob(blob), 4)[number]
                if (side, gate + kind) == ("input", "forget_gate_b"):
                    expected = expected + np.float32(0.5)
                np.testing.assert_array_equal(flat[place].reshape(shape), expected)


def forward(stack, flat):
    """hidden_all, hidden_last and cell_last of both directions, from the flat weights in numpy."""
    values = stack.values()
    places, _ = engines_layout(stack.dim_in, stack.dim, stack.layers, stack.directions)

    def product(loop, side, gate, value):
        (w, w_shape), (b, _) = places[loop, side, gate + "_w"], places[loop, side, gate + "_b"]
        return value @ flat[w].reshape(w_shape).T.astype(np.float64) + flat[b]

    sequence = values["x"]
    for layer in range(stack.layers):
        every, ends = [], []
        for direction in range(stack.directions):
            loop = layer * stack.directions + direction
            h, c = (values[blob] for blob in stack.states[loop])
            outputs = []
            for x_t in sequence[::-1] if direction else sequence:
                i, f, g, o = (product(loop, "input", n, x_t) + product(loop, "recurrent", n, h) for n in NUMBERS)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
                outputs.append(h)
            every.append(np.stack(outputs[::-1] if direction else outputs))
            ends.append((h, c))
        sequence = np.concatenate(every, axis=2)
    return [sequence, *(np.concatenate(side, axis=1)[None] for side in zip(*ends))]


def assert_computes_the_same(stack, model, outputs, flat):
    workspace.RunNetOnce(model.net)
    for position, expected in zip((0, 1, 3), forward(stack, flat)):
        comparing.assert_close(workspace.FetchBlob(outputs[position]), expected, position, tolerance=2e-6)


@LAYERS
@FORGET_BIAS
def test_both_directions(layers, forget_bias):
    stack = Stack(layers, True, forget_bias)
    model, outputs = stack.built()
    flat = lstm_to_cudnn(model, "lstm")
    assert_computes_the_same(stack, model, outputs, flat)
    random = np.random.RandomState(5).uniform(-1, 1, size=flat.shape).astype(np.float32)
    lstm_from_cudnn(model, "lstm", random)
    assert_computes_the_same(stack, model, outputs, random)


@pytest.mark.parametrize(
    "order", ["".join(order) for order in itertools.permutations("ifgo") if order != tuple("ifgo")]
)
def test_the_comparison_notices_another_order_of_gates(order, monkeypatch):
    stack = Stack()
    model, outputs = stack.built()
    monkeypatch.setattr(cudnn_weights, "CUDNN", order)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_computes_the_same(stack, model, outputs, lstm_to_cudnn(model, "lstm"))


@pytest.mark.parametrize("planted", ["biases after each layer", "directions", "matrices in columns"])
def test_the_comparison_notices_another_layout(planted, monkeypatch):
    stack = Stack(2, True, dim_in=3)
    model, outputs = stack.built()
    flat = lstm_to_cudnn(model, "lstm")
    places, _ = engines_layout(stack.dim_in, stack.dim, 2, 2)
    if planted == "biases after each layer":
        order = sorted(places, key=lambda place: (place[0], place[2][-1] == "b", places[place][0].start))
        wrong = np.concatenate([flat[places[place][0]] for place in order])
    elif planted == "directions":
        order = sorted(places, key=lambda place: (place[2][-1] == "b", place[0] // 2, 1 - place[0] % 2, place[1]))
        wrong = np.concatenate([flat[places[place][0]] for place in order])
    else:
        wrong = flat.copy()
        place, shape = places[0, "recurrent", "cell_w"]
        wrong[place] = flat[place].reshape(shape).T.ravel()
    assert sorted(wrong) == sorted(flat) and (wrong != flat).any()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_computes_the_same(stack, model, outputs, wrong)


@given(
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 1000),
    st.sampled_from([0.0, 1.0, -0.3]),
)
@settings(max_examples=40)
def test_there_and_back(layers, bidirectional, dim_in, dim, seed, forget_bias):
    workspace.ResetWorkspace()
    stack = Stack(layers, bidirectional, forget_bias, dim_in=dim_in, dim=dim, seed=seed)
    model, _ = stack.built()
    before = weights(stack)
    flat = lstm_to_cudnn(model, "lstm")
    for blob, value in before.items():
        workspace.FeedBlob(blob, np.zeros_like(value))
    lstm_from_cudnn(model, "lstm", flat)
    assert_brought_back(before, forget_bias, dim)
    if forget_bias == 0:
        np.testing.assert_array_equal(bits(lstm_to_cudnn(model, "lstm")), bits(flat))


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int64])
def test_numbers_of_other_kinds(kind):
    model, _ = Stack().built()
    flat = np.arange(lstm_to_cudnn(model, "lstm").size).astype(kind)
    lstm_from_cudnn(model, "lstm", flat)
    assert workspace.FetchBlob("lstm/i2h_w").dtype == np.float32
    np.testing.assert_array_equal(lstm_to_cudnn(model, "lstm"), flat)


def test_the_flat_weights_are_a_copy():
    model, _ = Stack().built()
    flat = lstm_to_cudnn(model, "lstm")
    before = weights(Stack())
    flat[:] = 0
    for blob, value in before.items():
        np.testing.assert_array_equal(workspace.FetchBlob(blob), value)


def test_to_torch_and_to_cudnn_agree_on_the_gates():
    """torch gives cuDNN its parameters as they are, and they have the same order of gates."""
    stack = Stack()
    model, _ = stack.built()
    blobs = [workspace.FetchBlob(blob) for blob in stack.parameters[0]]
    expected = np.concatenate([gates(blob, "ifog", "ifgo").ravel() for blob in blobs])
    np.testing.assert_array_equal(lstm_to_cudnn(model, "lstm"), expected)


# On a GPU, with cuDNN itself.


@pytest.mark.gpu
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_cudnn_computes_the_same(num_layers):
    on_gpu = core.DeviceOption(caffe2_pb2.CUDA, 0)
    stack = Stack(num_layers)
    model, outputs = stack.built()
    with core.DeviceScope(on_gpu):
        workspace.FeedBlob("x_gpu", stack.values()["x"])
        for side, name in enumerate(("hidden_gpu", "cell_gpu")):
            workspace.FeedBlob(name, np.stack([stack.values()[states[side]] for states in stack.states]))
        blobs = [core.BlobReference(name) for name in ("x_gpu", "hidden_gpu", "cell_gpu")]
        trained = ModelHelper("trained")
        *found, (extractor, mapping) = cudnn_LSTM(
            trained, blobs[0], blobs[1:], stack.dim_in, stack.dim, "gpu", num_layers=num_layers, return_params=True
        )
    check_can_run(trained)
    workspace.RunNetOnce(trained.param_init_net)
    with core.DeviceScope(on_gpu):
        random = np.random.RandomState(2).uniform(-1, 1, size=workspace.FetchBlob("gpu/lstm_weight").shape)
        workspace.FeedBlob("gpu/lstm_weight", random.astype(np.float32))

    def assert_same():
        workspace.RunNetOnce(trained.net)
        workspace.RunNetOnce(model.net)
        every, hidden, cell = (workspace.FetchBlob(blob) for blob in found)
        comparing.assert_close(workspace.FetchBlob(outputs[0]), every, "all steps", tolerance=1e-5)
        comparing.assert_close(workspace.FetchBlob(outputs[1]), last(hidden), "last hidden", tolerance=1e-5)
        comparing.assert_close(workspace.FetchBlob(outputs[3]), last(cell), "last cell", tolerance=1e-5)

    lstm_from_cudnn(model, "lstm", workspace.FetchBlob("gpu/lstm_weight"))
    assert_same()
    # What cuDNN itself says of the places.
    workspace.RunNetOnce(extractor)
    places, _ = engines_layout(stack.dim_in, stack.dim, num_layers)
    for (layer, side, name), (place, _) in places.items():
        gate = workspace.FetchBlob(mapping[side][name][layer])
        np.testing.assert_array_equal(gate.ravel(), random.astype(np.float32)[place])
    # And back.
    for blob, value in stack.values().items():
        workspace.FeedBlob(blob, value)
    with core.DeviceScope(on_gpu):
        workspace.FeedBlob("gpu/lstm_weight", lstm_to_cudnn(model, "lstm"))
    assert_same()


# Errors.


def test_another_size():
    model, _ = Stack(2, True).built()
    takes = "an LSTM with an input of 2, layers of [3, 3] and two directions takes [432]"
    for shape in ((431,), (433,), (1, 432), (), (2, 216)):
        assert refused(ValueError, lstm_from_cudnn, model, "lstm", np.zeros(shape)) == (
            "lstm_from_cudnn: flat has shape {}; {}".format(list(shape), takes)
        )
    model, _ = Stack(scope="single").built()
    assert refused(ValueError, lstm_from_cudnn, model, "single", np.zeros(83)) == (
        "lstm_from_cudnn: flat has shape [83]; an LSTM with an input of 2, layers of [3] and one direction takes [84]"
    )


def test_layers_of_several_sizes():
    model = ModelHelper("model")
    LSTM(model, "x", None, None, 2, [3, 4], "lstm")
    workspace.RunNetOnce(model.param_init_net)
    text = "layers of cuDNN have one size; those here have [3, 4]"
    assert refused(ValueError, lstm_to_cudnn, model, "lstm") == "lstm_to_cudnn: " + text
    assert refused(ValueError, lstm_from_cudnn, model, "lstm", np.zeros(3)) == listed(
        "lstm_from_cudnn",
        text,
        "flat has shape [3]; an LSTM with an input of 2, layers of [3, 4] and one direction takes [228]",
    )


def test_blobs_that_are_missing():
    model, _ = Stack().build()
    missing = "blob 'lstm/{}' is not in the workspace; run the model's param_init_net first"
    texts = [missing.format(name) for name in ("i2h_w", "gates_t_w", "i2h_b", "gates_t_b")]
    assert refused(ValueError, lstm_to_cudnn, model, "lstm") == listed("lstm_to_cudnn", *texts)
    assert refused(ValueError, lstm_from_cudnn, model, "lstm", np.zeros(84)) == listed("lstm_from_cudnn", *texts)


def test_no_such_lstm():
    model, _ = add_cudnn(Stack())
    text = "{}: net '{}' has no RecurrentNetwork operator; its operators are 'Recurrent'"
    name = model.net.Name()
    assert refused(ValueError, lstm_to_cudnn, model, "gpu") == text.format("lstm_to_cudnn", name)
    assert refused(ValueError, lstm_from_cudnn, model, "gpu", np.zeros(3)) == text.format("lstm_from_cudnn", name)


def test_arguments_of_the_wrong_type():
    types = (
        "net must be a ModelHelper, a core.Net or a NetDef; got 'net' of type str",
        "scope must be a string; got None of type NoneType",
    )
    assert refused(TypeError, lstm_to_cudnn, "net", None) == listed("lstm_to_cudnn", *types)
    flat = "flat must be a numpy array of real numbers; got {}"
    for value, shown in (("gpu/lstm_weight", "'gpu/lstm_weight' of type str"), ([1.0], "[1.0] of type list")):
        assert refused(TypeError, lstm_from_cudnn, "net", None, value) == listed(
            "lstm_from_cudnn", *types, flat.format(shown)
        )
    for kind in ("bool", "complex64"):
        text = refused(TypeError, lstm_from_cudnn, Stack().built()[0], "lstm", np.zeros(84, kind))
        assert text == "lstm_from_cudnn: " + flat.format("ndarray [84] of {}".format(kind))
