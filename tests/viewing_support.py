"""Nets to look at, and what the steps' workspaces hold after a run of theirs."""

import re

import numpy as np
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
from caffe2_recurrent import LSTM, describe, optimize, recurrent_net, retrieve_step_blobs

LOOP, GRADIENT = "RecurrentNetwork", "RecurrentNetworkGradient"


def elman(gradient=True, name="elman", **options):
    """h_t = tanh(w h_prev + b + x_t), built without a workspace in mind."""
    step = core.Net("elman_step")
    x_t, h_prev, w, b = step.AddExternalInputs("x_t", "h_prev", "w", "b")
    h_t = step.Tanh(step.Sum([step.FC([h_prev, w, b], "u", axis=2), x_t], "z"), "h_t")
    step.AddExternalOutput(h_t)
    net = core.Net(name)
    options = dict({"outputs_with_grads": "auto"}, **options)
    outputs = recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t}, **options)
    if gradient:
        net.AddGradientOperators([outputs[1]])
    return net


ELMAN_SHAPES = {"x": (5, 2, 3), "h0": (2, 3), "w": (3, 3), "b": (3,)}


def lstm(gradient=True, dim_in=2, dim=4, builder=LSTM, **options):
    model = ModelHelper("model")
    outputs = builder(model, "x", None, ("h0", "c0"), dim_in, dim, "lstm", **options)
    if gradient:
        model.AddGradientOperators([model.net.AveragedLoss(outputs[0], "loss")])
    return model


LSTM_SHAPES = {"x": (4, 3, 2), "h0": (3, 4), "c0": (3, 4)}


def feed(shapes):
    random = np.random.RandomState(0)
    for name, shape in shapes.items():
        workspace.FeedBlob(name, random.uniform(-1, 1, shape).astype(np.float32))


def built_layer(cell, optimised=False, executor=True, gradient=True):
    """A layer of the registry with its gradient, fed and ready to run."""
    model, outputs = cell.build()
    if gradient:
        seeds = {outputs[position]: "seed{}".format(position) for position in cell.positions}
        model.net.AddGradientOperators({blob: model.net.AddExternalInput(seed) for blob, seed in seeds.items()})
        for position, value in cell.output_gradients().items():
            workspace.FeedBlob("seed{}".format(position), value.astype(np.float32))
    workspace.RunNetOnce(model.param_init_net)
    cell.feed()
    if optimised:
        optimize(model, even_if_slower=True)
    comparing.configure(model.net, executor)
    return model


def operators(net, kind=LOOP):
    return [operator for operator in net.Proto().op if operator.type == kind]


def argument(operator, name):
    (found,) = [given for given in operator.arg if given.name == name]
    return found


def step_tensors(net, step, prefix="seen"):
    """What `retrieve_step_blobs` finds in a step of the one loop of `net`, by the names in the step net."""
    (loop,) = describe(net).loops
    found = {name.decode() for name in retrieve_step_blobs(net, prefix)}
    names = loop.structure.computed + [view.inner for view in loop.structure.views]
    there = {blob: "{}_{}{}".format(prefix, blob, step) for blob in names}
    return {blob: workspace.FetchBlob(name) for blob, name in there.items() if name in found}


def section(text, title, loop=0):
    """The lines of one section of one loop in a description, without their indentation."""
    part = str(text).split("\n\n")[1 + loop]
    found = re.search(r"^  {}.*\n((?:    .*\n?)*)".format(re.escape(title)), part, flags=re.MULTILINE)
    assert found, "no section '{}' in\n{}".format(title, part)
    return [line[4:] for line in found.group(1).splitlines()]


def of_two_slices():
    """The net of a step that sees two values of its state, as for a convolution over time; two come before step 0."""
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    step.AddExternalOutput(step.Add([step.ReduceSum(h_prev, "both", axes=[0]), x_t], "h_t"))
    net = core.Net("net")
    recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"}, forward_only=True)
    (operator,) = operators(net)
    argument(operator, "link_offset").ints[:] = [0, 2, 0]
    operator.arg.add(name="link_window").ints.extend([2, 1, 1])
    return net
