"""`recurrent_net` over the registry of step nets: the same operator as Caffe2's, right values and gradients."""

import contextlib

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, recurrent, workspace

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import check_gradients, recurrent_net
from every_pair import every_pair

ALL = step_nets.AS_CAFFE2 + step_nets.MENDED


def name_of(make):
    return make.__name__


@pytest.mark.parametrize("scope", [None, "loop", ""])
@pytest.mark.parametrize("name_scope", ["", "outer_scope"])
@pytest.mark.parametrize("make", step_nets.AS_CAFFE2, ids=name_of)
def test_operator_is_the_same_as_caffe2s(make, name_scope, scope):
    with core.NameScope(name_scope):
        step_net = make()
        initial = [(inner, core.ScopedBlobReference(outer)) for inner, outer in step_net.initial]
        step_net.initial = initial
        step_net.inputs = [(inner, core.ScopedBlobReference(outer)) for inner, outer in step_net.inputs]
        before = step_net.cell.Proto().SerializeToString()
        ours, our_outputs = comparing.build(recurrent_net, step_net, core.Net("outer"), scope=scope)
        assert step_net.cell.Proto().SerializeToString() == before
        theirs = core.Net("outer")
        theirs.Proto().name = ours.Name()
        _, their_outputs = comparing.build(recurrent.recurrent_net, step_net, theirs, scope=scope)
    assert comparing.differences(ours.Proto().op[0], theirs.Proto().op[0]) == []
    assert [str(blob) for blob in our_outputs] == [str(blob) for blob in their_outputs]
    assert list(ours.Proto().external_input) == list(theirs.Proto().external_input)


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
@pytest.mark.parametrize("make", ALL, ids=name_of)
def test_values_and_gradients_are_those_of_a_numpy_loop(make, executor):
    comparing.assert_right(recurrent_net, make(), executor=executor)


@pytest.mark.parametrize("make", step_nets.MENDED, ids=name_of)
def test_caffe2s_builder_fails_where_ours_differs(make):
    """Each deviation from Caffe2's operator is there because Caffe2's is wrong; otherwise it belongs to AS_CAFFE2."""
    step_net = make()
    with pytest.raises(Exception):  # noqa: B017 - a KeyError, an engine error, or a wrong gradient
        # Caffe2's links three places to one gradient. The executor binds them at once, and now and then crashes.
        comparing.assert_right(recurrent.recurrent_net, step_net, executor=False)


def test_comparison_sees_each_kind_of_difference():
    net, _ = comparing.build(recurrent_net, step_nets.lstm())
    operator = net.Proto().op[0]

    def altered(change):
        other = type(operator)()
        other.CopyFrom(operator)
        change(other)
        return comparing.differences(operator, other)

    def argument(of, name):
        return next(argument for argument in of.arg if argument.name == name)

    assert altered(lambda other: None) == []
    assert altered(lambda other: other.input.append("x")) == ["inputs"]
    assert altered(lambda other: other.output.append("x")) == ["outputs"]
    assert altered(lambda other: other.arg.add(name="extra")) == ["extra"]
    assert altered(lambda other: argument(other, "link_offset").ints.append(1)) == ["link_offset"]
    assert altered(lambda other: argument(other, "step_net").n.op[0].input.append("x")) == ["step_net"]


def test_numpy_comparison_rejects_a_gradient_five_percent_off(monkeypatch):
    step_net = step_nets.lstm()
    true = comparing.reference_gradients(step_net)

    def planted(step_net, **options):
        return dict(true, gates_w=true["gates_w"] * 1.05)

    monkeypatch.setattr(comparing, "reference_gradients", planted)
    with pytest.raises(AssertionError, match="gradient of gates_w"):
        comparing.assert_right(recurrent_net, step_net)


def test_forward_only_says_nothing_of_the_backward_pass():
    net, _ = comparing.build(recurrent_net, step_nets.lstm(forward_only=True))
    names = {argument.name for argument in net.Proto().op[0].arg}
    assert not any("backward" in name or "grad" in name or name == "param" for name in names)


def test_results_are_blobs_of_the_net():
    net, outputs = comparing.build(recurrent_net, step_nets.two_states())
    assert [str(output) for output in outputs] == ["a_t_all", "a_t_last", "b_t_all", "b_t_last"]
    assert all(isinstance(output, core.BlobReference) and output.Net() is net for output in outputs)


def test_shapes_of_the_results():
    step_net = step_nets.two_states()
    outputs, _ = comparing.run(recurrent_net, step_net)
    shapes = [output.shape for output in outputs]
    assert shapes == [(3, 2, 3), (1, 2, 3), (3, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3)], ids=["1-D", "2-D", "3-D"])
def test_initial_states_of_each_rank(shape):
    make = step_nets.Maker()
    x, h = make.sequence(), make.state(shape=shape)
    make.link(h, make.cell.Tanh(make.cell.Mul([x, make.fc(h, "u")], "xu"), "h_t"))
    comparing.assert_right(recurrent_net, make.done())


def test_of_several_initial_slices_the_first_is_read():
    step, net = core.Net("step"), core.Net("net")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    h_t = step.Add([x_t, h_prev], "h_t")
    h_all, _ = recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t})
    workspace.FeedBlob("x", np.ones((4, 2, 1), np.float32))
    workspace.FeedBlob("h0", np.array([10, 20, 30], np.float32).repeat(2).reshape(3, 2, 1))
    workspace.RunNetOnce(net)
    found = workspace.FetchBlob(h_all)
    assert found.shape == (4 + 3 - 1, 2, 1)
    assert found[:4, 0, 0].tolist() == [11, 12, 13, 14]


def test_strings_name_blobs_under_the_current_scope():
    with core.NameScope("a"):
        step_net = step_nets.product()
        step_net.inputs = [("x_t", "X")]
        step_net.initial = [("h_prev", "h_initial")]
        step_net.links = {"h_prev": "h_t"}
        net, outputs = comparing.build(recurrent_net, step_net, scope="loop")
    operator = net.Proto().op[0]
    assert list(operator.input) == ["a/X", "a/h_initial"]
    assert [str(output) for output in outputs] == ["a/h_t_all", "a/h_t_last"]
    links = next(argument for argument in operator.arg if argument.name == "link_external")
    assert links.strings[-1] == b"a/X"


def test_same_initial_blob_for_two_states_gets_both_gradients():
    step_net = step_nets.state_read_by_another()
    step_net.initial = [(inner, "a_initial") for inner, _ in step_net.initial]
    del step_net.outer["b_initial"]
    comparing.assert_right(recurrent_net, step_net)
    comparing.assert_right(recurrent_net, step_net, outputs_with_grads="auto")


SEEN_TWICE = {
    "both have a gradient": lambda cell, x, y, h: cell.Mul([cell.Tanh(x, "t"), cell.Sum([y, h], "yh")], "h_t"),
    "both have the same gradient": lambda cell, x, y, h: cell.Tanh(cell.Sum([x, y, h], "xyh"), "h_t"),
    "the first has none": lambda cell, x, y, h: cell.Mul([cell.StopGradient(x, "s"), cell.Sum([y, h], "yh")], "h_t"),
    "the second has none": lambda cell, x, y, h: cell.Mul([cell.StopGradient(y, "s"), cell.Sum([x, h], "xh")], "h_t"),
    "neither has one": lambda cell, x, y, h: cell.Tanh(
        cell.Sum([cell.StopGradient(cell.Mul([x, y], "xy"), "s"), h], "xyh"), "h_t"
    ),
}


def seen_twice(step, others):
    """A step net that sees X as two blobs, and the same one that sees X and Y, which hold the same."""
    for is_one in (True, False):
        make = step_nets.Maker()
        x, y = make.sequence("x_t"), make.sequence("y_t")
        for _ in range(others):
            y = make.cell.Sum([y, make.sequence("z_t")], "yz")
        h = make.state()
        make.link(h, step(make.cell, x, y, h))
        step_net = make.done()
        step_net.outer["Y"] = step_net.outer["X"]
        if is_one:
            step_net.inputs = [(inner, "X" if outer == "Y" else outer) for inner, outer in step_net.inputs]
            del step_net.outer["Y"]
        yield step_net


@every_pair
@pytest.mark.parametrize("rewrite", [None, support.Optimised()], ids=["as built", "optimised"])
@pytest.mark.parametrize("outputs_with_grads", [(0,), "auto"])
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with another sequence"])
@pytest.mark.parametrize("step", SEEN_TWICE.values(), ids=list(SEEN_TWICE))
def test_a_sequence_that_the_step_sees_as_two_blobs_gets_both_gradients(step, others, outputs_with_grads, rewrite):
    once, apart = seen_twice(step, others)
    found, expected = (
        comparing.run(recurrent_net, step_net, rewrite=change, outputs_with_grads=outputs_with_grads)
        for step_net, change in ((once, rewrite), (apart, None))
    )
    # Of a lone sequence the engine has a gradient always.
    if "X" in found[1]:
        expected[1]["X"] = sum(expected[1].pop(blob, np.zeros_like(once.outer["X"])) for blob in ("X", "Y"))
    support.assert_same(found, expected)
    net, _ = comparing.build(recurrent_net, once)
    assert list(net.Proto().op[0].input).count("X") == 1


def split(used, size=2):
    """A step that makes something of some of the three parts of a sequence, and of a state."""
    make = step_nets.Maker()
    x, h = make.sequence(size=3 * size), make.state(size=3 * size)
    parts = [make.cell.Split(blob, [name + part for part in "abc"], axis=2) for blob, name in ((x, "x_"), (h, "h_"))]
    total = make.cell.Sum([blobs[index] for blobs in parts for index in used], "total")
    both, _ = make.cell.Concat([make.cell.Tanh(total, "t")] * 3, ["h_t", "widths"], axis=2)
    make.link(h, both)
    return make.done()


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("rewrite", [None, support.Optimised()], ids=["as built", "optimised"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_parts_of_which_nothing_is_made_have_gradients_of_zeros(used, rewrite, recomputed):
    step_net = split(used)
    options = {"recompute_blobs_on_backward": ["x_a", "x_b", "x_c", "total"]} if recomputed else {}
    found = comparing.run(recurrent_net, step_net, rewrite=rewrite, **options)
    comparing.assert_outputs_and_gradients(step_net, *found)


@pytest.mark.parametrize("rewrite", [None, support.Optimised()], ids=["as built", "optimised"])
@pytest.mark.parametrize("lengths", [False, True], ids=["all steps", "lengths"])
@pytest.mark.parametrize("used", [0, 1], ids=["hidden", "cell"])
def test_a_state_of_a_unit_of_which_nothing_is_made_has_a_gradient_of_zeros(used, lengths, rewrite):
    make = step_nets.Maker()
    timestep = make.cell.AddExternalInput("timestep")
    x, h = make.sequence(size=4 * step_nets.D), make.state()
    inputs = [h, make.cell.Tanh(h, "c"), x]
    if lengths:
        inputs.append(make.cell.AddExternalInput("lengths"))
        make.outer["lengths"] = np.array([step_nets.T, 1], dtype=np.int32)
    outputs = make.cell.LSTMUnit([*inputs, timestep], ["hidden_t", "cell_t"], sequence_lengths=lengths)
    make.link(h, outputs[used])
    step_net = make.done(timestep)
    found = comparing.run(recurrent_net, step_net, rewrite=rewrite)
    comparing.assert_outputs_and_gradients(step_net, *found)


def test_caffe2_leaves_such_gradients_out():
    """What it joins is no wider than the part that is used, and the gradient of the sequence has three parts."""
    for builder, parts in ((recurrent.recurrent_net, 1), (recurrent_net, 3)):
        net, _ = comparing.build(builder, split((0,)))
        backward = support.argument(net.Proto().op[0], "backward_step_net").n
        joined = [len(operator.input) for operator in backward.op if operator.type == "Concat"]
        assert joined == [parts] * 2


def test_undeclared_state_output_still_passes_its_gradient():
    step_net = step_nets.product()
    del step_net.cell.Proto().external_output[:]
    comparing.assert_right(recurrent_net, step_net)


def test_a_step_without_any_gradient_stops_the_gradient():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.cell.StopGradient(make.cell.Mul([x, h], "xh"), "stopped"), "h_t"))
    net, outputs = comparing.build(recurrent_net, make.done())
    assert "backward_step_net" not in {argument.name for argument in net.Proto().op[0].arg}
    gradients = net.AddGradientOperators([outputs[0]])
    assert "X" not in gradients
    # Nothing has been dropped that would go anywhere.
    check_gradients(net, gradients)


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_sizes_may_change_from_run_to_run(executor):
    step_net = step_nets.lstm()
    net, outputs = comparing.build(recurrent_net, step_net)
    workspace.FeedBlob("seed", np.zeros((1, 1, 1), dtype=np.float32))
    found = net.AddGradientOperators({outputs[0]: net.AddExternalInput("seed")})
    comparing.configure(net, executor)
    random = np.random.RandomState(1)
    created = False
    for steps, batch in [(4, 2), (1, 3), (7, 1), (2, 2)]:
        step_net.outer["GATES_IN"] = random.randn(steps, batch, 12).astype(np.float32)
        step_net.outer["hidden_initial"] = random.randn(batch, 3).astype(np.float32)
        step_net.outer["cell_initial"] = random.randn(batch, 3).astype(np.float32)
        step_net.outer["lengths"] = random.randint(0, steps + 1, size=batch).astype(np.int32)
        for name, value in step_net.outer.items():
            workspace.FeedBlob(name, value)
        reference = comparing.reference_outputs(step_net)
        seed = comparing.output_gradients(step_net, {}, reference)[0]
        workspace.FeedBlob("seed", seed.astype(np.float32))
        if not created:
            workspace.CreateNet(net)
            created = True
        workspace.RunNet(net)
        for output, expected in zip(outputs, reference):
            comparing.assert_close(workspace.FetchBlob(output), expected, output)
        for name, expected in comparing.reference_gradients(step_net).items():
            comparing.assert_close(workspace.FetchBlob(str(found[name])), expected, name)


def test_immediate_mode_runs_the_operator_as_it_is_made():
    step_net = step_nets.product()
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    workspace.StartImmediate()
    try:
        for name, value in step_net.outer.items():
            workspace.FeedImmediate(name, value)
        _, outputs = comparing.build(recurrent_net, step_net)
        found = workspace.FetchImmediate(str(outputs[0]))
    finally:
        workspace.StopImmediate()
    comparing.assert_close(found, comparing.reference_outputs(step_net)[0], "h_t_all")


def recomputed_without_a_reader(function):
    """`extra` comes from references alone and nothing reads it, so nothing makes one step wait for another."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    w = make.reference("w", 1, step_nets.N, step_nets.D)
    function(make, w)
    make.link(h, make.cell.Tanh(make.cell.Mul([x, h], "xh"), "h_t"))
    return make.done(recompute_blobs_on_backward=["extra", "xh"])


@pytest.mark.parametrize(
    "function, shared",
    [
        (lambda make, w: make.cell.Scale([w], ["extra"], scale=2.0), ["xh"]),
        (lambda make, w: make.cell.Tanh(make.cell.Scale([w], ["extra"], scale=2.0), "reads"), ["extra", "xh"]),
    ],
    ids=["unread", "read"],
)
def test_steps_share_a_recomputed_blob_only_where_the_executor_makes_them_wait(function, shared):
    step_net = recomputed_without_a_reader(function)
    net, _ = comparing.build(recurrent_net, step_net)
    argument = next(item for item in net.Proto().op[0].arg if item.name == "recompute_blobs_on_backward")
    assert [blob.decode() for blob in argument.strings] == shared
    comparing.assert_right(recurrent_net, step_net)


@pytest.mark.parametrize("name", ["X_grad", "h_initial_grad", "loop/h_prev_states_grad"])
def test_names_of_gradients_are_free_where_there_are_none(name):
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Mul([make.cell.Tanh(x, name), h], "h_t"))
    comparing.assert_right(recurrent_net, make.done(), scope="loop", forward_only=True)


def test_what_is_put_in_beside_a_step_is_on_the_device_of_the_step_or_of_the_scope():
    device, other = (core.DeviceOption(caffe2_pb2.CPU, extra_info=[text]) for text in ("scope", "step"))
    found = []
    for of_step in (None, other):
        with core.DeviceScope(of_step) if of_step is not None else contextlib.nullcontext():
            step_net = step_nets.sum_of_both_inputs()
        with core.DeviceScope(device):
            net, _ = comparing.build(recurrent_net, step_net)
        (step,) = [argument.n for argument in net.Proto().op[-1].arg if argument.name == "backward_step_net"]
        (copy,) = [operator for operator in step.op if operator.type == "Copy"]
        found.append(list(copy.device_option.extra_info))
    assert found == [["scope"], ["step"]]


@pytest.mark.parametrize("is_read_by_a_net", [False, True])
def test_what_is_called_like_a_state_output_has_a_name_of_its_own(is_read_by_a_net):
    """But where a net of an operator might read it by its name."""
    cell = core.Net("step")
    x, h = cell.AddExternalInputs("x_t", "h")
    cell.Tanh(x, "h_t")
    cell.Sigmoid("h_t", "h_t")
    cell.Negative("h_t", "z")
    if is_read_by_a_net:
        inner = caffe2_pb2.NetDef(op=[core.CreateOperator("Copy", ["h_t"], ["y"])])
        cell.If(["condition"], ["y"], then_net=inner)
    cell.Mul(["z", h], "h_t")
    cell.Tanh("h_t", "h_t")
    net = core.Net("outer")
    recurrent_net(net, cell, [("x_t", "x")], [("h", "h0")], {"h": "h_t"}, forward_only=True)
    (step,) = [argument.n for argument in net.Proto().op[-1].arg if argument.name == "step_net"]
    name = "h_t" if is_read_by_a_net else "h_t_earlier"
    assert [list(operator.output) for operator in step.op if operator.type != "If"] == [
        [name],
        [name],
        ["z"],
        ["h_t"],
        ["h_t"],
    ]
    assert list(step.op[2].input) == [name]


def test_what_nothing_reads_has_a_name_of_its_own():
    """In place, or read by a net of an operator that need not list it, a blob keeps its name."""
    cell = core.Net("step")
    x, h = cell.AddExternalInputs("x_t", "h")
    cell.Tanh(x, "z")
    cell.Relu(x, "z")
    cell.Sigmoid(x, "z")
    cell.Sigmoid("z", "z")
    cell.Tanh(x, "z")
    inner = caffe2_pb2.NetDef(op=[core.CreateOperator("Copy", ["z"], ["y"])])
    cell.If(["condition"], ["y"], then_net=inner)
    cell.Tanh(x, "z")
    cell.Add(["z", h], "h_t")
    before = cell.Proto().SerializeToString()
    net = core.Net("outer")
    recurrent_net(net, cell, [("x_t", "x")], [("h", "h0")], {"h": "h_t"}, forward_only=True)
    (step,) = [given.n for given in net.Proto().op[0].arg if given.name == "step_net"]
    written = [blob for operator in step.op for blob in operator.output]
    assert written == ["z_unread", "z_unread_unread", "z", "z", "z", "y", "z", "h_t"]
    assert cell.Proto().SerializeToString() == before
