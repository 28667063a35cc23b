"""Gradients of what `Gather` reads, with indices of any number of axes, within a step and behind a loop."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
from caffe2_recurrent import LSTM, gradcheck, optimize, recurrent_net

N, D, ROWS = 2, 4, 5
INDICES = {"[N]": [2, 0], "[1, N]": [[2, 0]], "[3, N]": [[2, 0], [2, 2], [4, 0]], "[2, 1, N]": [[[2, 0]], [[1, 2]]]}


def words():
    """Each step reads the rows of its own words, by the slice `[1, N]` of them."""
    step = core.Net("step")
    i, h, table = step.AddExternalInputs("i_t", "h_prev", "table")
    rows = step.Gather([table, step.Cast(i, "ids", to=core.DataType.INT32)], "rows")
    h_t = step.Tanh(step.Sum([h, rows], "total"), "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("words")
    outputs = recurrent_net(net, step, [(i, "i")], [(h, "h0")], {h: h_t}, outputs_with_grads="auto", scope="loop")
    return net, outputs[0], {"i": np.array([[0, 1], [2, 2], [4, 0]], np.float32)}


def reference_of_indices(indices, twice=False):
    """Each step reads the same rows, once or twice, and adds up what belongs to a sequence."""
    step = core.Net("step")
    x, h, table, ids = step.AddExternalInputs("x_t", "h_prev", "table", "ids")
    total = step.Sum([h, x], "total")
    for number in range(2 if twice else 1):
        name = "rows{}".format(number)
        rows = step.Reshape(step.Gather([table, ids], name), [name + "_in_order", name + "_shape"], shape=[-1, N, D])[0]
        added = step.ReduceFrontSum(rows, name + "_added", num_reduce_dim=1)
        total = step.Add([total, added], "total{}".format(number), broadcast=1)
    h_t = step.Tanh(total, "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("reference")
    outputs = recurrent_net(net, step, [(x, "x")], [(h, "h0")], {h: h_t}, outputs_with_grads="auto", scope="loop")
    return net, outputs[0], {"x": np.full((3, N, D), 0.25, np.float32), "ids": np.array(indices, np.int32)}


def names_used_again():
    """What is read of the table is called as something else before; both have gradients."""
    step = core.Net("step")
    x, h, table, ids = step.AddExternalInputs("x_t", "h_prev", "table", "ids")
    first = step.Sin(x, "a")
    negative = step.Negative(first, "negative")
    rows = step.Gather([table, ids], "a")
    h_t = step.Tanh(step.Sum([step.Mul([negative, step.Tanh(rows, "bounded")], "product"), h], "total"), "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("again")
    outputs = recurrent_net(net, step, [(x, "x")], [(h, "h0")], {h: h_t}, outputs_with_grads="auto", scope="loop")
    return net, outputs[0], {"x": np.full((3, N, D), 0.25, np.float32), "ids": np.array([[2, 0]], np.int32)}


def indices_of_several_axes():
    """Sparse gradients of one table, by `[N]` and by `[1, N]`, are joined."""
    step = core.Net("step")
    x, h, table, ids, flat_ids = step.AddExternalInputs("x_t", "h_prev", "table", "ids", "flat_ids")
    one = step.ExpandDims(step.Gather([table, flat_ids], "one"), "one_step", dims=[0])
    other = step.Mul([step.Gather([table, ids], "other"), x], "scaled")
    h_t = step.Tanh(step.Sum([one, other, h], "total"), "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net("several")
    outputs = recurrent_net(net, step, [(x, "x")], [(h, "h0")], {h: h_t}, outputs_with_grads="auto", scope="loop")
    values = {"ids": np.array([[2, 0]], np.int32), "flat_ids": np.array([2, 4], np.int32)}
    return net, outputs[0], {"x": np.full((3, N, D), 0.25, np.float32), **values}


CASES = {"words": words, "names used again": names_used_again, "several axes": indices_of_several_axes}
for name, indices in INDICES.items():
    CASES["reference " + name] = lambda indices=indices: reference_of_indices(indices)
    CASES["twice, reference " + name] = lambda indices=indices: reference_of_indices(indices, twice=True)


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_a_table_that_a_step_reads(make):
    net, output, values = make()
    values.update(h0=np.full((N, D), 0.5, np.float32), table=np.random.RandomState(0).randn(ROWS, D).astype(np.float32))
    gradcheck(net, output, values, blobs=["table", "h0"])
    found = []
    for executor, optimised in ((False, False), (True, False), (True, True)):
        workspace.ResetWorkspace()
        net, output, _ = make()
        gradients = net.AddGradientOperators([net.SumElements(net.Sqr(output, "squared"), "loss")])
        for name, value in values.items():
            workspace.FeedBlob(name, value)
        if optimised:
            optimize(net, even_if_slower=True)
        comparing.configure(net, executor)
        workspace.RunNetOnce(net)
        found.append(workspace.FetchBlob(str(gradients["table"])))
    assert found[0].shape == (ROWS, D) and np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)


@pytest.mark.parametrize("indices", INDICES.values(), ids=list(INDICES))
def test_steps_of_which_some_are_read(indices):
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, None, 3, D, "lstm", outputs_with_grads="auto")
    read = model.net.Gather([hidden_all, "ids"], "read")
    ids = np.array(indices, np.int32)
    gradcheck(model, read, {"x": np.random.RandomState(0).randn(ROWS, N, 3).astype(np.float32), "ids": ids})


def test_indices_that_are_overwritten():
    """They would be others by the time that the gradient is made."""
    step = core.Net("step")
    x, h, table, ids = step.AddExternalInputs("x_t", "h_prev", "table", "ids")
    first = step.Copy(ids, "k")
    rows = step.Gather([table, first], "rows")
    step.Cast(x, "k", to=core.DataType.INT32)
    h_t = step.Tanh(step.Sum([rows, step.Mul([h, step.Cast("k", "k_float", to=1)], "scaled")], "total"), "h_t")
    step.AddExternalOutput(h_t)
    with pytest.raises(ValueError, match="Gather, writing 'rows'.* needs input \"k\" at version 0"):
        recurrent_net(core.Net("net"), step, [(x, "x")], [(h, "h0")], {h: h_t})
