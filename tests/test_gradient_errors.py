"""Errors of the backward pass: steps without gradients, recomputing, AddGradientOperators, check_gradients."""

import re

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent import check_gradients
from errors_support import CALLS, Loop, call_lstm, listed, snapshot

WITHOUT = "; pass forward_only=True if none is needed, or put StopGradient before it"


# Step operators without a gradient


def floors(cell, x, h):
    cell.Floor(x, "down")
    cell.Ceil(h, "up")
    cell.Mul(["down", "up"], "h_t")


def test_step_operator_without_a_gradient():
    def build(cell, x, h):
        cell.Mul([cell.Floor(x, "down"), h], "h_t")

    text = Loop(build).refused(ValueError)
    assert text == CALLS + "step operator 0 (Floor, writing 'down') has no gradient" + WITHOUT


def test_each_step_operator_without_a_gradient_is_named():
    text = Loop(floors).refused(ValueError)
    assert text == listed(
        "recurrent_net",
        "step operator 1 (Ceil, writing 'up') has no gradient" + WITHOUT,
        "step operator 0 (Floor, writing 'down') has no gradient" + WITHOUT,
    )


def test_operators_without_a_gradient_one_behind_the_other():
    """The second would never be asked if the pass ended at the first."""

    def build(cell, x, h):
        cell.Mul([cell.Ceil(cell.Floor(x, "down"), "up"), h], "h_t")

    text = Loop(build).refused(ValueError)
    assert text == listed(
        "recurrent_net",
        "step operator 1 (Ceil, writing 'up') has no gradient" + WITHOUT,
        "step operator 0 (Floor, writing 'down') has no gradient" + WITHOUT,
    )


def test_offered_ways_out_work():
    assert len(Loop(floors).call(forward_only=True)) == 2

    def build(cell, x, h):
        down = cell.Floor(x, "down")
        cell.Mul([cell.StopGradient(down, down), h], "h_t")

    assert len(Loop(build).call()) == 2


def test_operator_without_a_gradient_where_none_arrives():
    def build(cell, x, h):
        cell.Floor(x, "shown")
        cell.Mul([x, h], "h_t")

    assert len(Loop(build).call()) == 2


def test_operator_that_this_caffe2_does_not_have():
    def build(cell, x, h):
        cell.Proto().op.extend([caffe2_pb2.OperatorDef(type="Nonsense", input=["x_t", "h_prev"], output=["h_t"])])

    text = Loop(build).refused(ValueError)
    assert text.startswith(CALLS + "step operator 0 (Nonsense, writing 'h_t') has no gradient")


def test_operator_with_too_few_inputs():
    def build(cell, x, h):
        cell.Proto().op.extend([core.CreateOperator("Mul", ["x_t"], ["h_t"])])

    assert Loop(build).refused(ValueError) == CALLS + (
        "step operator 0 (Mul, writing 'h_t') cannot read 'x_t': that does not fit the operator's schema"
    )


def test_gradient_that_needs_an_overwritten_value():
    def build(cell, x, h):
        z = cell.Mul([x, h], "z")
        cell.Mul([z, z], "y")
        cell.Mul(["y", cell.Tanh(z, z)], "h_t")

    text = Loop(build).refused(ValueError)
    assert text.startswith(CALLS + "the gradient of step operator 1 (Mul, writing 'y') cannot be derived: ")
    assert '"z" at version 0' in text


def test_dense_and_sparse_gradient_of_one_blob():
    def build(cell, x, h):
        cell.AddExternalInput("table", "rows")
        cell.Mul([cell.Gather(["table", "rows"], "gathered"), x], "gx")
        cell.Mul(["gx", cell.Mul(["table", h], "th")], "h_t")

    text = Loop(build).refused(ValueError)
    assert text.startswith(
        CALLS + "the gradients that reach 'table', 'rows', read by step operator 0 (Gather) and others, "
        "cannot be added: "
    )
    assert "mix of sparse and dense" in text


def test_gradients_from_two_devices():
    def build(cell, x, h):
        for device, output in enumerate(["a", "b"]):
            with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, device)):
                cell.Mul([x, h], output)
        cell.Mul(["a", "b"], "h_t")

    text = Loop(build).refused(ValueError)
    assert text.startswith(
        CALLS + "the gradients that reach 'x_t', 'h_prev', read by step operator 0 (Mul) and others, cannot be added: "
    )
    assert text.endswith("not all grad ops have the same device option.")


def test_stop_gradient_that_nobody_reads():
    """Caffe2 takes it for a slip: what was to be stopped goes on through the unstopped blob."""

    def build(cell, x, h):
        cell.StopGradient(x, "stopped")
        cell.Mul([x, h], "h_t")

    assert Loop(build).refused(ValueError) == CALLS + "StopGradient's output 'stopped' is orphan."


# Recomputing


def test_partly_named_operator():
    def build(cell, x, h):
        cell.Split(cell.Mul([x, h], "z"), ["a", "b", "c"], axis=2)
        cell.Concat(["a", "b", "c"], ["h_t", "sizes"], axis=2)

    text = Loop(build).refused(ValueError, recompute_blobs_on_backward=["b"])
    assert text == CALLS + (
        "recompute_blobs_on_backward names 'b' but not 'a', 'c', written by the same step operator 1 (Split); add them"
    )


def dropout(cell, x, h):
    cell.Dropout(cell.Mul([x, h], "z"), ["kept", "mask"], ratio=0.5, is_test=0)
    cell.Tanh("kept", "h_t")


def test_random_operator():
    text = Loop(dropout).refused(ValueError, recompute_blobs_on_backward=["kept", "mask"])
    assert text == CALLS + (
        "recompute_blobs_on_backward would run step operator 1 (Dropout) again, which draws other numbers; "
        "keep 'kept', 'mask'"
    )


def test_random_operator_that_draws_nothing():
    def build(cell, x, h):
        cell.Dropout(cell.Mul([x, h], "z"), ["kept", "mask"], ratio=0.5, is_test=1)
        cell.Tanh("kept", "h_t")

    assert len(Loop(build).call(recompute_blobs_on_backward=["kept", "mask"])) == 2


def overwriting(cell, x, h):
    z = cell.Mul([x, h], "z")
    cell.Tanh(z, "a")
    cell.Mul(["a", cell.Sigmoid(z, z)], "h_t")


def test_recomputing_from_a_value_that_is_gone():
    text = Loop(overwriting).refused(ValueError, recompute_blobs_on_backward=["a"])
    assert text == CALLS + (
        "recomputing 'a' needs 'z' as step operator 1 (Tanh) read it, but a later operator overwrites it; "
        "recompute it as well, or write to another blob"
    )
    assert len(Loop(overwriting).call(recompute_blobs_on_backward=["a", "z"])) == 2


def test_faults_of_recomputing_and_of_gradients_in_one_error():
    def build(cell, x, h):
        dropout(cell, x, h)
        cell.Mul([cell.Floor("h_t", "down"), h], "g_t")

    text = Loop(build).refused(ValueError, links={"h_prev": "g_t"}, recompute_blobs_on_backward=["mask", "nowhere"])
    assert text == listed(
        "recurrent_net",
        "recompute_blobs_on_backward names 'nowhere', which no step operator writes",
        "recompute_blobs_on_backward names 'mask' but not 'kept', written by the same step operator 1 (Dropout); "
        "add them",
        "recompute_blobs_on_backward would run step operator 1 (Dropout) again, which draws other numbers; "
        "keep 'kept', 'mask'",
        "step operator 3 (Floor, writing 'down') has no gradient" + WITHOUT,
    )


# AddGradientOperators


def gradients_refused(loop, outputs):
    before = snapshot(loop.net)
    with pytest.raises(ValueError) as caught:
        loop.net.AddGradientOperators(outputs)
    assert type(caught.value) is ValueError
    assert snapshot(loop.net) == before
    return str(caught.value)


def maker(loop):
    return "gradient of the RecurrentNetwork in '{}/recurrent': ".format(loop.net.Name())


def test_gradient_of_a_forward_only_loop():
    loop = Loop()
    outputs = loop.call(forward_only=True)
    assert gradients_refused(loop, list(outputs)) == (
        "a gradient reaches 'h_t_all', 'h_t_last', outputs of a RecurrentNetwork that was built with "
        "forward_only=True; build it without, or put StopGradient after it"
    )
    stopped = loop.net.StopGradient(outputs[0], outputs[0])
    loop.net.AddGradientOperators([loop.net.Tanh(stopped, "after")])


def test_listed_position_without_a_gradient():
    loop = Loop()
    outputs = loop.call(outputs_with_grads=(0, 1))
    assert gradients_refused(loop, [outputs[0]]) == maker(loop) + (
        "outputs_with_grads lists position 1, 'h_t_last', but no gradient reaches it; leave it out or pass 'auto'"
    )
    # What the message proposes instead: nothing of the failed attempt is left in the net.
    assert "X" in loop.net.AddGradientOperators(list(outputs))


@pytest.mark.parametrize("inputs", [[("x_t", "X")], [("x_t", "X"), ("y_t", "Y")]], ids=["one", "two"])
def test_each_listed_position_without_a_gradient_is_named(inputs):
    """With several sequences the positions travel in an argument of our own."""

    def build(cell, x, h):
        cell.AddExternalInput("y_t", "c_prev")
        cell.Mul([cell.Mul([x, h], "xh"), "y_t"], "h_t")
        cell.Mul([x, "c_prev"], "c_t")

    loop = Loop(build)
    outputs = loop.call(
        inputs=inputs,
        initial_cell_inputs=[("h_prev", "H"), ("c_prev", "C")],
        links={"h_prev": "h_t", "c_prev": "c_t"},
        outputs_with_grads=(3, 0, 1),
        scope="loop",
    )
    assert gradients_refused(loop, [outputs[0]]) == listed(
        "gradient of the RecurrentNetwork in 'loop'",
        "outputs_with_grads lists position 3, 'c_t_last', but no gradient reaches it; leave it out or pass 'auto'",
        "outputs_with_grads lists position 1, 'h_t_last', but no gradient reaches it; leave it out or pass 'auto'",
    )


def test_no_position_listed():
    loop = Loop()
    outputs = loop.call(outputs_with_grads=())
    assert gradients_refused(loop, list(outputs)) == maker(loop) + (
        "outputs_with_grads is empty, but a gradient reaches 'h_t_all', 'h_t_last'; "
        "list positions (0, 1) or pass 'auto'"
    )


def test_only_an_unlisted_output_has_a_gradient():
    loop = Loop()
    outputs = loop.call(outputs_with_grads=(1,))
    assert gradients_refused(loop, [outputs[0]]) == maker(loop) + (
        "outputs_with_grads lists position 1, 'h_t_last', but no gradient reaches it; leave it out or pass 'auto'"
    )


# check_gradients


@pytest.mark.parametrize("value", [None, 3, "net", []], ids=repr)
def test_checking_what_is_no_net(value):
    text = "check_gradients takes a model or a core.Net; got {!r} of type {}".format(value, type(value).__name__)
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        check_gradients(value)


@pytest.mark.parametrize("kind", [core.Net, ModelHelper], ids=["net", "model"])
def test_checking_without_a_map_of_gradients(kind):
    value = kind("unfinished")
    name = (value.net if kind is ModelHelper else value).Name()
    text = (
        "check_gradients needs the gradients of net '{}': call AddGradientOperators first, and with a plain net pass "
        "the map it returns".format(name)
    )
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        check_gradients(value)


def check_refused(net, gradients=None):
    inner = net.net if isinstance(net, ModelHelper) else net
    before = snapshot(inner)
    with pytest.raises(ValueError) as caught:
        check_gradients(net, gradients)
    assert type(caught.value) is ValueError
    assert snapshot(inner) == before
    return str(caught.value)


def dropped(output, position, positions):
    return (
        "the gradient of '{}' (position {}) is dropped; outputs_with_grads is {}: add {} to it or pass 'auto'".format(
            output, position, positions, position
        )
    )


def misplaced(sequence):
    return (
        "the gradient of sequence '{0}' is lost: a later operator reads '{0}' too, so Caffe2 expects it in "
        "'_{0}_grad_autosplit_0' while the engine writes '{0}_grad'; give the loop a Copy of '{0}', or pass "
        "outputs_with_grads='auto'".format(sequence)
    )


def test_dropped_gradient():
    loop = Loop()
    outputs = loop.call()
    gradients = loop.net.AddGradientOperators(list(outputs))
    assert check_refused(loop.net, gradients) == "check_gradients: " + dropped("h_t_last", 1, (0,))


def test_dropped_gradient_of_a_model():
    """A model keeps the map of gradients itself."""
    model = ModelHelper("model")
    outputs = call_lstm(model)
    model.AddGradientOperators([outputs[0], outputs[3]])
    assert check_refused(model) == "check_gradients: " + dropped("s/cell_t_last", 3, (0,))


def test_misplaced_gradient():
    loop = Loop()
    outputs = loop.call()
    later = loop.net.Tanh("X", "later")
    gradients = loop.net.AddGradientOperators([outputs[0], later])
    assert check_refused(loop.net, gradients) == "check_gradients: " + misplaced("X")


def test_dropped_and_misplaced_gradients_of_two_loops():
    loop = Loop()
    outputs = loop.call() + loop.call()
    gradients = loop.net.AddGradientOperators(list(outputs))
    assert check_refused(loop.net, gradients) == listed(
        "check_gradients", dropped("h_t_last", 1, (0,)), misplaced("X"), dropped("h_t_last_1", 1, (0,))
    )


@pytest.mark.parametrize("remedy", ["listed", "auto", "copied"])
def test_what_the_errors_propose_passes(remedy):
    loop = Loop()
    positions = {"listed": (0, 1), "auto": "auto", "copied": (0, 1)}[remedy]
    sequence = loop.net.Copy("X", "X_copy") if remedy == "copied" else "X"
    outputs = list(loop.call(inputs=[("x_t", sequence)], outputs_with_grads=positions))
    if remedy != "listed":
        outputs.append(loop.net.Tanh("X", "later"))
    check_gradients(loop.net, loop.net.AddGradientOperators(outputs))


def test_loop_that_no_gradient_reaches_passes():
    loop = Loop()
    loop.call()
    gradients = loop.net.AddGradientOperators([loop.net.Tanh("X", "later")])
    check_gradients(loop.net, gradients)
