"""`GetLSTMParamNames` and `InitFromLSTMParams`: gates by name, and into the blobs of an LSTM."""

import numpy as np
import pytest
from caffe2.python import core, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given
from hypothesis import strategies as st

import comparing
from caffe2_recurrent import LSTM, GetLSTMParamNames, InitFromLSTMParams
from errors_support import listed
from numpy_lstm import Case, sigmoid
from workspace_contents import contents

WEIGHTS = ["input_gate_w", "forget_gate_w", "output_gate_w", "cell_w"]
BIASES = ["input_gate_b", "forget_gate_b", "output_gate_b", "cell_b"]
DIM_IN, DIM = 2, 3
PBLOBS = {
    "input": {"weights": "lstm/i2h_w", "biases": "lstm/i2h_b"},
    "recurrent": {"weights": "lstm/gates_t_w", "biases": "lstm/gates_t_b"},
}


def gates(dim_in=DIM_IN, dim=DIM, seed=0):
    """Random values for each gate of an LSTM."""
    random = np.random.RandomState(seed)
    return {
        side: {
            **{name: random.uniform(-1, 1, size=(dim, width)).astype(np.float32) for name in WEIGHTS},
            **{name: random.uniform(-1, 1, size=dim).astype(np.float32) for name in BIASES},
        }
        for side, width in (("input", dim_in), ("recurrent", dim))
    }


def build(dim_in=DIM_IN, dim=DIM):
    """An LSTM with its parameters in the workspace; its outputs and what it returns for parameters."""
    model = ModelHelper("model")
    *outputs, params = LSTM(model, "X", None, ("hidden", "cell"), dim_in, dim, "lstm", return_params=True)
    workspace.RunNetOnce(model.param_init_net)
    return model, outputs, params


def parameters():
    return {name: workspace.FetchBlob(name) for blobs in PBLOBS.values() for name in blobs.values()}


def loop(values, x, hidden, cell):
    """All hidden states, computed gate by gate."""
    hiddens = []
    for x_t in x:
        of = {
            gate: x_t @ values["input"][gate + "_w"].T
            + values["input"][gate + "_b"]
            + hidden @ values["recurrent"][gate + "_w"].T
            + values["recurrent"][gate + "_b"]
            for gate in ("input_gate", "forget_gate", "output_gate", "cell")
        }
        cell = sigmoid(of["forget_gate"]) * cell + sigmoid(of["input_gate"]) * np.tanh(of["cell"])
        hidden = sigmoid(of["output_gate"]) * np.tanh(cell)
        hiddens.append(hidden)
    return np.stack(hiddens)


def test_names():
    assert GetLSTMParamNames() == {"weights": WEIGHTS, "biases": BIASES}
    assert GetLSTMParamNames() == rnn_cell.GetLSTMParamNames()
    GetLSTMParamNames()["weights"].clear()
    assert GetLSTMParamNames()["weights"] == WEIGHTS


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_an_lstm_set_gate_by_gate_is_a_numpy_loop_over_those_gates(dim_in, dim, seed):
    workspace.ResetWorkspace()
    model, outputs, params = build(dim_in, dim)
    values = gates(dim_in, dim, seed)
    InitFromLSTMParams(params, values)
    case = Case(dim_in=dim_in, dim=dim, seed=seed)
    fed = {name: case.values()[name] for name in ("X", "hidden", "cell")}
    for name, value in fed.items():
        workspace.FeedBlob(name, value)
    workspace.RunNetOnce(model.net)
    expected = loop(values, *(value.astype(np.float64) for value in fed.values()))
    comparing.assert_close(workspace.FetchBlob(outputs[0]), expected, "hidden_all", tolerance=1e-5)


def test_gates_lie_in_the_order_of_lstm_unit():
    _, _, params = build()
    values = gates()
    InitFromLSTMParams(params, values)
    for side, blobs in PBLOBS.items():
        for blob, names in ((blobs["weights"], WEIGHTS), (blobs["biases"], BIASES)):
            parts = np.split(workspace.FetchBlob(blob), 4)
            for part, name in zip(parts, names):
                np.testing.assert_array_equal(part, values[side][name])


SHAPINGS = {
    "as they are": lambda value: value,
    "flat": np.ravel,
    "filters of cuDNN": lambda value: value.reshape(1, -1, 1),
    "a column": lambda value: value.reshape(-1, 1),
    "doubles": lambda value: value.astype(np.float64),
    "transposed in memory": np.asfortranarray,
}


@pytest.mark.parametrize("shaping", SHAPINGS.values(), ids=list(SHAPINGS))
@pytest.mark.parametrize("dims", [(2, 3), (3, 3), (1, 3), (3, 1), (1, 1)], ids=str)
def test_shapes_that_fit(shaping, dims):
    _, _, params = build(*dims)
    values = gates(*dims)
    InitFromLSTMParams(params, values)
    expected = parameters()
    for name, value in expected.items():
        workspace.FeedBlob(name, np.zeros_like(value))
    InitFromLSTMParams(
        params, {side: {name: shaping(value) for name, value in values[side].items()} for side in values}
    )
    for name, value in parameters().items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected[name])


def test_whole_numbers_become_float32():
    _, _, params = build()
    values = {side: {name: np.full(value.shape, 7) for name, value in gates()[side].items()} for side in PBLOBS}
    InitFromLSTMParams(params, values)
    for value in parameters().values():
        assert value.dtype == np.float32 and set(value.ravel()) == {7}


def test_result_is_that_of_caffe2s_own():
    _, _, params = build()
    InitFromLSTMParams(params, gates())
    ours = parameters()
    rnn_cell.InitFromLSTMParams(params, gates(seed=1))
    rnn_cell.InitFromLSTMParams(params, gates())
    for name, value in parameters().items():
        np.testing.assert_array_equal(ours[name], value)


@pytest.mark.parametrize("side", ["input", "recurrent"])
def test_one_side_alone(side):
    _, _, params = build()
    before = parameters()
    InitFromLSTMParams({side: params[side]}, {side: gates()[side]})
    for name, value in parameters().items():
        assert np.array_equal(value, before[name]) == (name not in PBLOBS[side].values()), name


def test_nothing_to_set():
    _, _, params = build()
    before = parameters()
    InitFromLSTMParams(params, {})
    for name, value in parameters().items():
        np.testing.assert_array_equal(value, before[name])


def test_blobs_by_name():
    build()
    InitFromLSTMParams(PBLOBS, gates())
    np.testing.assert_array_equal(workspace.FetchBlob("lstm/i2h_b")[3:6], gates()["input"]["forget_gate_b"])


# Errors.


def refused(kind, pblobs, values):
    """The text of the error, which is a `kind`; the workspace is as it was."""
    before = contents()
    with pytest.raises(kind) as caught:
        InitFromLSTMParams(pblobs, values)
    assert type(caught.value) is kind
    assert contents() == before
    return str(caught.value)


def changed(side, **entries):
    """`gates()` with some entries changed, or left out where the new value is None."""
    values = gates()
    values[side].update(entries)
    values[side] = {name: value for name, value in values[side].items() if value is not None}
    return values


WRONG_VALUES = {
    "unknown side": (
        dict(gates(), output=gates()["input"]),
        "param_values has 'output'; it takes 'input', 'recurrent'",
    ),
    "gate missing": (changed("input", cell_w=None), "param_values['input'] lacks 'cell_w'"),
    "gates missing": (
        changed("recurrent", cell_b=None, input_gate_w=None),
        "param_values['recurrent'] lacks 'input_gate_w', 'cell_b'",
    ),
    "unknown gate": (
        changed("input", cell=np.zeros(3)),
        "param_values['input'] has 'cell'; GetLSTMParamNames lists what it takes",
    ),
    "too many numbers": (
        changed("input", cell_w=np.zeros(7)),
        "param_values['input']['cell_w'] has shape [7]; a gate of 'lstm/i2h_w' takes [3, 2]",
    ),
    "too few numbers": (
        changed("recurrent", forget_gate_b=np.zeros(())),
        "param_values['recurrent']['forget_gate_b'] has shape []; a gate of 'lstm/gates_t_b' takes [3]",
    ),
    # As many numbers as it takes, but each in another place.
    "axes swapped": (
        changed("input", cell_w=np.zeros((2, 3))),
        "param_values['input']['cell_w'] has shape [2, 3]; a gate of 'lstm/i2h_w' takes [3, 2]",
    ),
}


@pytest.mark.parametrize("values, text", WRONG_VALUES.values(), ids=list(WRONG_VALUES))
def test_values_that_do_not_fit(values, text):
    build()
    assert refused(ValueError, PBLOBS, values) == "InitFromLSTMParams: " + text


def test_all_that_does_not_fit_in_one_error():
    build()
    workspace.FeedBlob("odd", np.zeros((6, 2), np.float32))
    workspace.FeedBlob("single", np.array(1, np.float32))
    workspace.CreateBlob("empty")
    pblobs = {"input": {"weights": "odd", "biases": "nowhere"}, "recurrent": {"weights": "empty", "biases": "single"}}
    values = changed("input", cell_w=None, other=np.zeros(2))
    values["something"] = {}
    text = refused(ValueError, pblobs, values)
    assert text == listed(
        "InitFromLSTMParams",
        "param_values has 'something'; it takes 'input', 'recurrent'",
        "param_values['input'] lacks 'cell_w'",
        "param_values['input'] has 'other'; GetLSTMParamNames lists what it takes",
        "blob 'odd' has shape [6, 2], which is not that of four gates",
        "blob 'nowhere' is not in the workspace; run the model's param_init_net first",
        "blob 'empty' holds no tensor; run the model's param_init_net first",
        "blob 'single' has shape [], which is not that of four gates",
    )


def test_sizes_that_do_not_fit_are_all_named():
    build()
    values = {side: {name: np.zeros(5) for name in WEIGHTS + BIASES} for side in PBLOBS}
    text = refused(ValueError, PBLOBS, values)
    shapes = {"lstm/i2h_w": [3, 2], "lstm/i2h_b": [3], "lstm/gates_t_w": [3, 3], "lstm/gates_t_b": [3]}
    assert text == listed(
        "InitFromLSTMParams",
        *(
            "param_values['{}']['{}'] has shape [5]; a gate of '{}' takes {}".format(side, name, blob, shapes[blob])
            for side, blobs in PBLOBS.items()
            for blob, names in ((blobs["weights"], WEIGHTS), (blobs["biases"], BIASES))
            for name in names
        ),
    )


def test_blobs_of_a_side_missing():
    build()
    text = refused(ValueError, {"input": {"weights": "lstm/i2h_w"}}, gates())
    assert text == listed(
        "InitFromLSTMParams",
        "lstm_pblobs has no 'biases' for 'input'",
        "lstm_pblobs has no 'weights', 'biases' for 'recurrent'",
    )


def test_blobs_of_several_layers():
    model = ModelHelper("model")
    blobs = LSTM(model, "X", None, None, DIM_IN, [DIM, DIM], "lstm", return_params=True)[-1]
    workspace.RunNetOnce(model.param_init_net)
    text = refused(TypeError, blobs, gates())
    assert text.startswith("InitFromLSTMParams: lstm_pblobs must be a dict of dicts; got [{'input': ")
    assert text.endswith(" of type list; pass one of its entries at a time, each is of one layer and direction")
    InitFromLSTMParams(blobs[0], gates())


def test_before_param_init_net():
    model = ModelHelper("model")
    params = LSTM(model, "X", None, ("hidden", "cell"), DIM_IN, DIM, "lstm", return_params=True)[-1]
    missing = "blob '{}' is not in the workspace; run the model's param_init_net first"
    blobs = ["lstm/i2h_w", "lstm/i2h_b", "lstm/gates_t_w", "lstm/gates_t_b"]
    assert refused(ValueError, params, gates()) == listed("InitFromLSTMParams", *map(missing.format, blobs))


ARRAY = "param_values['input']['cell_b'] must be a numpy array of real numbers; got "
WRONG_TYPES = {
    "blobs missing": (None, gates(), "lstm_pblobs must be a dict of dicts; got None of type NoneType"),
    "a list that is empty": ([], gates(), "lstm_pblobs must be a dict of dicts; got [] of type list"),
    "blobs of a side": (
        dict(PBLOBS, input="lstm/i2h_w"),
        gates(),
        "lstm_pblobs['input'] must be a dict; got 'lstm/i2h_w' of type str",
    ),
    "no blob": (
        dict(PBLOBS, input={"weights": 3, "biases": "b"}),
        gates(),
        "lstm_pblobs['input']['weights'] must be a blob or its name; got 3 of type int",
    ),
    "values missing": (PBLOBS, None, "param_values must be a dict of dicts; got None of type NoneType"),
    "values of a side": (PBLOBS, {"input": 3}, "param_values['input'] must be a dict; got 3 of type int"),
    "a list": (PBLOBS, {"input": {"cell_b": [1.0]}}, ARRAY + "[1.0] of type list"),
    "a blob": (PBLOBS, {"input": {"cell_b": "b"}}, ARRAY + "'b' of type str"),
    "values by layer": (
        PBLOBS,
        {"input": {"cell_b": {0: np.zeros(3)}}},
        ARRAY + "{0: array([0., 0., 0.])} of type dict",
    ),
    "complex numbers": (PBLOBS, {"input": {"cell_b": np.zeros(1, complex)}}, ARRAY + "ndarray [1] of complex128"),
    "flags": (PBLOBS, {"input": {"cell_b": np.zeros(1, bool)}}, ARRAY + "ndarray [1] of bool"),
}


@pytest.mark.parametrize("pblobs, values, text", WRONG_TYPES.values(), ids=list(WRONG_TYPES))
def test_argument_of_the_wrong_type(pblobs, values, text):
    build()
    assert refused(TypeError, pblobs, values) == "InitFromLSTMParams: " + text


def test_all_wrong_types_in_one_error():
    pblobs = {"input": {"weights": core.BlobReference("w"), "biases": None}, "recurrent": 1}
    values = {"input": {"cell_w": 2, "cell_b": np.zeros(3)}, "recurrent": None}
    assert refused(TypeError, pblobs, values) == listed(
        "InitFromLSTMParams",
        "lstm_pblobs['recurrent'] must be a dict; got 1 of type int",
        "lstm_pblobs['input']['biases'] must be a blob or its name; got None of type NoneType",
        "param_values['recurrent'] must be a dict; got None of type NoneType",
        "param_values['input']['cell_w'] must be a numpy array of real numbers; got 2 of type int",
    )
