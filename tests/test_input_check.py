"""`check_inputs`: what it says of each thing that is wrong with what is fed, and that it says nothing of the rest."""

import warnings

import numpy as np
import pytest
from caffe2.python import core, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import cells
import comparing
import rewritten_loops
import step_nets
import viewing_support as support
from caffe2_recurrent import GRU, LSTM, MILSTM, LSTMWithAttention, check_inputs, optimize, recurrent_net
from errors_support import listed, snapshot
from every_pair import every_pair
from workspace_contents import contents

T, N, D_IN, D = 5, 2, 3, 4


def ones(*shape):
    return np.ones(shape, dtype=np.float32)


FED = {
    "x": ones(T, N, D_IN),
    "h0": ones(N, D),
    "c0": ones(N, D),
    "lengths": np.array([5, 3], dtype=np.int32),
    "encoder": ones(7, N, 6),
    "context0": ones(N, 6),
    "encoder_lengths": np.array([7, 2], dtype=np.int32),
    "table": ones(9, D_IN),
}


def lstm(model):
    return LSTM(model, "x", "lengths", ("h0", "c0"), D_IN, D, "lstm")


def attention(model):
    states = ("h0", "c0", "context0")
    options = {"encoder_lengths": "encoder_lengths", "outputs_with_grads": (0,)}
    return LSTMWithAttention(model, "x", "lengths", *states, 6, "encoder", D_IN, D, "dec", **options)


def embedding(model):
    return LSTM(model, model.net.Gather(["table", "x"], "embedded"), "lengths", ("h0", "c0"), D_IN, D, "lstm")


def two_layers(model):
    return LSTM(model, "x", "lengths", ("h0", "c0", "h1", "c1"), D_IN, [D, D], "lstm", bidirectional=False)


def built(build=lstm, init=True, **changes):
    model = ModelHelper("model")
    outputs = build(model)
    model.AddGradientOperators([outputs[0]])
    if init:
        workspace.RunNetOnce(model.param_init_net)
    for name, value in {**FED, **changes}.items():
        if value is not None:
            workspace.FeedBlob(name, value)
    return model


def refused(build=lstm, **changes):
    """The text of the error; the net and the blobs are as they were."""
    model = built(build, **changes)
    before = snapshot(model.net), contents()
    with pytest.raises(ValueError) as caught:
        check_inputs(model)
    assert (snapshot(model.net), contents()) == before
    return str(caught.value)


FORMS = "must be [4], [2, 4] or [1, 2, 4], as "
BY_WEIGHTS = FORMS + "a step multiplies it by 'lstm/gates_t_w' (16, 4); got "
BY_UNIT = FORMS + "LSTMUnit reads it with 'lstm/gates_t' of 16 columns; got "
LENGTHS = "'lengths' must be int32 [2], a length from 0 to 5 for each sequence of 'x' (5, 2, 3); got "
TURNED = "is taken for 2 steps of 5 sequences, but there are 2 by 'h0' (2, 4), 'c0' (2, 4), 'lengths' (2,); "
TURN = "is it [N, T, ...]? Then feed it as np.swapaxes(value, 0, 1)"
MISSING = "; to be fed, or made by another net, before this one runs"

WRONG = {
    "input in two dimensions": (
        {"x": ones(T, D_IN)},
        "'x' must have 3 dimensions or more, as FC makes 'lstm/i2h' of it; got (5, 3)",
    ),
    "input of another size": (
        {"x": ones(T, N, 7)},
        "'x' (5, 2, 7) and 'lstm/i2h_w' (16, 3), of which FC makes 'lstm/i2h', do not fit: 7 and 3 columns",
    ),
    "input of doubles": ({"x": np.ones((T, N, D_IN))}, "'x' must be float32; got float64"),
    "input of whole numbers": ({"x": np.ones((T, N, D_IN), int)}, "'x' must be float32; got int64"),
    "input batch first": ({"x": ones(N, T, D_IN)}, "'x' (2, 5, 3) " + TURNED + TURN),
    "no sequences": ({"x": ones(T, 0, D_IN)}, "'x' (5, 0, 3) has no sequences; the engine takes one or more"),
    "state of doubles": ({"h0": np.ones((N, D))}, "'h0' must be float32; got float64"),
    "hidden of another size": ({"h0": ones(N, 7)}, "'h0' " + BY_WEIGHTS + "(2, 7)"),
    "cell of another size": ({"c0": ones(7)}, "'c0' " + BY_UNIT + "(7,)"),
    "another number of states": ({"h0": ones(3, D)}, "'h0' " + FORMS + "'x' (5, 2, 3) is of 2 sequences; got (3, 4)"),
    "states of all layers": (
        {"c0": ones(2, N, D)},
        "'c0' "
        + FORMS
        + "steps read the first of several slices alone; got (2, 2, 4); give each layer a blob of its own",
    ),
    "a state without dimensions": ({"h0": ones()}, "'h0' must be [D], [2, D] or [1, 2, D]; got ()"),
    "a state of too many": ({"h0": ones(1, 1, N, D)}, "'h0' must be [4], [2, 4] or [1, 2, 4]; got (1, 1, 2, 4)"),
    "lengths of 64 bits": (
        {"lengths": np.array([5, 3])},
        LENGTHS + "int64 (2,); feed it as value.astype(np.int32)",
    ),
    "too many lengths": ({"lengths": np.array([5, 3, 1], np.int32)}, LENGTHS + "int32 (3,)"),
    "lengths beyond the steps": ({"lengths": np.array([9, -1], np.int32)}, LENGTHS + "9, -1"),
    "no input": ({"x": None}, "the workspace has no 'x'" + MISSING),
    "no lengths": ({"lengths": None}, "the workspace has no 'lengths'" + MISSING),
    "no parameters": (
        {"init": False},
        "the workspace has no 'lstm/i2h_w', 'lstm/i2h_b', 'lstm/gates_t_w', 'lstm/gates_t_b'; to be made by "
        "param_init_net, so run it",
    ),
}


@pytest.mark.parametrize("changes, text", WRONG.values(), ids=list(WRONG))
def test_one_thing_is_wrong(changes, text, capfd):
    if "must be float32" in text:
        text += "; feed it as value.astype(np.float32)"
    capfd.readouterr()
    assert refused(**changes) == "check_inputs: " + text
    # The engine is asked for nothing that it would complain of.
    assert capfd.readouterr().err == ""


def test_everything_is_wrong():
    changes = {"x": ones(T, N, 7), "h0": ones(3, 2, 9), "c0": ones(7), "lengths": np.array([1.0])}
    assert refused(**changes) == listed(
        "check_inputs",
        "'x' (5, 2, 7) and 'lstm/i2h_w' (16, 3), of which FC makes 'lstm/i2h', do not fit: 7 and 3 columns",
        "'h0' " + FORMS + "a step multiplies it by 'lstm/gates_t_w' (16, 4), as steps read the first of several "
        "slices alone; got (3, 2, 9); give each layer a blob of its own",
        "'c0' " + BY_UNIT + "(7,)",
        LENGTHS + "float64 (1,); feed it as value.astype(np.int32)",
    )


def test_a_batch_first_input_does_not_hide_the_size_of_a_state():
    text = refused(x=ones(N, T, D_IN), h0=ones(N, 7))
    assert "'h0' must be [4], [2, 4] or [1, 2, 4], as a step multiplies it by 'lstm/gates_t_w' (16, 4); got" in text


def test_weights_left_by_another_net():
    assert refused(**{"lstm/i2h_w": ones(16, 8), "lstm/gates_t_w": ones(16, 6)}) == listed(
        "check_inputs",
        "'x' (5, 2, 3) and 'lstm/i2h_w' (16, 8), of which FC makes 'lstm/i2h', do not fit: 3 and 8 columns",
        "'lstm/gates_t_w' (16, 6) and 'lstm/gates_t' contradict each other, so no 'h0' fits: it must have 6 elements "
        "for each sequence, as a step multiplies it by 'lstm/gates_t_w' (16, 6), and 4, as LSTMUnit reads it with "
        "'lstm/gates_t' of 16 columns; feed parameters of one size",
    )


def test_the_blob_that_was_fed_is_named_whatever_is_made_of_it():
    ids = np.ones((N, T), dtype=np.int32)
    assert refused(embedding, x=ids) == "check_inputs: 'x' (2, 5) " + TURNED + TURN


def test_upper_layers():
    text = refused(two_layers, h1=ones(N, 7), c1=ones(3, D))
    assert "'h1' must be [4], [2, 4] or [1, 2, 4], as a step multiplies it by 'lstm/layer_1/gates_t_w' (16, 4)" in text
    assert "'c1' must be [4], [2, 4] or [1, 2, 4], as 'x' (5, 2, 3) is of 2 sequences; got (3, 4)" in text


@pytest.mark.parametrize("wrong", [("h0",), ("c0",), ("context0",), ("h0", "c0"), ("h0", "c0", "context0")], ids=str)
def test_states_of_attention(wrong):
    text = refused(attention, **{state: ones(N, 9) for state in wrong})
    assert text.count("must be") == len(wrong)
    for state in wrong:
        size = 6 if state == "context0" else D
        assert "'{0}' must be [{1}], [2, {1}] or [1, 2, {1}], as ".format(state, size) in text


def test_numbers_of_words_are_no_sequence():
    """As floats they would be a sequence that the step cannot look up either."""
    step = core.Net("step")
    word, h_prev, table = step.AddExternalInputs("word", "h_prev", "table")
    vector = step.Gather([table, word], "vector")
    h_t = step.Tanh(step.Sum([vector, h_prev], "sum"), "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("net")
    recurrent_net(net, step, [(word, "words")], [(h_prev, "h0")], {h_prev: h_t}, forward_only=True)
    workspace.FeedBlob("words", np.array([[1, 2], [0, 3]], dtype=np.int32))
    workspace.FeedBlob("h0", ones(N, D))
    workspace.FeedBlob("table", ones(7, D))
    with pytest.raises(ValueError) as caught:
        check_inputs(net)
    advice = "feed it as value.astype(np.float32), or look up before the loop what such numbers stand for (Gather)"
    assert str(caught.value) == "check_inputs: 'words' must be float32; got int32; " + advice


def test_lengths_of_an_encoder():
    text = "check_inputs: 'encoder_lengths' must be int32 [2], a length for each sequence of 'x' (5, 2, 3); got {}"
    assert refused(attention, encoder_lengths=np.array([7])) == text.format(
        "int64 (1,); feed it as value.astype(np.int32)"
    )
    # No position is beyond the end then.
    check_inputs(built(attention, encoder_lengths=np.array([9, 7], np.int32)))


@pytest.mark.parametrize("layer", [GRU, MILSTM], ids=lambda layer: layer.__name__)
def test_states_of_other_layers(layer):
    states = ("h0",) if layer is GRU else ("h0", "c0")
    text = refused(lambda model: layer(model, "x", "lengths", states, D_IN, D, "s"), **{s: ones(9) for s in states})
    assert text.count("must be [4], [2, 4] or [1, 2, 4], as ") == len(states)


def test_a_layer_of_caffe2():
    text = refused(lambda model: rnn_cell.LSTM(model, "x", "lengths", ("h0", "c0"), D_IN, D, "lstm"), h0=ones(9))
    assert text == "check_inputs: 'h0' " + BY_WEIGHTS + "(9,)"


def gated():
    step = core.Net("gated")
    x_t, gate_t, h_prev, w, b = step.AddExternalInputs("x_t", "gate_t", "h_prev", "w", "b")
    opened = step.Mul([step.FC([x_t, w, b], "u", axis=2), step.Sigmoid(gate_t, "open_t")], "opened")
    step.AddExternalOutput(step.Sum([h_prev, opened], "h_t"))
    net = core.Net("net")
    recurrent_net(net, step, [(x_t, "x"), (gate_t, "gate")], [(h_prev, "h0")], {h_prev: "h_t"})
    for name, value in {
        "x": ones(T, N, 3),
        "gate": ones(T, N, D),
        "h0": ones(D),
        "w": ones(D, 3),
        "b": ones(D),
    }.items():
        workspace.FeedBlob(name, value)
    return net


def test_a_step_net_of_ones_own():
    net = gated()
    check_inputs(net)
    workspace.FeedBlob("gate", ones(T - 1, N, D))
    workspace.FeedBlob("w", ones(D, 9))
    with pytest.raises(ValueError) as caught:
        check_inputs(net.Proto())
    assert str(caught.value) == listed(
        "check_inputs",
        "'x' (5, 2, 3) and 'w' (4, 9), of which FC makes 'u', do not fit: 3 and 9 columns",
        "'gate' must have 5 steps or more, as 'x' (5, 2, 3) has; got (4, 2, 4)",
    )
    workspace.FeedBlob("x", ones(T))
    with pytest.raises(ValueError, match=r"'x' must be \[T, N, \.\.\.\], as loop 'h_t_all' runs over it; got \(5,\)"):
        check_inputs(net)


def looped(make, *sequences, **fed):
    """A loop over `x` and other sequences; `make` makes the state `h0` of its step, the slices and the state before."""
    step = core.Net("step")
    inner = [step.AddExternalInput(name + "_t") for name in ("x", *sequences)]
    h_prev = step.AddExternalInput("h_prev")
    h_t = make(step, *inner, h_prev)
    step.AddExternalOutput(h_t)
    net = core.Net("net")
    recurrent_net(net, step, list(zip(inner, ("x", *sequences))), [(h_prev, "h0")], {h_prev: h_t}, forward_only=True)
    for name, value in fed.items():
        workspace.FeedBlob(name, ones(*value) if isinstance(value, tuple) else value)
    return net


def assert_runs(net, capfd):
    """Caffe2 does as asked, and nothing is found, nor printed."""
    assert workspace.RunNetOnce(net)
    capfd.readouterr()
    check_inputs(net)
    assert capfd.readouterr().err == ""


def assert_found(net, *texts):
    with pytest.raises(ValueError) as caught:
        check_inputs(net)
    assert str(caught.value) == (listed("check_inputs", *texts) if len(texts) > 1 else "check_inputs: " + texts[0])


def assert_fails(net, *texts):
    assert_found(net, *texts)
    with pytest.raises(RuntimeError):
        workspace.RunNetOnce(net)


def in_shape(*shape):
    """The sum of slice and state, in another shape."""
    return lambda step, x, h: step.Reshape(step.Add([x, h], "z"), ["h_t", "old"], shape=shape)[0]


def convolved(step, x, h):
    x, h = (step.Reshape(blob, [str(blob) + "_image", str(blob) + "_old"], shape=[-1, 2, 3, 3])[0] for blob in (x, h))
    return step.Add([step.Conv([h, "w"], "c", kernel=3, pad=1), x], "h_t")


@pytest.mark.parametrize(
    "make, fed",
    [
        (convolved, {"x": (4, 2, 18), "h0": (2, 18), "w": (2, 2, 3, 3)}),
        (in_shape(1, -1), {"x": (4, 2, 3), "h0": (2, 3)}),
        (in_shape(2, 3), {"x": (4, 2, 3), "h0": (2, 3)}),
        (in_shape(2, 3, 1), {"x": (4, 2, 3), "h0": (2, 3)}),
    ],
    ids=["images", "one row", "two dimensions", "columns of one"],
)
def test_a_state_in_another_shape(make, fed, capfd):
    assert_runs(looped(make, **fed), capfd)


@pytest.mark.parametrize("shape", [(1, 6), (2, 3), (1, 2, 3)], ids=str)
def test_a_state_that_a_step_makes_of_another_size(shape):
    net = looped(lambda step, x, h: step.Reshape(x, ["h_t", "old"], shape=shape)[0], x=(4, 2, 3), h0=(2, 5))
    assert_found(net, "'h0' must be [3], [2, 3] or [1, 2, 3], as a step makes 'h_t' of it; got (2, 5)")


def beside(operator, **arguments):
    """The state and what `operator` makes of both slices."""
    return lambda step, x, t, h: step.Add([getattr(step, operator)([x, t], "z", **arguments), h], "h_t")


@pytest.mark.parametrize(
    "shape, make",
    [
        ((5, 1, 3), beside("Add")),
        ((5, 3), beside("Mul")),
        ((5, 3), beside("Add", broadcast=1)),
        ((5, 2), beside("Mul", broadcast=1, axis=0)),
        ((5, 2, 1), beside("Mul")),
        ((5,), beside("Mul", broadcast=1)),
        ((7, 2, 3), beside("Sum")),
    ],
    ids=["one row", "no batch", "along the columns", "along the batch", "one column", "one number", "longer"],
)
def test_a_second_sequence(shape, make, capfd):
    """Shared by the batch, without a batch, or longer than the first one."""
    assert_runs(looped(make, "t", x=(5, 2, 3), t=shape, h0=(2, 3)), capfd)


def test_a_second_sequence_that_does_not_fit(capfd):
    longer = "'t' must have 5 steps or more, as 'x' (5, 2, 3) has; got "
    turned = "; is it [N, T, ...]? Then feed it as np.swapaxes(value, 0, 1)"
    misfit = "'x' (5, 2, 3) and 't' {}, of which {} makes 'z', do not fit: (1, 2, 3) and {}"
    for shape, operator, slice_shape in (
        ((5, 3, 3), "Add", (1, 3, 3)),
        ((5, 1, 3), "Sum", (1, 1, 3)),
        ((5, 2, 4), "Mul", (1, 2, 4)),
    ):
        net = looped(beside(operator), "t", x=(5, 2, 3), t=shape, h0=(2, 3))
        capfd.readouterr()
        assert_found(net, misfit.format(shape, operator, slice_shape))
        assert capfd.readouterr().err == ""
        with pytest.raises(RuntimeError):
            workspace.RunNetOnce(net)
    for shape, hint in (((4, 2, 3), ""), ((2, 5, 3), turned)):
        net = looped(beside("Add"), "t", x=(5, 2, 3), t=shape, h0=(2, 3))
        with pytest.raises(ValueError) as caught:
            check_inputs(net)
        assert longer + str(shape) + hint in str(caught.value)


@pytest.mark.parametrize(
    "arguments, shape", [({}, (4,)), ({"axis": 1}, (3,)), ({"axis": 2}, (2, 3)), ({}, (1, 1, 2, 3))]
)
def test_what_cannot_be_laid_along(arguments, shape):
    net = looped(
        lambda step, x, h: step.Add([step.Mul([x, "scale"], "z", broadcast=1, **arguments), h], "h_t"),
        x=(5, 2, 3),
        scale=shape,
        h0=(2, 3),
    )
    text = "'x' (5, 2, 3) and 'scale' {0}, of which Mul makes 'z', do not fit: (1, 2, 3) and {0}"
    assert_fails(net, text.format(shape))


def masked(step, x, h):
    scores = step.Reshape(step.Add([x, h], "z"), ["scores", "old"], shape=[-1, 3])[0]
    weights = step.SequenceMask([scores, "places"], "weights", mode="sequence", axis=1, fill_val=0.0)
    return step.Reshape(weights, ["h_t", "older"], shape=[1, -1, 6])[0]


def test_a_mask_with_several_heads(capfd):
    fed = {"x": (4, 2, 6), "h0": (2, 6)}
    for lengths in ([1, 2, 3, 3], [1, 2, 3, 3, 1]):
        assert_runs(looped(masked, places=np.array(lengths, np.int32), **fed), capfd)
    text = "'places' must be int32 [4], a length for each row of 'scores' (4, 3); got "
    assert_fails(looped(masked, places=np.array([1, 2], np.int32), **fed), text + "int32 (2,)")
    assert_fails(looped(masked, places=np.ones(4, int), **fed), text + "int64 (4,); feed it as value.astype(np.int32)")


def test_lengths_of_a_mask_of_which_nothing_is_known():
    def make(step, x, h):
        unknown = step.Slice([x, "starts", "ends"], "unknown")
        masked = step.SequenceMask([unknown, "places"], "masked", mode="sequence", axis=1, fill_val=0.0)
        return step.Add([masked, h], "h_t")

    net = looped(make, x=(4, 2, 3), h0=(2, 3))
    for name, value in (("starts", [0, 0, 0]), ("ends", [-1, -1, -1])):
        workspace.FeedBlob(name, np.array(value, dtype=np.int32))
    workspace.FeedBlob("places", np.ones(7, dtype=np.int32))
    check_inputs(net)
    workspace.FeedBlob("places", np.ones(7))
    assert_fails(net, "'places' must be int32; got float64 (7,); feed it as value.astype(np.int32)")


def test_lengths_in_any_shape(capfd):
    for lengths in (np.array([[5], [3]], np.int32), np.array([[5, 3]], np.int32)):
        assert_runs(built(lengths=lengths).net, capfd)


def test_lengths_that_turn_sequences_round_are_one_row():
    def both(model):
        return LSTM(model, "x", "lengths", ("h0", "c0") * 2, D_IN, D, "lstm", bidirectional=True)

    text = refused(both, lengths=np.array([[5], [3]], np.int32))
    assert text.endswith("for each sequence of 'x' (5, 2, 3); got int32 (2, 1)")


def elman(step, x, h):
    return step.Tanh(step.Sum([step.FC([h, "w", "b"], "u", axis=2), x], "z"), "h_t")


RIGHT = {"x": (5, 2, 3), "h0": (2, 3), "w": (3, 3), "b": (3,)}
ROWS = "'u' of 'w' (4, 3) and 'x' (5, 2, 3), of which Sum makes 'z', do not fit: (1, 2, 4) and (1, 2, 3)"


@pytest.mark.parametrize(
    "changes, texts",
    [
        ({"w": (4, 3), "b": (4,)}, [ROWS]),
        (
            {"w": (4, 3), "b": (4,), "h0": (2, 4)},
            [ROWS, "'h0' must be [3], [2, 3] or [1, 2, 3], as a step multiplies it by 'w' (4, 3); got (2, 4)"],
        ),
        (
            {"w": (4, 3), "b": (4,), "x": (5, 2, 4)},
            [
                "'w' (4, 3) and 'h_t' contradict each other, so no 'h0' fits: it must have 3 elements for each "
                "sequence, as a step multiplies it by 'w' (4, 3), and 4, as a step makes 'h_t' of it; feed parameters "
                "of one size"
            ],
        ),
        (
            {"x": (5, 2, 4)},
            ["'u' of 'w' (3, 3) and 'x' (5, 2, 4), of which Sum makes 'z', do not fit: (1, 2, 3) and (1, 2, 4)"],
        ),
        ({"b": (4,)}, ["'w' (3, 3) and 'b' (4,), of which FC makes 'u', do not fit: a bias for 3 rows must be [3]"]),
        ({"w": (9,), "b": (9,)}, ["'w' must have 2 dimensions or more, as FC makes 'u' of it; got (9,)"]),
        (
            {"b": (1, 3)},
            ["'w' (3, 3) and 'b' (1, 3), of which FC makes 'u', do not fit: a bias for 3 rows must be [3]"],
        ),
    ],
    ids=["rows", "rows and state", "rows and sequence", "a sequence", "a bias", "a weight in a row", "a bias in rows"],
)
def test_a_net_of_elman(changes, texts, capfd):
    assert_runs(looped(elman, **RIGHT), capfd)
    net = looped(elman, **changes)
    capfd.readouterr()
    assert_found(net, *texts)
    assert capfd.readouterr().err == ""
    # Where a step makes more of a state than it reads Caffe2 fails not: what is too much is lost.
    if "contradict" not in texts[0]:
        with pytest.raises(RuntimeError):
            workspace.RunNetOnce(net)


OF_LAYERS = {
    "bias in front": (LSTM, {"s/i2h_b": (12,)}, "'s/i2h_w' (16, 3) and 's/i2h_b' (12,), of which FC makes 's/i2h'"),
    "bias in a step": (
        LSTM,
        {"s/gates_t_b": (12,)},
        "'s/gates_t_w' (16, 4) and 's/gates_t_b' (12,), of which FC makes 's/gates_t'",
    ),
    "rows in front": (
        LSTM,
        {"s/i2h_w": (12, 3), "s/i2h_b": (12,)},
        "'s/gates_t' of 's/gates_t_w' (16, 4) and 's/i2h' (5, 2, 12), of which Sum makes 's/gates_t'",
    ),
    "bias of a gate": (
        GRU,
        {"s/reset_gate_t_b": (3,)},
        "'s/reset_gate_t_w' (4, 4) and 's/reset_gate_t_b' (3,), of which FC makes 's/reset_gate_t'",
    ),
    "rows of a gate": (
        GRU,
        {"s/reset_gate_t_w": (3, 4), "s/reset_gate_t_b": (3,)},
        "'s/reset_gate_t' of 's/reset_gate_t_w' (3, 4) and 's/input_reset_gate_t', of which Sum makes 's/reset_gate_t'",
    ),
    "factors": (
        MILSTM,
        {"s/alpha": (12,)},
        "'s/i2h' (5, 2, 16) and 's/alpha' (12,) and 's/beta1' (16,), of which ElementwiseLinear makes 's/mi_factor_t'",
    ),
    "what is added": (
        MILSTM,
        {"s/b": (4,)},
        "'s/i2h' (5, 2, 16) and 's/beta2' (16,) and 's/b' (4,), of which ElementwiseLinear makes 's/mi_rest_t'",
    ),
}


@pytest.mark.parametrize("layer, changes, text", OF_LAYERS.values(), ids=list(OF_LAYERS))
def test_parameters_of_layers(layer, changes, text):
    states = ("h0",) if layer is GRU else ("h0", "c0")
    changes = {name: ones(*shape) for name, shape in changes.items()}
    found = refused(lambda model: layer(model, "x", "lengths", states, D_IN, D, "s"), **changes)
    assert found.startswith("check_inputs: " + text + ", do not fit: ")


def test_gates_that_no_state_fits():
    parameters = {"lstm/i2h_w": (18, D_IN), "lstm/i2h_b": (18,), "lstm/gates_t_w": (18, D), "lstm/gates_t_b": (18,)}
    model = built(**{name: ones(*shape) for name, shape in parameters.items()})
    assert_fails(
        model.net,
        "'lstm/gates_t' has 18 columns, of which LSTMUnit reads 4 for each element of a state; "
        "feed parameters of one size",
    )


def test_a_weight_in_a_row():
    """Nothing is said of its bias, which would fit a weight of as many rows."""
    model = built(**{"lstm/i2h_w": ones(48)})
    assert_fails(model.net, "'lstm/i2h_w' must have 2 dimensions or more, as FC makes 'lstm/i2h' of it; got (48,)")


def with_cell_state(gates, behind=lambda step, hidden, seen: hidden):
    """A net of an LSTM whose step sees the cell state times `p` too: in its `gates`, or `behind` its unit."""
    step = core.Net("step")
    x, h, c, timestep = step.AddExternalInputs("x_t", "h_prev", "c_prev", "timestep")
    seen = step.Mul([c, "p"], "seen", broadcast=1)
    product = step.FC([h, "w", "b"], "u", axis=2)
    hidden, cell = step.LSTMUnit([h, c, gates(step, product, x, seen), timestep], ["hidden", "c_t"], sequence_lengths=0)
    hidden = behind(step, hidden, seen)
    step.AddExternalOutput(hidden, cell)
    net = core.Net("net")
    states = [(h, "h0"), (c, "c0")]
    recurrent_net(net, step, [(x, "x")], states, {h: hidden, c: cell}, forward_only=True, timestep=timestep)
    fed = {"x": (5, 2, 16), "h0": (2, 4), "c0": (2, 4), "p": (4,), "w": (16, 4), "wp": (16, 4), "b": (16,)}
    for name, shape in fed.items():
        workspace.FeedBlob(name, ones(*shape))
    return net


def peepholes():
    return with_cell_state(
        lambda step, product, x, seen: step.Sum([product, x, step.FC([seen, "wp", "b"], "up", axis=2)], "gates")
    )


def shown_behind():
    return with_cell_state(
        lambda step, product, x, seen: step.Sum([product, x], "gates"),
        lambda step, hidden, seen: step.Add([hidden, seen], "h_t"),
    )


@pytest.mark.parametrize("make", [peepholes, shown_behind], ids=lambda make: make.__name__)
def test_the_state_is_named_whatever_reads_it_first(make, capfd):
    """What the unit says late in the step tells that the factor beside the state is right."""
    net = make()
    assert_runs(net, capfd)
    workspace.FeedBlob("c0", ones(2, 7))
    text = "'c0' must be [4], [2, 4] or [1, 2, 4], as LSTMUnit reads it with 'gates' of 16 columns; got (2, 7)"
    assert_fails(net, text)
    workspace.FeedBlob("c0", ones(2, 4))
    workspace.FeedBlob("p", ones(7))
    assert_fails(net, "'c0' (2, 4) and 'p' (7,), of which Mul makes 'seen', do not fit: (1, 2, 4) and (7,)")


@pytest.mark.parametrize("columns", [3, 4])
def test_images_with_their_channels_last_put_together(columns, capfd):
    """Without an axis Concat goes by the order of images."""

    def make(step, x, h):
        images = [
            step.Reshape(blob, [str(blob) + "_image", str(blob) + "_old"], shape=[1, 1, 2, -1])[0] for blob in (x, h)
        ]
        joined, _ = step.Concat(images, ["joined", "sizes"], order="NHWC")
        own = step.Slice(joined, "own", starts=[0, 0, 0, 0], ends=[-1, -1, -1, 3])
        return step.Reshape(own, ["h_t", "old"], shape=[1, 2, 3])[0]

    assert_runs(looped(make, x=(4, 2, columns), h0=(2, 3)), capfd)


def test_a_product_of_what_has_too_few_dimensions():
    net = looped(
        lambda step, x, h: step.FC([step.Squeeze(step.Add([x, h], "z"), "q", dims=[0]), "w", "b"], "h_t", axis=2),
        x=(4, 2, 3),
        h0=(2, 3),
        w=(3, 3),
        b=(3,),
    )
    assert_fails(net, "'q' must have 3 dimensions or more, as FC makes 'h_t' of it; got (2, 3)")


def test_rows_of_a_weight_with_more_dimensions(capfd):
    def make(step, x, h):
        return step.Add([step.FC([x, "w", "b"], "u", axis=2, axis_w=2), h], "h_t")

    right = {"x": (4, 2, 6), "h0": (2, 3), "w": (3, 1, 6)}
    assert_runs(looped(make, b=(3,), **right), capfd)
    text = "'w' (3, 1, 6) and 'b' (1,), of which FC makes 'u', do not fit: a bias for 3 rows must be [3]"
    assert_fails(looped(make, b=(1,), **right), text)


def test_lengths_of_several_masks(capfd):
    """There is one for each row of the mask that has most."""

    def make(step, x, h):
        z = step.Add([x, h], "z")
        mask = {"mode": "sequence", "fill_val": 0.0}
        flat, _ = step.Reshape(z, ["flat", "old_z"], shape=[-1, 1])
        of_elements = step.SequenceMask([flat, "len"], "masked", axis=1, **mask)
        back, _ = step.Reshape(of_elements, ["back", "old_flat"], shape=[1, -1, 3])
        return step.Add([step.SequenceMask([z, "len"], "other", axis=2, **mask), back], "h_t")

    fed = {"x": (4, 2, 3), "h0": (2, 3)}
    assert_runs(looped(make, len=np.ones(6, np.int32), **fed), capfd)
    text = "'len' must be int32 [6], a length for each row of 'flat' (6, 1); got int32 (2,)"
    assert_fails(looped(make, len=np.ones(2, np.int32), **fed), text)


def test_a_batch_first_input_beside_a_right_one():
    """Of what does not fit because of it nothing is said."""
    net = looped(lambda step, x, t, h: step.Sum([x, t, h], "h_t"), "t", x=(2, 5, 3), t=(5, 2, 3), h0=(2, 3))
    text = (
        "'x' (2, 5, 3) is taken for 2 steps of 5 sequences, but there are 2 by 'h0' (2, 3); "
        "is it [N, T, ...]? Then feed it as np.swapaxes(value, 0, 1)"
    )
    assert_fails(net, text)


def test_what_was_fed_for_one_state_does_not_contradict_another():
    """Gates are unknown, and the hidden state is made as large as the cell was fed."""
    text = refused(c0=ones(N, 7), **{"lstm/i2h_w": ones(12, D_IN), "lstm/i2h_b": ones(12)})
    assert "contradict" not in text


def test_a_slice_of_what_there_is(capfd):
    """Caffe2 infers ten columns."""
    net = looped(
        lambda step, x, h: step.Add([step.Slice(x, "first", starts=[0, 0, 0], ends=[-1, -1, 10]), h], "h_t"),
        x=(5, 2, 3),
        h0=(2, 3),
    )
    assert_runs(net, capfd)


def test_a_batch_of_which_nothing_is_known(capfd):
    """What stands in front of the loop is of an unknown shape, and the states are the same for each sequence."""
    net = core.Net("net")
    net.Slice(["long", "starts", "ends"], "x")
    loop = looped(elman, h0=(3,), w=(3, 3), b=(3,), long=(9, 2, 3)).Proto()
    net.Proto().op.extend(loop.op)
    net.Proto().external_input.extend(blob for blob in loop.external_input if blob != "x")
    for name, value in (("starts", [0, 0, 0]), ("ends", [5, -1, -1])):
        workspace.FeedBlob(name, np.array(value, dtype=np.int32))
    assert_runs(net, capfd)
    workspace.FeedBlob("h0", ones(4))
    text = "'h0' must be [3], [N, 3] or [1, N, 3], as a step multiplies it by 'w' (3, 3); got (4,)"
    assert_fails(net, text)


def test_a_name_that_nothing_has_filled():
    net = gated()
    workspace.ResetWorkspace()
    workspace.C.Workspace.current.create_blob("x")
    with pytest.raises(ValueError, match="the workspace has no 'x', 'gate', 'h0', 'w', 'b'; to be"):
        check_inputs(net)


@pytest.mark.parametrize("value", [None, "net", 3], ids=repr)
def test_what_is_no_net(value):
    with pytest.raises(TypeError) as caught:
        check_inputs(value)
    expected = "check_inputs: model_or_net must be a ModelHelper, a core.Net or a NetDef; got {!r} of type {}"
    assert str(caught.value) == expected.format(value, type(value).__name__)


def test_a_net_without_a_loop():
    with pytest.raises(ValueError) as caught:
        check_inputs(core.Net("plain").Proto())
    assert str(caught.value).startswith("check_inputs: net 'plain")
    assert str(caught.value).endswith("' has no RecurrentNetwork operator; it has no operators")


def test_no_steps_are_right():
    check_inputs(built(x=ones(0, N, D_IN), lengths=np.zeros(N, dtype=np.int32)))


def test_what_is_right_after_a_run_and_with_other_sizes():
    model = built(two_layers, h1=ones(D), c1=ones(1, N, D))
    workspace.RunNetOnce(model.net)
    check_inputs(model)
    for name, value in {"x": ones(3, 1, D_IN), "h0": ones(D), "c0": ones(1, D), "c1": ones(D)}.items():
        workspace.FeedBlob(name, value)
    workspace.FeedBlob("lengths", np.array([2], dtype=np.int32))
    check_inputs(model)


VARIANTS = {
    "as built": lambda cell: cell,
    "with lengths": lambda cell: cell.but(lengths=[2, 3]),
    "remembering nothing": lambda cell: cell.remembering_nothing(),
    "forward only": lambda cell: cell.but(options={"forward_only": True}),
    "states [D]": lambda cell: cell.but(rank=1),
}


@every_pair
@pytest.mark.parametrize("optimised", [False, True], ids=["as built", "optimised"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_nothing_is_wrong_with_a_layer(cell, variant, optimised, backward_loops, unrolled_steps):
    cell = variant(cell)
    model = support.built_layer(cell, optimised, gradient="forward_only" not in cell.options)
    assert_passes(model.net, optimised)
    workspace.RunNetOnce(model.net)
    assert_passes(model.net, optimised)


def assert_passes(net, optimised):
    """Nothing is found; of a net that has been optimised that does not say much."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_inputs(net)
    text = (
        "check_inputs: net '{}' has been optimised, so that much that does not fit cannot be seen; "
        "check it as it was built"
    )
    assert [str(warning.message) for warning in caught] == [text.format(net.Name())] * optimised
    assert all(warning.filename == __file__ for warning in caught)


def assert_nothing_is_wrong(step_net, **options):
    workspace.ResetWorkspace()
    net, _, _ = rewritten_loops.build(step_net, **options)
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    for position, value in comparing.output_gradients(step_net, options, comparing.reference_outputs(step_net)).items():
        workspace.FeedBlob("given_gradient_{}".format(position), value.astype(np.float32))
    assert_passes(net, False)
    report = optimize(net, even_if_slower=True, trials=False)
    assert_passes(net, report.total > 0)


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_nothing_is_wrong_with_a_step_net(make):
    assert_nothing_is_wrong(make())


@given(st.integers(0, 2**20), st.integers(1, 3), st.booleans())
@settings(max_examples=25)
def test_nothing_is_wrong_with_a_random_step_net(seed, sequences, recompute):
    step_net, options = rewritten_loops.random_case(seed, sequences, recompute)
    assert_nothing_is_wrong(step_net, **options)
