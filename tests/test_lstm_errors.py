"""What `LSTM` refuses: the whole text of each error, its type, and that the model was left as it was."""

import itertools

import numpy as np
import pytest
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper
from caffe2.python.modeling.parameter_sharing import ParameterSharing

import comparing
from caffe2_recurrent import LSTM
from errors_support import call_lstm, listed, lstm_refused, model_snapshot

POSITIONS = "outputs_with_grads takes positions of outputs, like (0, 2), or 'auto'; got "
STATES = "initial_states must be (hidden, cell) blobs or None; got "
LENGTHS = "seq_lengths must be a blob, its name, or None for full length; got "

WRONG_TYPES = {
    "input missing": ({"input_blob": None}, "input_blob must be a blob or its name; got None of type NoneType"),
    "input bytes": ({"input_blob": b"X"}, "input_blob must be a blob or its name; got b'X' of type bytes"),
    "input a tuple": ({"input_blob": ("X",)}, "input_blob must be a blob or its name; got ('X',) of type tuple"),
    "lengths a number": ({"seq_lengths": 3}, LENGTHS + "3 of type int"),
    "lengths a list": ({"seq_lengths": [3, 2]}, LENGTHS + "[3, 2] of type list"),
    # A string of two characters must not pass for two blobs.
    "states a name": ({"initial_states": "HC"}, STATES + "'HC' of type str"),
    "states a dict": ({"initial_states": {"H": 1, "C": 2}}, STATES + "{'H': 1, 'C': 2} of type dict"),
    "states an array": ({"initial_states": np.zeros(2)}, STATES + "array([0., 0.]) of type ndarray"),
    "one state missing": ({"initial_states": ("H", None)}, STATES + "('H', None) of type tuple"),
    "dim_in a float": ({"dim_in": 2.0}, "dim_in must be a whole number; got 2.0 of type float"),
    "dim_in a digit": ({"dim_in": "2"}, "dim_in must be a whole number; got '2' of type str"),
    "dim_in a bool": ({"dim_in": True}, "dim_in must be a whole number; got True of type bool"),
    "dim_in a flag of numpy": (
        {"dim_in": np.bool_(True)},
        "dim_in must be a whole number; got True of type bool_",
    ),
    "dim_in an array": (
        {"dim_in": np.array([2, 3])},
        "dim_in must be a whole number; got array([2, 3]) of type ndarray",
    ),
    # Has __index__ and would pass for 2.
    "dim_in an array of one number": (
        {"dim_in": np.array(2)},
        "dim_in must be a whole number; got array(2) of type ndarray",
    ),
    "dim_out a float of numpy": (
        {"dim_out": np.float32(3)},
        "dim_out must be a whole number; got 3.0 of type float32",
    ),
    "dim_out missing": ({"dim_out": None}, "dim_out must be a whole number; got None of type NoneType"),
    "scope missing": ({"scope": None}, "scope must be a string; got None of type NoneType"),
    "scope bytes": ({"scope": b"s"}, "scope must be a string; got b's' of type bytes"),
    "bias missing": ({"forget_bias": None}, "forget_bias must be a number; got None of type NoneType"),
    "bias a digit": ({"forget_bias": "1"}, "forget_bias must be a number; got '1' of type str"),
    "bias a blob": (
        {"forget_bias": core.BlobReference("b")},
        'forget_bias must be a number; got BlobReference("b") of type BlobReference',
    ),
    "bias an array": (
        {"forget_bias": np.array([1.0, 2.0])},
        "forget_bias must be a number; got array([1., 2.]) of type ndarray",
    ),
    "bias a flag": ({"forget_bias": True}, "forget_bias must be a number; got True of type bool"),
    "bias complex": ({"forget_bias": 1j}, "forget_bias must be a number; got 1j of type complex"),
    "positions missing": ({"outputs_with_grads": None}, POSITIONS + "None of type NoneType"),
    "positions a number": ({"outputs_with_grads": 0}, POSITIONS + "0 of type int"),
    "position a float": (
        {"outputs_with_grads": [0.5]},
        "outputs_with_grads takes whole numbers; got 0.5 of type float",
    ),
}

FLAGS = ["return_params", "memory_optimization", "forward_only", "drop_states"]


@pytest.mark.parametrize("changes, text", WRONG_TYPES.values(), ids=list(WRONG_TYPES))
def test_argument_of_the_wrong_type(changes, text):
    assert lstm_refused(TypeError, **changes) == "LSTM: " + text


@pytest.mark.parametrize("value", [None, "no", 2, 0.0, np.array([1, 0])], ids=repr)
@pytest.mark.parametrize("flag", FLAGS)
def test_flag_of_the_wrong_type(flag, value):
    shown = "{!r} of type {}".format(value, type(value).__name__)
    assert lstm_refused(TypeError, **{flag: value}) == "LSTM: {} must be True or False; got {}".format(flag, shown)


@pytest.mark.parametrize("value", [None, "model", 3], ids=repr)
def test_not_a_model(value):
    with pytest.raises(TypeError) as caught:
        LSTM(value, "X", None, None, 2, 3, "s")
    shown = "{!r} of type {}".format(value, type(value).__name__)
    assert str(caught.value) == "LSTM: model must be a ModelHelper or CNNModelHelper; got " + shown


def test_net_instead_of_its_model():
    with pytest.raises(TypeError) as caught:
        LSTM(core.Net("net"), "X", None, None, 2, 3, "s")
    text = str(caught.value)
    assert text.startswith("LSTM: model must be a ModelHelper or CNNModelHelper; got <caffe2.python.core.Net object")
    assert text.endswith(" of type Net")


OUTPUTS = "0 'hidden_all', 1 'hidden_last', 2 'cell_all', 3 'cell_last'"

WRONG_VALUES = {
    "one state": ({"initial_states": ("H",)}, "initial_states must be two blobs (hidden, cell); got 1"),
    "three states": ({"initial_states": ("H", "C", "D")}, "initial_states must be two blobs (hidden, cell); got 3"),
    "dim_in zero": ({"dim_in": 0}, "dim_in must be 1 or more; got 0"),
    "dim_out below zero": ({"dim_out": -3}, "dim_out must be 1 or more; got -3"),
    "bias no number": ({"forget_bias": float("nan")}, "forget_bias must be a finite number; got nan"),
    "bias infinite": ({"forget_bias": np.float32("inf")}, "forget_bias must be a finite number; got inf"),
    "scope empty": ({"scope": ""}, "scope is empty; parameters need a prefix that tells this layer from others"),
    "position too high": (
        {"outputs_with_grads": (0, 4)},
        "outputs_with_grads has position 4, but the outputs are " + OUTPUTS,
    ),
    "position below zero": (
        {"outputs_with_grads": (-1,)},
        "outputs_with_grads has position -1, but the outputs are " + OUTPUTS,
    ),
    "position twice": ({"outputs_with_grads": (1, 1)}, "outputs_with_grads has position 1 ('hidden_last') twice"),
}


@pytest.mark.parametrize("changes, text", WRONG_VALUES.values(), ids=list(WRONG_VALUES))
def test_argument_out_of_range(changes, text):
    assert lstm_refused(ValueError, **changes) == "LSTM: " + text


def test_all_wrong_types_in_one_error():
    text = lstm_refused(
        TypeError,
        input_blob=1,
        seq_lengths=2,
        initial_states=3,
        dim_in="a",
        dim_out=4.5,
        scope=5,
        outputs_with_grads=6,
        forget_bias="b",
        return_params=7,
        memory_optimization=8,
        forward_only=9,
        drop_states=None,
    )
    assert text == listed(
        "LSTM",
        "input_blob must be a blob or its name; got 1 of type int",
        LENGTHS + "2 of type int",
        "dim_in must be a whole number; got 'a' of type str",
        "dim_out must be a whole number; got 4.5 of type float",
        STATES + "3 of type int",
        "scope must be a string; got 5 of type int",
        POSITIONS + "6 of type int",
        "return_params must be True or False; got 7 of type int",
        "memory_optimization must be True or False; got 8 of type int",
        "forget_bias must be a number; got 'b' of type str",
        "forward_only must be True or False; got 9 of type int",
        "drop_states must be True or False; got None of type NoneType",
    )


def test_all_wrong_values_in_one_error():
    text = lstm_refused(ValueError, initial_states=("H",), dim_in=0, dim_out=-3, scope="", outputs_with_grads=(9, 2, 2))
    assert text == listed(
        "LSTM",
        "dim_in must be 1 or more; got 0",
        "dim_out must be 1 or more; got -3",
        "initial_states must be two blobs (hidden, cell); got 1",
        "scope is empty; parameters need a prefix that tells this layer from others",
        "outputs_with_grads has position 9, but the outputs are " + OUTPUTS,
        "outputs_with_grads has position 2 ('cell_all') twice",
    )


def test_parameter_of_another_shape():
    model = ModelHelper("model")
    call_lstm(model)
    text = lstm_refused(ValueError, model, dim_in=5)
    assert text == "LSTM: parameter 's/i2h_w' has shape [12, 2], but this cell needs [12, 5]"


def test_all_parameters_of_another_shape():
    model = ModelHelper("model")
    call_lstm(model, initial_states=None)
    text = lstm_refused(ValueError, model, initial_states=None, dim_in=5, dim_out=4)
    assert text == listed(
        "LSTM",
        "parameter 's/i2h_w' has shape [12, 2], but this cell needs [16, 5]",
        "parameter 's/i2h_b' has shape [12], but this cell needs [16]",
        "parameter 's/gates_t_w' has shape [12, 3], but this cell needs [16, 4]",
        "parameter 's/gates_t_b' has shape [12], but this cell needs [16]",
        "parameter 's/initial_hidden_state' has shape [3], but this cell needs [4]",
        "parameter 's/initial_cell_state' has shape [3], but this cell needs [4]",
    )


def test_shared_parameter_of_another_shape():
    """The parameter is named as the model knows it, not as the scope would have named it."""
    model = ModelHelper("model")
    call_lstm(model, scope="first")
    with ParameterSharing({"second": "first"}):
        text = lstm_refused(ValueError, model, scope="second", dim_in=5)
    assert text == "LSTM: parameter 'first/i2h_w' has shape [12, 2], but this cell needs [12, 5]"


SHARED = "LSTM: the step net computes or receives {}, of which net '{}' has a blob of the same name; "
SHARED += "all steps would share that one: rename the blob of the net, or build the layer under another scope"


def test_model_has_a_blob_of_the_steps_name():
    """By now parameters and the product with the input are in the model: all of it is taken back."""
    model = ModelHelper("model")
    model.net.AddExternalInput("s/hidden_t", "s/gates_t")
    text = lstm_refused(ValueError, model, initial_states=None)
    assert text == SHARED.format("'s/hidden_t', 's/gates_t'", model.net.Name())
    assert len(call_lstm(model, scope="elsewhere")) == 4


def test_initial_states_with_the_names_of_the_steps():
    model = ModelHelper("model")
    text = lstm_refused(ValueError, model, initial_states=("s/hidden_t", "s/cell_t"))
    assert text == SHARED.format("'s/hidden_t', 's/cell_t'", model.net.Name())


def test_failing_second_layer_leaves_the_first():
    model = ModelHelper("model")
    first = call_lstm(model)
    model.net.AddExternalInput("upper/hidden_t")
    before = model_snapshot(model)
    upper = {"input_blob": first[0], "initial_states": None, "dim_in": 3, "scope": "upper"}
    lstm_refused(ValueError, model, **upper)
    lstm_refused(TypeError, model, **dict(upper, dim_in=None))
    assert model_snapshot(model) == before
    # The first layer's parameters are still shared with a second call of its scope.
    call_lstm(model)
    assert len(model.params) == 4


def test_failure_under_a_name_scope():
    model = ModelHelper("model")
    with core.NameScope("a"):
        model.net.AddScopedExternalInputs("s/hidden_t")
        text = lstm_refused(ValueError, model)
    assert text == SHARED.format("'a/s/hidden_t'", model.net.Name())


CORRECT = {
    "full length": {"seq_lengths": None},
    "one blob for both states": {"initial_states": ["H", "H"]},
    "input as a state": {"initial_states": ("X", "X")},
    "scope with a level": {"scope": "a/b"},
    "letters of any language": {"scope": "größer"},
    "bias of numpy": {"forget_bias": np.float32(1)},
    "positions of numpy": {"outputs_with_grads": np.array([2, 0])},
    "sizes of numpy": {"dim_in": np.int64(2), "dim_out": np.uint8(3)},
    "flags of numpy": {flag: np.bool_(False) for flag in FLAGS},
    "flags as numbers": dict.fromkeys(FLAGS, 0),
}


@pytest.mark.parametrize("changes", CORRECT.values(), ids=list(CORRECT))
def test_unusual_but_correct(changes):
    assert len(call_lstm(ModelHelper("model"), **changes)) == 4


def test_numbers_of_numpy_make_the_same_layer():
    """Sizes travel into shapes, where a number of 8 bits would overflow at the four gates."""
    plain, of_numpy = ModelHelper("plain"), ModelHelper("numpy")
    call_lstm(plain, initial_states=None, dim_out=100, forget_bias=1.0, memory_optimization=True)
    call_lstm(
        of_numpy,
        initial_states=None,
        dim_in=np.int32(2),
        dim_out=np.uint8(100),
        forget_bias=np.float32(1),
        memory_optimization=np.bool_(True),
    )
    assert str(of_numpy.param_init_net.Proto().op) == str(plain.param_init_net.Proto().op)
    for ours, theirs in itertools.zip_longest(of_numpy.net.Proto().op, plain.net.Proto().op):
        assert comparing.differences(ours, theirs) == []


def filled_by_hand(model, name, shape, into):
    """A parameter as scripts made it before models had `create_param`."""
    blob = model.param_init_net.ConstantFill([], name, shape=shape, value=0.5)
    model.AddParameter(blob)
    into.append(blob)
    return blob


def test_parameters_added_by_hand_are_used_once():
    model = ModelHelper("model")
    made = []
    filled_by_hand(model, "s/i2h_w", [12, 2], made)
    filled_by_hand(model, "s/gates_t_b", [12], made)
    filled_by_hand(model, "s/initial_cell_state", [3], made)
    params = call_lstm(model, initial_states=None, return_params=True)[-1]
    assert params["input"]["weights"] == made[0] and params["recurrent"]["biases"] == made[1]
    expected = ["s/i2h_w", "s/gates_t_b", "s/initial_cell_state"]
    expected += ["s/i2h_b", "s/gates_t_w", "s/initial_hidden_state"]
    assert [str(blob) for blob in model.params] == expected
    # Filled once: a second operator would overwrite what the script chose.
    assert [str(operator.output[0]) for operator in model.param_init_net.Proto().op] == expected
    loop = next(operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork")
    assert {"s/gates_t_b", "s/initial_cell_state"} < set(loop.input)


def test_parameters_added_by_hand_survive_a_failure():
    model = ModelHelper("model")
    filled_by_hand(model, "s/i2h_w", [12, 2], [])
    model.net.AddExternalInput("s/hidden_t")
    lstm_refused(ValueError, model, initial_states=None)
    assert [str(blob) for blob in model.params] == ["s/i2h_w"]
