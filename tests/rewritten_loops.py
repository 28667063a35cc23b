"""Running step nets whose loops a few rules have rewritten, beside the same ones left as they were."""

import random

import numpy as np
from caffe2.python import workspace

import comparing
import random_step_nets
import step_nets
from caffe2_recurrent import optimize, recurrent_net

# Sums in another order, and products of other sizes, round differently.
TOLERANCE = 1e-4


def build(step_net, **options):
    """The net with the loop of a step net, and its outputs."""
    net, outputs = comparing.build(recurrent_net, step_net, **options)
    if dict(step_net.options, **options).get("forward_only"):
        return net, outputs, {}
    given_gradients = {}
    for position in comparing.positions(step_net, options):
        given_gradients[outputs[position]] = net.AddExternalInput("given_gradient_{}".format(position))
    return net, outputs, net.AddGradientOperators(given_gradients)


def run(step_net, rules=None, executor=True, **options):
    """Outputs and gradients by name; the report if `rules` are given. Rewritten twice, which must change nothing."""
    workspace.ResetWorkspace()
    net, outputs, gradients = build(step_net, **options)
    report = None
    if rules is not None:
        report = optimize(net, rules=rules, even_if_slower=True)
        rewritten = net.Proto().SerializeToString()
        assert optimize(net, rules=rules, even_if_slower=True).total == 0
        assert net.Proto().SerializeToString() == rewritten
    comparing.configure(net, executor)
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    for position, value in comparing.output_gradients(step_net, options, _outputs(step_net)).items():
        workspace.FeedBlob("given_gradient_{}".format(position), value.astype(np.float32))
    workspace.RunNetOnce(net)
    found = {"output {}".format(number): workspace.FetchBlob(blob) for number, blob in enumerate(outputs)}
    for name in step_net.floats:
        if name in gradients:
            found[name] = workspace.FetchBlob(str(gradients[name]))
    return found, report


def _outputs(step_net):
    """Blobs of the shapes that the outputs have, also where numpy_loop does not know an operator."""
    sizes = [step_net.outer[outer].shape[-1] for _, outer in step_net.initial]
    return [np.empty((steps, step_nets.N, size)) for size in sizes for steps in (step_nets.T, 1)]


def assert_kept(step_net, rules, **options):
    """Values and gradients stay what they were, with the executor and without; gives the report."""
    before, _ = run(step_net, **options)
    for executor in (True, False):
        after, report = run(step_net, rules, executor, **options)
        assert after.keys() == before.keys()
        for name, value in before.items():
            comparing.assert_close(after[name], value, name, TOLERANCE)
    return report


def assert_right(step_net, rules, **options):
    """As `assert_kept`, and equal to the numpy loop and its numerical gradients."""
    report = assert_kept(step_net, rules, **options)
    found, _ = run(step_net, rules, **options)
    for number, expected in enumerate(comparing.reference_outputs(step_net)):
        comparing.assert_close(found["output {}".format(number)], expected, number)
    if not dict(step_net.options, **options).get("forward_only"):
        for name, expected in comparing.reference_gradients(step_net, **options).items():
            comparing.assert_close(found.get(name, np.zeros_like(expected)), expected, name)
    return report


class Alone:
    """The functions of this module for one rule."""

    def __init__(self, rule):
        self._rule = rule

    def assert_kept(self, step_net, **options):
        return assert_kept(step_net, [self._rule], **options)

    def assert_right(self, step_net, **options):
        return assert_right(step_net, [self._rule], **options)

    def refusals(self, step_net, **options):
        return reasons(build(step_net, **options)[0], self._rule)


def loop_operator(net, kind="RecurrentNetwork"):
    (found,) = [operator for operator in net.Proto().op if operator.type == kind]
    return found


def argument(operator, name):
    return next(argument for argument in operator.arg if argument.name == name)


def step_types(net, name="step_net"):
    return [operator.type for operator in argument(loop_operator(net), name).n.op]


def backward_operators(net):
    """The operators of the backward step, as both operators of the loop have them."""
    kinds = ("RecurrentNetwork", "RecurrentNetworkGradient")
    return [argument(loop_operator(net, kind), "backward_step_net").n.op for kind in kinds]


def reasons(net, rule, count=0, **options):
    """Why a rule leaves the sites of a net alone, which it rewrites at `count` others."""
    report = optimize(net, rules=[rule], **dict({"even_if_slower": True}, **options))
    assert report.counts == {rule: count}
    return {refusal.what: refusal.reason for refusal in report.refusals}


def random_case(seed, sequences, recompute):
    """A random step net and options for it; every output has a gradient, so that all that is wrong shows."""
    step_net = random_step_nets.step_net(seed, sequences)
    options = {"outputs_with_grads": range(2 * len(step_net.initial))}
    if recompute:
        options["recompute_blobs_on_backward"] = random_step_nets.recomputable(step_net, random.Random(seed))
    return step_net, options


def rewritten_layer(cell, rules):
    """Optimise a layer of the registry; gives the report."""
    model, outputs = cell.build()
    seeds = {outputs[position]: model.net.AddExternalInput("seed{}".format(position)) for position in cell.positions}
    model.net.AddGradientOperators(seeds)
    return optimize(model, rules=rules)
