"""Errors of the backward pass: steps without gradients, recomputing, AddGradientOperators, check_gradients."""

import re

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

import comparing
import step_nets
from caffe2_recurrent import LSTM, check_gradients, cudnn_LSTM, optimize, recurrent_net
from caffe2_recurrent.backward.gradient_maker import make_gradient
from cells import CELLS
from errors_support import CALLS, Loop, call_lstm, listed, snapshot

WITHOUT = "; pass forward_only=True if none is needed, or put StopGradient after it"


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


def test_a_part_without_a_gradient_that_is_overwritten():
    """Its gradient is zeros of its shape, which may have become another."""

    def build(cell, x, h):
        first, second = cell.Split(x, ["first", "second"], axis=2)
        cell.Tanh(cell.Mul([first, h], "product"), "h_t")
        cell.Sigmoid(second, "seen")
        cell.Copy(h, second)

    text = Loop(build).refused(ValueError)
    assert text.startswith(
        CALLS + "the gradient of step operator 0 (Split, writing 'first', 'second') cannot be derived: "
    )
    assert '"second" at version 0' in text


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


@pytest.mark.parametrize("kind, result", [("Copy", "rows_of"), ("Sqr", "rows_of"), ("Sqr", "table_t")])
def test_sparse_gradient_of_a_blob_that_the_step_computes(kind, result):
    """Also of one that is made in place."""

    def step(cell, x, h):
        table, rows = cell.AddExternalInputs("table", "rows")
        getattr(cell, kind)(cell.Scale(table, "table_t", scale=2.0), result)
        gathered = cell.Gather([result, rows], "gathered")
        cell.Sum([cell.ExpandDims(gathered, "gathered_t", dims=[0]), h], "h_t")

    assert (
        "step operator 1 ({0}, writing '{1}') passes no sparse gradient back, and that of '{1}' is one, as it is read "
        "row by row; read rows of a blob that the step does not compute".format(kind, result)
    ) in Loop(step).refused(ValueError)


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
    assert text.endswith("not all grad ops have the same device option")


UNREAD = "step operator {} (StopGradient) writes '{}', which nothing reads; read it, or stop the gradient in place"


def test_stop_gradient_that_nobody_reads():
    """Caffe2 takes it for a slip: what was to be stopped goes on through the unstopped blob."""

    def build(cell, x, h):
        y = cell.Mul([x, h], "y")
        cell.StopGradient(y, "stopped")
        cell.StopGradient(x, "held")
        cell.Tanh(y, "h_t")

    loop = Loop(build)
    assert loop.refused(ValueError) == listed("recurrent_net", UNREAD.format(1, "stopped"), UNREAD.format(2, "held"))
    assert len(loop.call(forward_only=True)) == 2


def test_unread_stop_gradient_and_a_missing_gradient_in_one_error():
    def build(cell, x, h):
        cell.StopGradient(x, "stopped")
        cell.Mul([cell.Floor(x, "down"), h], "h_t")

    assert Loop(build).refused(ValueError) == listed(
        "recurrent_net",
        UNREAD.format(0, "stopped"),
        "step operator 1 (Floor, writing 'down') has no gradient" + WITHOUT,
    )


@pytest.mark.parametrize("positions", [(0,), (0, 1), "auto"], ids=str)
def test_gradient_stops_at_a_stopped_state_output(positions):
    """The loop goes on in the net: only its own inputs get no gradient."""

    def build(cell, x, h):
        cell.StopGradient(cell.Mul([x, h], "xh"), "h_t")

    loop = Loop(build)
    outputs = loop.call(outputs_with_grads=positions)
    before = len(loop.net.Proto().op)
    found = loop.net.AddGradientOperators(list(outputs))
    assert sorted(map(str, found)) == ["h_t_all", "h_t_last"]
    assert {operator.type for operator in loop.net.Proto().op[before:]} == {"ConstantFill"}


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_gradient_stops_at_one_stopped_state_output_of_two(executor):
    make = step_nets.Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    make.link(a, make.cell.StopGradient(make.cell.Mul([x, a], "xa"), "a_t"))
    make.link(b, make.cell.Tanh(make.cell.Mul([x, b], "xb"), "b_t"))
    step_net = make.done(outputs_with_grads=(2,))
    step_net.stopped = ("a_initial",)
    comparing.assert_right(recurrent_net, step_net, executor=executor)


def test_reader_without_a_gradient_before_a_sum_in_place():
    """`y_grad` also stands for v's and w's gradients, unless a reader of the old y overwrites it; Floor may or not."""

    def build(cell, x, h):
        cell.AddExternalInput("v", "w")
        y = cell.Mul([x, h], "y")
        cell.Floor(y, "down")
        cell.Sum([y, "v", "w"], [y])
        cell.Mul([y, "down"], "h_t")

    text = Loop(build).refused(ValueError)
    assert text == CALLS + "step operator 1 (Floor, writing 'down') has no gradient" + WITHOUT


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_own_gradient_of_a_sequence_whose_name_is_taken(executor):
    """`y_grad` is the gradient of both sequences, and `x_t_grad` that of x_t's second value."""
    make = step_nets.Maker()
    u, x, h = make.sequence("u_t"), make.sequence(), make.state()
    make.cell.Tanh(make.cell.Sum([x, u], "y"), x)
    make.link(h, make.cell.Mul([x, h], "h_t"))
    step_net = make.done()
    comparing.assert_right(recurrent_net, step_net, executor=executor)
    net, _ = comparing.build(recurrent_net, step_net)
    links = next(argument for argument in net.Proto().op[0].arg if argument.name == "backward_link_internal")
    assert list(links.strings)[2:] == [b"y_grad", b"x_t_grad_own"]


def test_copied_gradient_stays_on_the_device_of_its_operator():
    device = core.DeviceOption(caffe2_pb2.CUDA, 1)

    def build(cell, x, h):
        (c,) = cell.AddScopedExternalInputs("c_prev")
        with core.DeviceScope(device):
            cell.Mul([x, h], "h_t")
            cell.Sum(["h_t", c], "c_t")

    loop = Loop(build)
    loop.call(initial_cell_inputs=[("h_prev", "H"), ("c_prev", "C")], links={"h_prev": "h_t", "c_prev": "c_t"})
    (step,) = [argument.n for argument in loop.net.Proto().op[0].arg if argument.name == "backward_step_net"]
    copies = [operator for operator in step.op if operator.type == "Copy"]
    assert copies and all(operator.device_option == device for operator in copies)


def nested(innermost_outputs):
    """A step that runs a loop of its own and goes on with the last value."""
    innermost = core.Net("innermost")
    a, b = innermost.AddExternalInput("a_t", "b_prev")
    innermost.Mul([a, b], "b_t")

    def build(cell, x, h):
        outputs = recurrent_net(cell, innermost, [(a, x)], [(b, h)], {b: "b_t"}, **innermost_outputs)
        cell.Copy(outputs[1], "h_t")

    return build


@pytest.mark.parametrize(
    "options, reason",
    [
        (
            {},
            "gradient of the RecurrentNetwork in 'inner': outputs_with_grads lists position 0, 'b_t_all', "
            "but no gradient reaches it; one reaches 'b_t_last': pass (1,) or 'auto'",
        ),
        (
            {"outputs_with_grads": ()},
            "gradient of the RecurrentNetwork in 'inner': outputs_with_grads is empty, but a gradient reaches "
            "'b_t_last'; list positions (1,) or pass 'auto'",
        ),
        (
            {"forward_only": True},
            "a gradient reaches the output 'b_t_last' of a RecurrentNetwork without a backward step; build it without "
            "forward_only, optimize it after AddGradientOperators, or put StopGradient after it",
        ),
    ],
    ids=["listed", "none", "forward_only"],
)
def test_loop_within_a_step_says_why_it_has_no_gradient(options, reason):
    text = Loop(nested(dict(options, scope="inner"))).refused(ValueError)
    assert text == CALLS + (
        "the gradient of step operator 0 (RecurrentNetwork, writing 'b_t_all', 'b_t_last', 'inner/step_workspaces') "
        "cannot be derived: " + reason
    )


@pytest.mark.parametrize("positions", [(1,), "auto"], ids=str)
def test_loop_within_a_step_with_a_gradient(positions):
    assert len(Loop(nested({"outputs_with_grads": positions})).call()) == 2


@pytest.mark.parametrize(
    "error, shown",
    [
        (KeyError("h_t"), "'h_t'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("\nfirst line\nsecond line"), "first line"),
    ],
    ids=["KeyError", "no text", "several lines"],
)
def test_caffe2s_gradient_pass_fails_in_an_unexpected_way(monkeypatch, error, shown):
    def fail(representation, outputs):
        raise error

    loop = Loop()
    with monkeypatch.context() as planted:
        planted.setattr(core.IR, "GetBackwardPass", fail)
        before = snapshot(loop.net), snapshot(loop.cell)
        with pytest.raises(ValueError) as caught:
            loop.call()
    assert type(caught.value) is ValueError
    assert str(caught.value) == CALLS + "Caffe2's gradient pass over the step fails: " + shown
    assert (snapshot(loop.net), snapshot(loop.cell)) == before
    assert len(loop.call()) == 2


def test_gradient_pass_that_fails_after_a_known_fault_shows_the_fault_alone(monkeypatch):
    """What went wrong later may be but a consequence of it."""
    accumulate = core.IR.DoGradientAccumulation

    def fail(representation, index):
        if index == 0:
            raise KeyError("led astray")
        return accumulate(representation, index)

    def build(cell, x, h):
        cell.Tanh(x, "tx")
        cell.Mul([cell.Floor("tx", "down"), h], "h_t")

    loop = Loop(build)
    monkeypatch.setattr(core.IR, "DoGradientAccumulation", fail)
    with pytest.raises(ValueError) as caught:
        loop.call()
    assert str(caught.value) == CALLS + "step operator 1 (Floor, writing 'down') has no gradient" + WITHOUT


def test_gradient_operator_that_raises_without_a_text(monkeypatch):
    def fail(operator, gradients):
        raise ValueError()

    monkeypatch.setattr(core.GradientRegistry, "GetGradientForOp", fail)
    with pytest.raises(ValueError) as caught:
        Loop().call()
    assert str(caught.value) == CALLS + (
        "the gradient of step operator 0 (Mul, writing 'h_t') cannot be derived: ValueError"
    )


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


def shown(cell, x, h):
    cell.Mul([x, h], "z")
    cell.Alias("z", "seen")
    cell.Tanh("seen", "h_t")


@pytest.mark.parametrize("blobs", [["z"], ["z", "seen"]], ids=", ".join)
def test_recomputing_what_another_name_shows(blobs):
    """The steps of the RNN executor would write to it while another one reads it by that name."""
    text = Loop(shown).refused(ValueError, recompute_blobs_on_backward=blobs)
    assert text == CALLS + (
        "recompute_blobs_on_backward names 'z', which step operator 1 (Alias) shows as 'seen': another step might "
        "overwrite it before that is read; use Copy there"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "Float16UniformFill",
        "FloatToFusedRandRowwiseQuantized",
        "GaussianFill",
        "MSRAFill",
        "SortAndShuffle",
        "SparseDropoutWithReplacement",
        "SparseItemwiseDropoutWithReplacement",
        "UniformFill",
        "UniformIntFill",
        "UniqueUniformFill",
        "WeightedSample",
        "XavierFill",
    ],
)
def test_each_random_operator(kind):
    def build(cell, x, h):
        cell.Proto().op.extend([caffe2_pb2.OperatorDef(type=kind, input=["x_t"], output=["drawn"])])
        cell.Mul([x, h], "h_t")

    changes = {"recompute_blobs_on_backward": ["drawn"]}
    for forward_only in (False, True):
        assert Loop(build).refused(ValueError, forward_only=forward_only, **changes) == CALLS + (
            "recompute_blobs_on_backward would run step operator 0 ({}) again, which draws other numbers; "
            "keep 'drawn'".format(kind)
        )


@pytest.mark.parametrize("forward_only", [False, True], ids=["both passes", "forward_only"])
@pytest.mark.parametrize("blob", ["nowhere", "x_t", "h_prev"])
def test_recomputing_what_the_step_does_not_compute(blob, forward_only):
    text = Loop().refused(ValueError, recompute_blobs_on_backward=[blob], forward_only=forward_only)
    assert text == CALLS + (
        "recompute_blobs_on_backward names '{}', which the step does not compute; it computes 'h_t'".format(blob)
    )


def test_recomputing_an_overwritten_sequence():
    """The second run would read what the first one wrote."""

    def build(cell, x, h):
        cell.Tanh(x, x)
        cell.Tanh(cell.Mul([x, h], "z"), "h_t")

    text = Loop(build).refused(ValueError, recompute_blobs_on_backward=["x_t"])
    assert text == CALLS + (
        "recompute_blobs_on_backward names 'x_t', which the step does not compute; it computes 'z', 'h_t'"
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
        "recompute_blobs_on_backward names 'nowhere', which the step does not compute; "
        "it computes 'z', 'kept', 'mask', 'h_t', 'down', 'g_t'",
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
        "a gradient reaches the outputs 'h_t_all', 'h_t_last' of a RecurrentNetwork without a backward step; "
        "build it without forward_only, optimize it after AddGradientOperators, or put StopGradient after it"
    )
    stopped = loop.net.StopGradient(outputs[0], outputs[0])
    loop.net.AddGradientOperators([loop.net.Tanh(stopped, "after")])


def no_gradient_at(position, output):
    return (
        "outputs_with_grads lists position {}, '{}', but no gradient reaches it; one reaches 'h_t_all': pass (0,) or "
        "'auto'".format(position, output)
    )


def test_listed_position_without_a_gradient():
    loop = Loop()
    outputs = loop.call(outputs_with_grads=(0, 1))
    assert gradients_refused(loop, [outputs[0]]) == maker(loop) + no_gradient_at(1, "h_t_last")
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
        no_gradient_at(3, "c_t_last"),
        no_gradient_at(1, "h_t_last"),
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
    assert gradients_refused(loop, [outputs[0]]) == maker(loop) + no_gradient_at(1, "h_t_last")


@pytest.mark.parametrize("positions", [(0,), "auto"], ids=str)
def test_gradient_operators_stay_on_the_device_of_the_loop(positions):
    """With (0,) they come from the engine's own gradient maker, with 'auto' from ours."""
    device = core.DeviceOption(caffe2_pb2.CUDA, 1)
    loop = Loop()
    with core.DeviceScope(device):
        outputs = loop.call(outputs_with_grads=positions)
    loop.net.AddGradientOperators({outputs[0]: loop.net.AddExternalInput("seed")})
    made = loop.net.Proto().op[1:]
    assert {"RecurrentNetworkGradient"} <= {operator.type for operator in made}
    assert all(operator.device_option == device for operator in made)


@pytest.mark.parametrize("positions", ["auto", (0,), (), (1, 0)], ids=str)
def test_only_the_operators_own_output_has_a_gradient(positions):
    """Nobody has a use for one of `step_workspaces`, but whoever asks for it must not end in an engine error."""
    loop = Loop()
    loop.call(outputs_with_grads=positions)
    operator = loop.net.Proto().op[0]
    if positions in ("auto", ()):
        assert make_gradient(operator, [None, None, "step_workspaces_grad"]) == ([], [None, None])
        return
    with pytest.raises(ValueError, match="but no gradient reaches it; leave it out or pass 'auto'"):
        make_gradient(operator, [None, None, "step_workspaces_grad"])


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


@pytest.mark.parametrize("value", [["X"], "X", 3, {"X"}, ()], ids=repr)
@pytest.mark.parametrize("kind", [core.Net, ModelHelper], ids=["net", "model"])
def test_checking_with_something_else_than_a_map(kind, value):
    shown = "{!r} of type {}".format(value, type(value).__name__)
    text = "check_gradients takes the map that AddGradientOperators returned; got " + shown
    with pytest.raises(TypeError, match="^" + re.escape(text) + "$"):
        check_gradients(kind("net"), value)


def test_checking_with_an_empty_map():
    """A net without gradients of any kind drops none."""
    loop = Loop()
    loop.call()
    check_gradients(loop.net, {})
    check_gradients(loop.net, {"h_t_all": None})


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


def test_gradients_of_cudnns_last_states_are_dropped():
    model = ModelHelper("model")
    with pytest.warns(UserWarning, match="cudnn_LSTM"):
        output, hidden, cell = cudnn_LSTM(model, core.BlobReference("X"), ("H", "C"), 2, 3, "s")
    loss = model.net.Sum([model.net.SumElements(blob, str(blob) + "_sum") for blob in (output, hidden, cell)], "loss")
    with pytest.raises(ValueError) as error:
        check_gradients(model.net, model.net.AddGradientOperators([loss]))
    assert str(error.value) == (
        "check_gradients: the gradient of 's/lstm_hidden_output', 's/lstm_cell_output' is dropped; cudnn_LSTM passes "
        "back that of 's/lstm_output' alone, whose last step is the last hidden state of the last layer"
    )


@pytest.mark.parametrize("is_in_front", [False, True], ids=["behind the loop", "a copy in front of it"])
def test_a_sequence_that_steps_write_over(is_in_front):
    """The net trains by the gates in the place of what it reads; a Copy has what there was."""
    model = ModelHelper("model")
    sequence = model.net.Copy("x", "sequence")
    read = model.net.Copy(sequence, "copied") if is_in_front else sequence
    options = {"memory_optimization": True, "outputs_with_grads": "auto"}
    hidden, *_ = LSTM(model, sequence, None, ("h0", "c0"), 3, 4, "layer", **options)
    model.net.FC([read, "w", "b"], "layer/i2h_too", axis=2)
    beside = model.net.Sqr("copied" if is_in_front else "layer/i2h", "squared")
    model.AddGradientOperators([model.net.SumElements(hidden, "first"), model.net.SumElements(beside, "second")])
    if is_in_front:
        check_gradients(model)
        return
    assert check_refused(model) == (
        "check_gradients: 'layer/i2h' is read by Sqr and Mul when the steps of loop 'layer/hidden_t_all' have written "
        "over it: let a Copy in front of the loop be read, or build the loop without memory_optimization"
    )
    optimize(model, trials=False, even_if_slower=True)
    check_gradients(model)


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_nothing_is_wrong_with_a_layer(cell, remembers):
    model, outputs = (cell if remembers else cell.remembering_nothing()).build()
    model.AddGradientOperators(
        {outputs[at]: model.net.AddExternalInput("given_{}".format(at)) for at in cell.positions}
    )
    check_gradients(model)
