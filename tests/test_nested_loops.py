"""Loops that run within a step of another: values and gradients, and what must be said about their names."""

import numpy as np
import pytest
from caffe2.python import core, workspace

import comparing
from caffe2_recurrent import check_gradients, gradcheck, recurrent_net

N, D, INNER_STEPS = 2, 4, 2
SHAPES = {"h0": (N, D), "sequence": (INNER_STEPS, N, D), "w": (D,)}


def inner_loop(step, sequence, initial, weights, **options):
    """b_t = tanh(w * b_prev + a_t), whose last value the outer step goes on with."""
    inner = core.Net("inner")
    a, b, w = inner.AddExternalInputs("a_t", "b_prev", str(weights))
    inner.Tanh(inner.Sum([inner.Mul([b, w], "weighted", broadcast=1), a], "b_sum"), "b_t")
    options = {"outputs_with_grads": "auto", "scope": "inner", **options}
    return recurrent_net(step, inner, [(a, sequence)], [(b, initial)], {b: "b_t"}, **options)


def outer_net(copied=True, linked=False, direct=False, **options):
    """h_t = the last value of the inner loop over `sequence` that begins with h + x_t, or with h, times x_t."""
    step = core.Net("step")
    x, h, sequence, w = step.AddExternalInputs("x_t", "h_prev", "sequence", "w")
    step.AddExternalInput("number")
    if copied:
        sequence, w = step.Copy(sequence, "sequence_in_step"), step.Copy(w, "w_in_step")
    initial = h if direct else step.Sum([h, x], "began")
    _, last = inner_loop(step, sequence, initial, w, **options)
    h_t = last if linked else step.Mul([last, x], "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("outer")
    states = {"outputs_with_grads": "auto", "scope": "loop", "timestep": "number", **options}
    outputs = recurrent_net(net, step, [(x, "x")], [(h, "h0")], {h: h_t}, **states)
    return net, outputs[0]


def values(steps):
    random = np.random.RandomState(0)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in {"x": (steps, N, D), **SHAPES}.items()}


def expected(given, direct):
    h, found = given["h0"][np.newaxis], []
    for x in given["x"]:
        b = h if direct else h + x
        for a in given["sequence"]:
            b = np.tanh(given["w"] * b + a)
        h = b * x
        found.append(h)
    return np.concatenate(found)


EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
DIRECT = pytest.mark.parametrize("direct", [True, False], ids=["from the state", "from a sum"])


@EXECUTOR
@DIRECT
@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_values(steps, forward_only, direct, executor):
    given = values(steps)
    for name, value in given.items():
        workspace.FeedBlob(name, value)
    net, output = outer_net(direct=direct, forward_only=forward_only)
    comparing.configure(net, executor)
    workspace.RunNetOnce(net)
    np.testing.assert_allclose(workspace.FetchBlob(output), expected(given, direct), atol=1e-5)


@DIRECT
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients(steps, direct):
    net, output = outer_net(direct=direct)
    given = values(steps)
    report = gradcheck(net, output, given)
    assert {check.blob for check in report.checks} == set(given)
    found = []
    for executor in (True, False):
        workspace.ResetWorkspace()
        net, output = outer_net(direct=direct)
        gradients = net.AddGradientOperators([net.SumElements(output, "loss")])
        check_gradients(net, gradients)
        for name, value in given.items():
            workspace.FeedBlob(name, value)
        comparing.configure(net, executor)
        workspace.RunNetOnce(net)
        found.append({name: workspace.FetchBlob(str(gradients[name])) for name in given})
    for name in given:
        np.testing.assert_allclose(found[0][name], found[1][name], atol=1e-6, err_msg=name)


def test_gradients_within_a_step_have_memory_of_their_own():
    """The RNN executor goes by names: what a view shows would be made again, a step further on, while it is read."""
    net, output = outer_net()
    net.AddGradientOperators([net.SumElements(output, "loss")])
    (gradient,) = [operator for operator in net.Proto().op if operator.type == "RecurrentNetworkGradient"]
    (step,) = [argument.n for argument in gradient.arg if argument.name == "backward_step_net"]
    (inner,) = [operator for operator in step.op if operator.type == "RecurrentNetworkGradient"]
    readers = [operator.type for operator in step.op if operator.input and operator.input[0] == inner.output[0]]
    assert readers == ["Copy"] and not any(operator.type == "Alias" for operator in step.op)


def refused(**options):
    with pytest.raises(ValueError) as caught:
        outer_net(**options)
    return str(caught.value)


def test_references_of_both_loops():
    assert refused(copied=False) == (
        "recurrent_net: step operator 1 (RecurrentNetwork) reads 'sequence', 'w' of this loop, and both would make "
        "gradients by the same names; let it read a Copy that the step makes"
    )


def test_references_of_both_loops_without_gradients():
    given = values(3)
    for name, value in given.items():
        workspace.FeedBlob(name, value)
    net, output = outer_net(copied=False, forward_only=True)
    workspace.RunNetOnce(net)
    np.testing.assert_allclose(workspace.FetchBlob(output), expected(given, False), atol=1e-5)


@pytest.mark.parametrize("forward_only", [True, False])
def test_a_view_of_the_inner_loop_as_the_next_state(forward_only):
    assert refused(linked=True, forward_only=forward_only) == (
        "recurrent_net: step operator 3 (RecurrentNetwork) writes state output 'b_t_last' to memory of its own, where "
        "the engine does not look; write to another blob, and link a Copy of that"
    )


def test_one_number_for_the_steps_of_both():
    step = core.Net("step")
    x, h, sequence, w, lengths = step.AddExternalInputs("x_t", "h_prev", "sequence", "w", "lengths")
    _, last = inner_loop(step, sequence, h, w, forward_only=True)
    # Declared after the inner loop has been built, which would have refused it.
    number = step.AddExternalInput("timestep")
    gates = step.Concat([last, last, last], ["gates", "gates_sizes"], axis=2)[0]
    step.AddExternalOutput(step.GRUUnit([h, gates, lengths, number], "h_t", sequence_lengths=1))
    with pytest.raises(ValueError) as caught:
        recurrent_net(core.Net("outer"), step, [(x, "x")], [(h, "h0")], {h: "h_t"}, forward_only=True)
    assert str(caught.value) == (
        "recurrent_net: step operator 0 (RecurrentNetwork) counts its steps in 'timestep', which the step reads as its "
        "own number; pass another timestep to one of the two"
    )
