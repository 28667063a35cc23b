"""Attention beside what every cell must do (test_cells.py): weights, masks, step nets of one's own, names."""

import numpy as np
import pytest
from caffe2.python import core, recurrent, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
from caffe2_recurrent import (
    apply_recurrent_attention,
    apply_regular_attention,
    recurrent_net,
    retrieve_step_blobs,
)
from cells import ATTENTION_SHAPES, CELLS, RECURRENT_ATTENTION_SHAPES, D, E, N, S, T, attention

BY_NAME = {cell.name: cell for cell in CELLS}


def step_weights(model, step):
    retrieve_step_blobs(model.net, "seen")
    return workspace.FetchBlob("seen_layer/attention_weights{}".format(step))


@pytest.mark.parametrize("name", ["attention_lengths", "attention_recurrent_lengths"])
@pytest.mark.parametrize("lengths", [[0, 0], [4, 4], [1, 3]], ids=str)
def test_weights_past_the_end_of_an_encoder_sequence_are_zero(name, lengths):
    cell = BY_NAME[name].but(encoder_lengths=lengths)
    cell.assert_right()
    workspace.ResetWorkspace()
    _, _, model = cell.run()
    for step in range(T):
        weights = step_weights(model, step)
        assert weights.shape == (N, S, 1)
        for sequence, length in enumerate(lengths):
            assert (weights[sequence, length:] == 0).all()
            if length:
                assert abs(weights[sequence, :length].sum() - 1) < 1e-6


@pytest.mark.parametrize("name", ["attention_regular", "attention_recurrent"])
def test_past_the_end_of_a_decoder_sequence_the_context_is_computed_on(name):
    cell = BY_NAME[name].but(lengths=[0, T - 2])
    cell.assert_right()
    workspace.ResetWorkspace()
    outputs, _, _ = cell.run()
    hidden, _, states, _, context, last = outputs
    for values in (hidden, states):
        assert (values[:, 0] == values[0, 0]).all()
        assert (values[T - 3 :, 1] == values[T - 3, 1]).all()
    stays = name == "attention_regular"
    assert (context[1:, 0] == context[0, 0]).all() == stays
    assert (context[T - 2 :, 1] == context[T - 3, 1]).all() == stays
    assert (last == context[-1:]).all()


def test_weights_are_those_of_a_numpy_loop():
    cell = BY_NAME["attention_regular"]
    outputs, _, model = cell.run()
    for step in range(T):
        hidden = outputs[0][step].astype(np.float64)
        _, expected = attention(cell.doubles(), hidden, None, cell.options)
        comparing.assert_close(step_weights(model, step)[:, :, 0], expected, step)


def test_names_that_scripts_look_up():
    model, _ = BY_NAME["attention_recurrent"].build()
    for name in ("encoder_outputs_transposed", "weighted_encoder_outputs"):
        assert model.net.BlobIsDefined("layer/" + name)
    assert model.param_init_net.BlobIsDefined("layer/attention_zeros")
    assert "layer/attention_zeros" not in {str(blob) for blob in model.params}
    step = next(argument.n for argument in model.net.Proto().op[-1].arg if argument.name == "step_net")
    written = {blob for operator in step.op for blob in operator.output}
    assert {"layer/attention_weights", "layer/attention_weighted_encoder_context"} <= written


def test_test_model_takes_the_zeros_of_the_trained_one():
    cell = BY_NAME["attention_regular"]
    model, _ = cell.build()
    workspace.RunNetOnce(model.param_init_net)
    cell.feed()
    test, outputs = cell.but(options={"forward_only": True}).build(ModelHelper("test", init_params=False))
    assert len(test.param_init_net.Proto().op) == 0
    workspace.RunNetOnce(test.net)
    comparing.assert_close(workspace.FetchBlob(outputs[0]), cell.reference()[0], "hidden_all")


SHAPES = {"regular": ATTENTION_SHAPES, "recurrent": RECURRENT_ATTENTION_SHAPES}


# Caffe2's builder takes no state whose previous value nothing uses, as the context with regular attention.
@pytest.mark.parametrize(
    "kind, builder",
    [("regular", recurrent_net), ("recurrent", recurrent_net), ("recurrent", recurrent.recurrent_net)],
    ids=["regular", "recurrent", "recurrent with caffe2's builder"],
)
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_attention_in_a_step_net_of_ones_own(kind, builder, recompute):
    """context_t = attention(tanh(x_t + h)): the helpers serve any step, under any builder."""
    model = ModelHelper("model")
    step = ModelHelper("step", param_model=model)
    x, h, c = step.net.AddExternalInputs("x_t", "h_prev", "c_prev")
    hidden = step.net.Tanh(step.net.Sum([step.net.Tanh(x, "tx"), step.net.Sigmoid(h, "sh")], "z"), "h_t")
    if kind == "regular":
        attended = apply_regular_attention(step, E, "transposed", "weighted", hidden, D, "layer")
    else:
        attended = apply_recurrent_attention(step, E, "transposed", "weighted", hidden, D, c, "layer")
    context, weights, worth_recomputing = attended
    assert weights in worth_recomputing and context not in worth_recomputing
    step.net.AddExternalOutputs(hidden, context)
    outputs = builder(
        model.net,
        step.net,
        inputs=[(x, "X")],
        initial_cell_inputs=[(h, core.BlobReference("hidden")), (c, core.BlobReference("context"))],
        links={h: hidden, c: context},
        scope="loop",
        outputs_with_grads=(0, 2),
        recompute_blobs_on_backward=worth_recomputing if recompute else None,
    )
    cell = BY_NAME["attention_" + kind]
    values = cell.doubles()
    shapes = {"X": (T, N, D), "hidden": (1, N, D), "context": (1, N, E), "weighted": (S, N, E), "encoder": (S, N, E)}
    random = np.random.RandomState(3)
    values.update({name: random.uniform(-1, 1, size=shape) for name, shape in shapes.items()})
    workspace.RunNetOnce(model.param_init_net)
    for name, value in values.items():
        full = "layer/" + name if name in SHAPES[kind] else name
        workspace.FeedBlob(full, value.astype(np.float32))
    workspace.FeedBlob("transposed", values["encoder"].transpose(1, 2, 0).astype(np.float32))
    workspace.RunNetOnce(model.net)
    hidden_t, context_t = values["hidden"][0], values["context"][0]
    for t in range(T):
        hidden_t = np.tanh(np.tanh(values["X"][t]) + 1 / (1 + np.exp(-hidden_t)))
        context_t, _ = attention(values, hidden_t, context_t, dict(cell.options, weighted=True))
        comparing.assert_close(workspace.FetchBlob(outputs[2])[t], context_t, t)
