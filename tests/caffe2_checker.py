"""Caffe2's own check of a gradient, one element after the other in float32: its bound is wider than a numpy loop's."""

from collections import Counter

import pytest
from caffe2.python import gradient_checker, workspace

OPTIONS = {"step_size": 0.01, "threshold": 0.005, "print_net": False}


def check(net, outputs, values, name):
    """The gradient of `outputs` by the blob `name`; they must have one shape, as it adds them up.

    The checker makes the net for each value of each element, which takes most of its time. Here that of the gradients
    is made and run once, as it has it, and then again for all values.
    """
    run_once, runs = workspace.RunNetOnce, Counter()

    def run(proto):
        runs[id(proto)] += 1
        if runs[id(proto)] == 1:
            return run_once(proto)
        if runs[id(proto)] == 2:
            workspace.CreateNet(proto, overwrite=True)
        return workspace.RunNet(proto)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "RunNetOnce", run)
        gradient_checker.NetGradientChecker.Check(net, outputs, values, name, **OPTIONS)
