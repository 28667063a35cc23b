"""Loops among other operators of a net: several loops, what arrives at their outputs, what else reads their inputs."""

import itertools

import numpy as np
import pytest
from caffe2.python import core, recurrent, workspace

import comparing
import numpy_loop
import step_nets
from caffe2_recurrent import check_gradients, recurrent_net


def feed(values):
    for name, value in values.items():
        workspace.FeedBlob(name, value)


def total(net, blobs):
    """A scalar loss: the sum of all elements of `blobs`."""
    sums = [net.SumElements([blob], ["sum_{}".format(number)]) for number, blob in enumerate(blobs)]
    return net.Sum(sums, ["loss"]) if len(sums) > 1 else sums[0]


def run_and_fetch(net, loss, names):
    """Run `net` with its gradients; the gradients of the blobs named, and the map of all."""
    found = net.AddGradientOperators([loss])
    workspace.RunNetOnce(net)
    return {name: workspace.FetchBlob(str(found[name])) for name in names}, found


# --- the same scope or step net twice ---


def loop_with_other_output(output, function, sequence="x_t"):
    make = step_nets.Maker(seed=len(output))
    x, h = make.sequence(sequence), make.state()
    make.link(h, getattr(make.cell, function)(make.fc(make.cell.Mul([x, h], "xh"), "u"), output))
    return make.done()


def assert_two_loops_are_right(builder, scope, name_scopes=("", "")):
    net = core.Net("outer")
    first, second = loop_with_other_output("first_t", "Tanh"), loop_with_other_output("second_t", "Sigmoid", "y_t")
    outputs = []
    for step_net, name_scope in zip((first, second), name_scopes):
        step_net.inputs = [(inner, core.BlobReference(outer)) for inner, outer in step_net.inputs]
        step_net.initial = [(inner, core.BlobReference(outer)) for inner, outer in step_net.initial]
        with core.NameScope(name_scope):
            outputs.append(comparing.build(builder, step_net, net, scope=scope)[1][0])
        step_net.inputs = [(inner, str(outer)) for inner, outer in step_net.inputs]
        step_net.initial = [(inner, str(outer)) for inner, outer in step_net.initial]
    values = dict(second.outer, **first.outer)
    feed(values)
    gradients, _ = run_and_fetch(net, total(net, outputs), values)

    def loss(values):
        return sum(comparing.reference_outputs(step_net, values)[0].sum() for step_net in (first, second))

    doubles = {name: value.astype(np.float64) for name, value in values.items()}
    expected = numpy_loop.numerical_gradients(loss, doubles, list(values))
    for name, gradient in gradients.items():
        comparing.assert_close(gradient, expected[name], name)


@pytest.mark.parametrize("name_scopes", [("", ""), ("a", "b")], ids=["one name scope", "two name scopes"])
@pytest.mark.parametrize("scope", ["shared", None])
def test_loops_of_one_scope_do_not_spoil_each_other(scope, name_scopes):
    assert_two_loops_are_right(recurrent_net, scope, name_scopes)


def test_with_caffe2s_builder_loops_of_one_scope_share_a_state_blob():
    with pytest.raises(AssertionError, match="Not equal"):
        assert_two_loops_are_right(recurrent.recurrent_net, "shared", ("a", "b"))


def test_with_caffe2s_builder_loops_of_one_scope_get_no_gradients():
    with pytest.raises(RuntimeError, match="needs output .*step_workspaces.* at version 0"):
        assert_two_loops_are_right(recurrent.recurrent_net, "shared")


def test_one_step_net_may_run_over_two_sequences():
    net = core.Net("outer")
    step_net = step_nets.several_parameters()
    _, outputs = comparing.build(recurrent_net, step_net, net, scope="loop")
    x = step_net.inputs[0][0]
    step_net.inputs = [(x, "Y")]
    _, again = comparing.build(recurrent_net, step_net, net, scope="loop")
    assert [str(blob) for blob in again] == ["h_t_all_1", "h_t_last_1"]
    assert net.Proto().op[1].output[2] == "loop_1/step_workspaces"
    step_net.outer["Y"] = step_net.outer["X"][::-1].copy()
    feed(step_net.outer)
    gradients, _ = run_and_fetch(net, total(net, [outputs[0], again[0]]), step_net.outer)

    def loss(values):
        first = comparing.reference_outputs(step_net, dict(values, Y=values["X"]))
        return first[0].sum() + comparing.reference_outputs(step_net, values)[0].sum()

    expected = numpy_loop.numerical_gradients(loss, comparing.doubles(step_net), list(step_net.outer))
    for name, gradient in gradients.items():
        comparing.assert_close(gradient, expected[name], name)


def test_third_loop_gets_the_next_number():
    net, step_net = core.Net("outer"), step_nets.product()
    scopes = []
    for _ in range(3):
        comparing.build(recurrent_net, step_net, net, scope="loop")
        scopes.append(net.Proto().op[-1].output[-1])
    assert scopes == ["loop/step_workspaces", "loop_1/step_workspaces", "loop_2/step_workspaces"]


# --- gradients that arrive at the outputs ---

OUTPUTS = range(4)


@pytest.mark.parametrize(
    "arriving", [chosen for size in range(1, 5) for chosen in itertools.combinations(OUTPUTS, size)], ids=str
)
def test_auto_passes_back_whatever_arrives(arriving):
    step_net = step_nets.state_read_by_another()
    net, outputs = comparing.build(recurrent_net, step_net, outputs_with_grads="auto")
    feed(step_net.outer)
    names = list(step_net.outer)
    gradients, found = run_and_fetch(net, total(net, [outputs[position] for position in arriving]), names)
    check_gradients(net, found)

    def loss(values):
        return sum(comparing.reference_outputs(step_net, values)[position].sum() for position in arriving)

    expected = numpy_loop.numerical_gradients(loss, comparing.doubles(step_net), names)
    for name in names:
        comparing.assert_close(gradients[name], expected[name], name)


def test_dropped_gradients_are_named():
    step_net = step_nets.state_read_by_another()
    net, outputs = comparing.build(recurrent_net, step_net, outputs_with_grads=(0,))
    gradients = net.AddGradientOperators([total(net, [outputs[0], outputs[1], outputs[2]])])
    with pytest.raises(ValueError) as error:
        check_gradients(net, gradients)
    assert str(error.value) == (
        "check_gradients: 2 problems:\n"
        "  - the gradient of 'a_t_last' (position 1) is dropped; outputs_with_grads is (0,): "
        "add 1 to it or pass 'auto'\n"
        "  - the gradient of 'b_t_all' (position 2) is dropped; outputs_with_grads is (0,): "
        "add 2 to it or pass 'auto'"
    )


@pytest.mark.parametrize("choice", [(0,), "auto"], ids=str)
def test_sparse_gradient_of_an_output_is_made_dense(choice):
    """Gather takes rows of the output, one of them twice; C++ takes no sparse gradient, whatever was listed."""
    step_net = step_nets.product()
    net, outputs = comparing.build(recurrent_net, step_net, outputs_with_grads=choice)
    workspace.FeedBlob("rows", np.array([2, 0, 2], dtype=np.int64))
    feed(step_net.outer)
    loss_blob = total(net, [net.Gather([outputs[0], net.AddExternalInput("rows")], ["gathered"])])
    gradients, _ = run_and_fetch(net, loss_blob, ["X", "h_initial"])

    def loss(values):
        return comparing.reference_outputs(step_net, values)[0][[2, 0, 2]].sum()

    expected = numpy_loop.numerical_gradients(loss, comparing.doubles(step_net), ["X", "h_initial"])
    for name in expected:
        comparing.assert_close(gradients[name], expected[name], name)


def test_nothing_but_other_readers_have_a_gradient():
    """A loop off the path to the loss gets no gradient operator."""
    step_net = step_nets.product()
    net, _ = comparing.build(recurrent_net, step_net, outputs_with_grads="auto")
    net.AddGradientOperators([total(net, ["X"])])
    assert "RecurrentNetworkGradient" not in [operator.type for operator in net.Proto().op]


# --- other readers of the sequence ---


def sequence_read_too(choice, later):
    """A net in which another operator reads the sequence, before or after the loop; and the loss as a function."""
    step_net = step_nets.product()
    net = core.Net("outer")
    if not later:
        squared = net.Mul(["X", "X"], ["squared"])
    _, outputs = comparing.build(recurrent_net, step_net, net, outputs_with_grads=choice)
    if later:
        squared = net.Mul(["X", "X"], ["squared"])
    feed(step_net.outer)

    def loss(values):
        return comparing.reference_outputs(step_net, values)[0].sum() + (values["X"] ** 2).sum()

    return step_net, net, total(net, [outputs[0], squared]), loss


@pytest.mark.parametrize("choice, later", [((0,), False), ("auto", False), ("auto", True)], ids=str)
def test_sequence_that_another_operator_reads(choice, later):
    step_net, net, blob, loss = sequence_read_too(choice, later)
    gradients, found = run_and_fetch(net, blob, ["X"])
    check_gradients(net, found)
    expected = numpy_loop.numerical_gradients(loss, comparing.doubles(step_net), ["X"])
    comparing.assert_close(gradients["X"], expected["X"], "X")


def test_sequence_that_a_later_operator_reads_is_found():
    """The engine writes a sequence's gradient by name, and Caffe2 has given that name to the later operator."""
    step_net, net, blob, loss = sequence_read_too((0,), later=True)
    found = net.AddGradientOperators([blob])
    with pytest.raises(ValueError, match="the gradient of sequence 'X' is lost: a later operator reads 'X' too"):
        check_gradients(net, found)


def test_two_loops_over_one_sequence():
    net = core.Net("outer")
    first, second = loop_with_other_output("first_t", "Tanh"), loop_with_other_output("second_t", "Sigmoid")
    outputs = [
        comparing.build(recurrent_net, step_net, net, outputs_with_grads="auto")[1][0] for step_net in (first, second)
    ]
    feed(first.outer)
    gradients, found = run_and_fetch(net, total(net, outputs), ["X"])
    check_gradients(net, found)

    def loss(values):
        return sum(comparing.reference_outputs(step_net, values)[0].sum() for step_net in (first, second))

    expected = numpy_loop.numerical_gradients(loss, comparing.doubles(first), ["X"])
    comparing.assert_close(gradients["X"], expected["X"], "X")


def test_the_sequence_as_a_reference():
    """Every step reads the whole sequence, as attention does; its gradient has both parts."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    whole = make.cell.AddExternalInputs("X")
    spread = make.cell.ReduceFrontSum([make.cell.Tanh(whole, "whole")], ["spread"], num_reduce_dim=1)
    extended = make.cell.ExpandDims(spread, "spread_t", dims=[0])
    make.link(h, make.cell.Tanh(make.cell.Mul([make.cell.Mul([x, h], "xh"), extended], "z"), "h_t"))
    comparing.assert_right(recurrent_net, make.done())


# --- a loop within a larger training net ---


def test_gradients_flow_through_operators_before_and_after():
    step_net = step_nets.several_parameters()
    net = core.Net("outer")
    net.Tanh(["raw"], ["X"])
    _, outputs = comparing.build(recurrent_net, step_net, net)
    feed(step_net.outer)
    raw = step_net.outer["X"].copy()
    workspace.FeedBlob("raw", raw)
    squared = net.Mul([outputs[0], outputs[0]], ["squared"])
    gradients, _ = run_and_fetch(net, total(net, [squared]), ["raw"])

    def loss(values):
        return (comparing.reference_outputs(step_net, dict(others, X=np.tanh(values["raw"])))[0] ** 2).sum()

    others = comparing.doubles(step_net)
    expected = numpy_loop.numerical_gradients(loss, {"raw": raw.astype(np.float64)}, ["raw"])
    comparing.assert_close(gradients["raw"], expected["raw"], "raw")


# --- references that others read as well ---


def reads_twice(output, choice):
    """Two parts of w's gradient are added up in the backward step."""
    make = step_nets.Maker(seed=1)
    x, h = make.sequence(), make.state()
    w = make.reference("w", 1, step_nets.N, step_nets.D)
    make.link(h, make.cell.Mul([make.cell.Mul([x, w], "xw"), make.cell.Mul([h, w], "hw")], output))
    return make.done(outputs_with_grads=choice)


def outside_readers(net, count):
    return [net.Scale(["w"], ["w{}".format(number)], scale=2.0 + number) for number in range(count)]


def summed(values, step_nets_run, readers):
    loops = sum(comparing.reference_outputs(step_net, values)[0].sum() for step_net in step_nets_run)
    return loops + sum((2.0 + number) * values["w"].sum() for number in range(readers))


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("choice, first", [("auto", "loop"), ("auto", "readers"), ((0,), "readers")], ids=str)
def test_reference_read_twice_in_the_step_and_outside(choice, first, readers, executor):
    """Caffe2 gives the parts of both sums the same names, and a step writes to an outer blob that it finds."""
    step_net, net = reads_twice("h_t", choice), core.Net("outer")
    ends = outside_readers(net, readers) if first == "readers" else []
    _, outputs = comparing.build(recurrent_net, step_net, net)
    ends = ends or outside_readers(net, readers)
    feed(step_net.outer)
    blob = total(net, [outputs[0], *ends])
    found = net.AddGradientOperators([blob])
    check_gradients(net, found)
    comparing.configure(net, executor)
    workspace.RunNetOnce(net)
    doubles = comparing.doubles(step_net)
    expected = numpy_loop.numerical_gradients(lambda values: summed(values, [step_net], readers), doubles, ["w"])
    comparing.assert_close(workspace.FetchBlob(str(found["w"])), expected["w"], "w")


@pytest.mark.parametrize("choice", ["auto", (0,)], ids=str)
@pytest.mark.parametrize("role", ["sequence", "initial"])
def test_reference_read_twice_that_the_loop_reads_otherwise_too(role, choice):
    """In runs of one net with other sizes: what was outside in the run before, a step finds in the next one."""
    blob = {"sequence": "x", "initial": "h0"}[role]

    def built():
        net, cell = core.Net("outer"), core.Net("step")
        x_t, h_prev, read = cell.AddExternalInput("x_t", "h_prev", blob)
        twice = cell.Mul([cell.Tanh(read, "t"), cell.Sigmoid(read, "s")], "both")
        twice = twice if role == "initial" else cell.ReduceFrontMean(twice, "mean", num_reduce_dim=1)
        shaped = twice if role == "initial" else cell.ExpandDims(twice, "row", dims=[0])
        h_t = cell.Sum([cell.Mul([x_t, h_prev], "product"), shaped], "h_t")
        cell.AddExternalOutput(h_t)
        inputs, initial = [(x_t, "x")], [(h_prev, "h0")]
        h_all, _ = recurrent_net(net, cell, inputs, initial, {h_prev: h_t}, scope="loop", outputs_with_grads=choice)
        return net, net.AddGradientOperators([net.SumElements(net.Sqr(h_all, "squares"), "loss")])

    def run(net, gradients, seed, steps, batch, created):
        random = np.random.RandomState(seed)
        feed({"x": random.uniform(0.5, 1, (steps, batch, 4)).astype(np.float32)})
        feed({"h0": random.uniform(0.5, 1, (1, batch, 4)).astype(np.float32)})
        if not created:
            workspace.CreateNet(net)
        workspace.RunNet(net)
        return [workspace.FetchBlob(str(gradients[name])) for name in ("x", "h0")]

    sizes = [(3, 1), (3, 2), (3, 1), (1, 1), (5, 3), (2, 2)]
    expected = []
    for seed, (steps, batch) in enumerate(sizes):
        workspace.ResetWorkspace()
        expected.append(run(*built(), seed, steps, batch, created=False))
    workspace.ResetWorkspace()
    net, gradients = built()
    check_gradients(net, gradients)
    for seed, (steps, batch) in enumerate(sizes):
        found = run(net, gradients, seed, steps, batch, created=seed > 0)
        for name, ours, fresh in zip(("x", "h0"), found, expected[seed]):
            np.testing.assert_array_equal(ours, fresh, "{} at {}".format(name, (steps, batch)))


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_reference_read_twice_in_each_of_two_loops(executor):
    net = core.Net("outer")
    both = [reads_twice(output, "auto") for output in ("p_t", "q_t")]
    outputs = [comparing.build(recurrent_net, step_net, net)[1][0] for step_net in both]
    feed(both[0].outer)
    found = net.AddGradientOperators([total(net, outputs)])
    check_gradients(net, found)
    comparing.configure(net, executor)
    workspace.RunNetOnce(net)
    doubles = comparing.doubles(both[0])
    expected = numpy_loop.numerical_gradients(lambda values: summed(values, both, 0), doubles, ["w"])
    comparing.assert_close(workspace.FetchBlob(str(found["w"])), expected["w"], "w")


@pytest.mark.parametrize("readers", [1, 2])
def test_reference_that_a_later_operator_reads_is_found(readers):
    step_net = reads_twice("h_t", (0,))
    net, outputs = comparing.build(recurrent_net, step_net, core.Net("outer"))
    found = net.AddGradientOperators([total(net, [outputs[0], *outside_readers(net, readers)])])
    with pytest.raises(ValueError) as error:
        check_gradients(net, found)
    assert str(error.value) == (
        "check_gradients: '_w_grad_autosplit_0' is written by the backward step of the loop of "
        "'{0}/recurrent/step_workspaces' and by net '{0}', so each spoils the other's gradient; "
        "pass outputs_with_grads='auto', or rename the blob it is the gradient of".format(net.Name())
    )
