"""Operators that write to a tensor under another of its names, or in a net that they run: what reads it is not moved
past them."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.loops.tensor_names import changed_by, names_of_tensors, written_by

T, N, D = 4, 2, 4


def operators(*given):
    return caffe2_pb2.NetDef(op=[core.CreateOperator(*each) for each in given])


def scaled_in_a_branch(net, blob, shown=None):
    """By an operator that does not say so in its outputs, which a simple net does not ask for; as `shown`, if given."""
    other = shown or blob
    changing = [core.CreateOperator("Scale", [other], [other], scale=3.0)]
    if shown:
        changing.insert(0, core.CreateOperator("Alias", [blob], [shown]))
    branch = caffe2_pb2.NetDef(name="branch", op=changing)
    net.If(net.ConstantFill([], "yes", shape=[1], value=True, dtype=core.DataType.BOOL), [], then_net=branch)


# -------------------------------------------------------------------------------------------------------- what is known


def test_blobs_that_are_shown_have_several_names():
    net = operators(["Alias", "a", "b"], ["Copy", "a", "c"], ["AliasWithName", "b", "d"], ["Alias", "x", "y"])
    found = names_of_tensors(net)
    assert found["a"] == found["b"] == found["d"] == {"a", "b", "d"}
    assert found["x"] == {"x", "y"} and "c" not in found


def test_a_net_in_an_operator_shows_blobs_too():
    net = core.Net("net")
    scaled_in_a_branch(net, "w", "shown")
    assert names_of_tensors(net.Proto())["w"] == {"w", "shown"}
    assert changed_by(net.Proto().op, names_of_tensors(net.Proto())) >= {"w", "shown"}


def test_outputs_of_a_loop_are_names_of_its_states():
    net = core.Net("net")
    outputs = loop(net, "layer", "x")
    found = names_of_tensors(net.Proto())
    (states,) = support.argument(net.Proto().op[0], "recurrent_states").strings
    assert found[str(outputs[0])] == {*map(str, outputs), states.decode()}


def test_what_is_written_in_nets_counts():
    net = core.Net("net")
    scaled_in_a_branch(net, "w")
    assert written_by(net.Proto().op[-1]) == ["w"]


def test_to_show_a_blob_changes_nothing_but_a_name():
    net = operators(["Alias", "a", "b"], ["Relu", "b", "b"])
    tensors = names_of_tensors(net)
    assert changed_by(net.op[:1], tensors) == {"b"}
    assert changed_by(net.op, tensors) == {"a", "b"}


# --------------------------------------------------------------------------------------------------------------- values


def loop(net, name, sequence, weights="w", **options):
    step = core.Net(name)
    x, h, w, b = step.AddExternalInputs(name + "x_t", name + "h_prev", weights, "b")
    out = step.Tanh(step.Sum([step.FC([h, w, b], name + "u", axis=2), x], name + "z"), name + "h_t")
    step.AddExternalOutput(out)
    return recurrent_net(net, step, [(x, sequence)], [(h, "h0")], {h: out}, scope=name, **options)


def in_place_behind_the_product(net):
    """`h_t_last` is a slice of what the product of the next layer reads."""
    hidden, last = loop(net, "first", "x", forward_only=True)
    product = net.FC([hidden, "w2", "b2"], "second/i2h", axis=2)
    net.Relu(last, last)
    return [*loop(net, "second", product, forward_only=True), last]


def an_alias_of_what_the_product_reads(net):
    sequence = net.Copy("x", "copied")
    shown = net.Alias(sequence, "shown")
    product = net.FC([sequence, "w2", "b2"], "layer/i2h", axis=2)
    net.Scale(shown, shown, scale=3.0)
    return loop(net, "layer", product, forward_only=True)


def a_branch_that_changes_weights_of_the_product(net):
    net.Copy("w2", "weights")
    product = net.FC(["x", "weights", "b2"], "layer/i2h", axis=2)
    scaled_in_a_branch(net, "weights")
    return loop(net, "layer", product, forward_only=True)


def a_branch_that_shows_weights_of_the_product(net):
    net.Copy("w2", "weights")
    product = net.FC(["x", "weights", "b2"], "layer/i2h", axis=2)
    scaled_in_a_branch(net, "weights", "shown")
    return loop(net, "layer", product, forward_only=True)


def a_branch_that_shows_an_output(net):
    hidden, last = loop(net, "layer", "x", forward_only=True)
    scaled_in_a_branch(net, str(last), "shown")
    return [hidden, last]


def a_branch_that_shows_what_the_product_reads(net):
    hidden, last = loop(net, "first", "x", forward_only=True)
    product = net.FC([hidden, "w2", "b2"], "second/i2h", axis=2)
    scaled_in_a_branch(net, str(last), "shown")
    return [*loop(net, "second", product, forward_only=True), last]


def trained(net, change):
    """The loop's own weights change before its gradient operator, whose backward steps read them as they are then."""
    net.Copy("w", "weights")
    shown = net.Alias("weights", "shown")
    hidden, _ = loop(net, "layer", "x", "weights")
    change(net, shown)
    gradients = net.AddGradientOperators([net.SumElements(net.Sqr(hidden, "squared"), "loss")])
    return [hidden, gradients["x"], gradients["h0"]]


def an_alias_of_weights_that_are_trained(net):
    return trained(net, lambda net, shown: net.Scale(shown, shown, scale=3.0))


def a_branch_that_changes_weights_that_are_trained(net):
    return trained(net, lambda net, shown: scaled_in_a_branch(net, "weights"))


def a_branch_that_shows_weights_that_are_trained(net):
    return trained(net, lambda net, _: scaled_in_a_branch(net, "weights", "inner"))


def values_of(build, optimised, **options):
    random = np.random.RandomState(0)
    shapes = {"x": (T, N, D), "h0": (1, N, D), "w": (D, D), "b": (D,), "w2": (D, D), "b2": (D,)}
    for blob, shape in shapes.items():
        workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
    net = core.Net("net")
    blobs = build(net)
    if optimised:
        optimize(net, even_if_slower=True, trials=False, **options)
    workspace.RunNetOnce(net)
    return [workspace.FetchBlob(blob) for blob in blobs]


@pytest.mark.parametrize("options", [{}, {"batch_parts": 2}], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    "build",
    [
        in_place_behind_the_product,
        an_alias_of_what_the_product_reads,
        a_branch_that_changes_weights_of_the_product,
        an_alias_of_weights_that_are_trained,
        a_branch_that_changes_weights_that_are_trained,
        a_branch_that_shows_weights_of_the_product,
        a_branch_that_shows_an_output,
        a_branch_that_shows_what_the_product_reads,
        a_branch_that_shows_weights_that_are_trained,
    ],
    ids=lambda build: build.__name__,
)
def test_values_and_gradients(build, options):
    expected = values_of(build, False)
    for found, right in zip(values_of(build, True, **options), expected):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
