"""What MILSTM, GRU and the attention helpers refuse; LSTM's errors are in test_lstm_errors.py."""

import numpy as np
import pytest
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import (
    GRU,
    MILSTM,
    AttentionType,
    LSTMWithAttention,
    apply_recurrent_attention,
    apply_regular_attention,
)
from caffe2_recurrent.backward.gradient_maker import POSITIONS
from caffe2_recurrent.operator_arguments import integers
from caffe2_recurrent.operators import OPERATOR
from errors_support import listed, model_snapshot

LAYER = {
    "input_blob": "X",
    "seq_lengths": None,
    "initial_states": ("H", "C"),
    "dim_in": 2,
    "dim_out": 3,
    "scope": "s",
}
DECODER = {
    "decoder_inputs": "X",
    "decoder_input_lengths": None,
    "initial_decoder_hidden_state": "H",
    "initial_decoder_cell_state": "C",
    "initial_attention_weighted_encoder_context": "context",
    "encoder_output_dim": 4,
    "encoder_outputs": "encoder",
    "decoder_input_dim": 2,
    "decoder_state_dim": 3,
    "scope": "s",
}
ATTENTION = {
    "encoder_output_dim": 4,
    "encoder_outputs_transposed": "transposed",
    "weighted_encoder_outputs": "weighted",
    "decoder_hidden_state_t": "hidden",
    "decoder_hidden_state_dim": 3,
    "scope": "s",
}
CALLS = {
    "MILSTM": (MILSTM, LAYER),
    "GRU": (GRU, dict(LAYER, initial_states=("H",))),
    "LSTMWithAttention": (LSTMWithAttention, DECODER),
    "apply_regular_attention": (apply_regular_attention, ATTENTION),
    "apply_recurrent_attention": (
        apply_recurrent_attention,
        dict(ATTENTION, attention_weighted_encoder_context_t_prev="context"),
    ),
}
EVERY_CALL = pytest.mark.parametrize("name", list(CALLS))


def refused(name, kind, model=None, **changes):
    """The text of the error, which is a `kind`; the model is as it was, and takes a correct call."""
    function, arguments = CALLS[name]
    model = model or ModelHelper("model")
    before = model_snapshot(model)
    with pytest.raises(kind) as caught:
        function(model, **dict(arguments, **changes))
    assert type(caught.value) is kind
    assert model_snapshot(model) == before
    return str(caught.value)


@EVERY_CALL
def test_correct_call(name):
    function, arguments = CALLS[name]
    assert function(ModelHelper("model"), **arguments)


@pytest.mark.parametrize("name", ["MILSTM", "GRU", "LSTMWithAttention"])
def test_positions_of_which_an_iterator_tells(name):
    """It can be gone through once, and there are checks, and several loops."""
    function, arguments = CALLS[name]
    both = {} if name == "LSTMWithAttention" else {"bidirectional": True, "initial_states": None}
    model = ModelHelper("model")
    function(model, **dict(arguments, outputs_with_grads=iter([1, 0]), **both))
    loops = [operator for operator in model.net.Proto().op if operator.type == OPERATOR]
    assert [integers(loop, POSITIONS) for loop in loops] == [[1, 0]] * (2 if both else 1)


@EVERY_CALL
def test_no_model(name):
    function, arguments = CALLS[name]
    with pytest.raises(TypeError) as caught:
        function("model", **arguments)
    assert str(caught.value) == name + ": model must be a ModelHelper or CNNModelHelper; got 'model' of type str"


@EVERY_CALL
def test_empty_scope(name):
    text = refused(name, ValueError, scope="")
    assert text == name + ": scope is empty; parameters need a prefix that tells this layer from others"


@EVERY_CALL
def test_blobs_and_sizes_of_the_wrong_type_in_one_error(name):
    _, arguments = CALLS[name]
    blobs = [key for key, value in arguments.items() if isinstance(value, str) and key != "scope"]
    sizes = [key for key, value in arguments.items() if isinstance(value, int)]
    text = refused(name, TypeError, **dict.fromkeys(blobs + sizes, 1.5))
    expected = ["{} must be a blob or its name; got 1.5 of type float".format(key) for key in blobs]
    expected += ["{} must be a whole number; got 1.5 of type float".format(key) for key in sizes]
    assert sorted(text.splitlines()[1:]) == sorted("  - " + line for line in expected)


@EVERY_CALL
def test_blobs_without_a_name(name):
    _, arguments = CALLS[name]
    blobs = [key for key, value in arguments.items() if isinstance(value, str) and key != "scope"]
    blobs += [key for key in ("seq_lengths", "decoder_input_lengths") if key in arguments]
    changes = dict.fromkeys(blobs, "")
    if "initial_states" in arguments:
        changes["initial_states"] = ("",) * len(arguments["initial_states"])
        blobs += ["initial_states[{}]".format(index) for index in range(len(arguments["initial_states"]))]
    with core.NameScope("outside"):
        text = refused(name, ValueError, **changes)
    assert sorted(text.splitlines()[1:]) == sorted("  - {} is an empty name".format(key) for key in blobs)


@EVERY_CALL
def test_parameter_of_another_shape(name):
    function, arguments = CALLS[name]
    model = ModelHelper("model")
    function(model, **arguments)
    key = next(key for key in arguments if key in ("dim_out", "encoder_output_dim"))
    text = refused(name, ValueError, model=model, **{key: 7})
    assert text.startswith(name + ": ") and "has shape" in text and "but this cell needs" in text


@pytest.mark.parametrize("name", ["MILSTM", "GRU"])
def test_wrong_number_of_initial_states(name):
    wanted = {"MILSTM": "two blobs (hidden, cell)", "GRU": "one blob (hidden)"}[name]
    text = refused(name, ValueError, initial_states=("a", "b", "c"))
    assert text == "{}: initial_states must be {}; got 3".format(name, wanted)


@pytest.mark.parametrize("value", ["h", {"h": 1}], ids=str)
def test_initial_states_of_one_state(value):
    text = refused("GRU", TypeError, initial_states=value)
    shown = "{!r} of type {}".format(value, type(value).__name__)
    wanted = "a tuple of one blob for each loop, like ('h0',) or None"
    assert text == "GRU: initial_states must be {}; got {}".format(wanted, shown)


@pytest.mark.parametrize("lengths", [None, "encoder_lengths"])
def test_the_order_of_caffe2s_attention(lengths):
    model = ModelHelper("model")
    with pytest.raises(TypeError) as caught:
        LSTMWithAttention(model, "x", None, "h", "c", "context", 3, "encoder", lengths, 2, 5, "decoder")
    hint = "encoder_lengths, in ninth place in Caffe2 1.10, is the last argument here; pass it as a keyword"
    assert "\n  - {}\n".format(hint) in str(caught.value)
    assert not model.net.Proto().op and not model.params


@pytest.mark.parametrize("value", [2, "Regular", None, 1.5, True, np.array([0, 1])], ids=str)
def test_unknown_attention_type(value):
    text = refused("LSTMWithAttention", ValueError, attention_type=value)
    shown = "{!r} of type {}".format(value, type(value).__name__)
    assert text == "LSTMWithAttention: attention_type must be one of Regular (0), Recurrent (1); got " + shown


def test_attention_types_are_those_of_caffe2():
    assert (AttentionType.Regular, AttentionType.Recurrent) == (0, 1)


def test_wrong_values_of_attention_in_one_error():
    text = refused(
        "LSTMWithAttention", ValueError, encoder_output_dim=0, scope="", attention_type=7, outputs_with_grads=(6,)
    )
    outputs = "0 'hidden_all', 1 'hidden_last', 2 'cell_all', 3 'cell_last', 4 'context_all', 5 'context_last'"
    assert text == listed(
        "LSTMWithAttention",
        "encoder_output_dim must be 1 or more; got 0",
        "scope is empty; parameters need a prefix that tells this layer from others",
        "attention_type must be one of Regular (0), Recurrent (1); got 7 of type int",
        "outputs_with_grads has position 6, but the outputs are " + outputs,
    )


def test_encoder_lengths_of_the_wrong_type():
    text = refused("apply_regular_attention", TypeError, encoder_lengths=3)
    assert text == (
        "apply_regular_attention: encoder_lengths must be a blob, its name, or None for full length; got 3 of type int"
    )


@pytest.mark.parametrize(
    "name, blob",
    [
        ("MILSTM", "s/mi_gates_t"),
        ("GRU", "s/joined_gates_t"),
        ("LSTMWithAttention", "s/attention_weights"),
        ("GRU", "s/hidden_t_grad"),
    ],
)
def test_blob_of_the_net_with_the_name_of_a_steps(name, blob):
    """What fails in the loop takes back what was built before it."""
    model = ModelHelper("model")
    model.net.AddExternalInput(blob)
    text = refused(name, ValueError, model=model)
    assert text == (
        "{}: the step net computes or receives '{}', of which net '{}' has a blob of the same name; all steps would "
        "share that one: rename the blob of the net, or build the layer under another scope".format(
            name, blob, model.net.Name()
        )
    )


def test_names_are_under_the_name_scope():
    with core.NameScope("a"):
        outputs = LSTMWithAttention(ModelHelper("model"), **DECODER)
    assert [str(blob) for blob in outputs][-2:] == [
        "a/s/attention_weighted_encoder_context_all",
        "a/s/attention_weighted_encoder_context_last",
    ]
