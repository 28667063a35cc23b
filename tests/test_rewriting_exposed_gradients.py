"""The gradient of a sequence that is read beside the loop too, in a net that may run its operators side by side."""

import numpy as np
import pytest
from caffe2.python import core, workspace

from caffe2_recurrent import optimize, recurrent_net

SHAPES = {"x": (4, 2, 3), "h0": (2, 3), "w": (3, 3), "b": (3,), "factor": (4, 2, 3)}


def elman_net(read_elsewhere):
    random = np.random.RandomState(0)
    for name, shape in SHAPES.items():
        workspace.FeedBlob(name, random.randn(*shape).astype(np.float32))
    net, step = core.Net("net"), core.Net("step")
    net.Proto().type = "dag"
    addends = [net.SumElements(net.Mul(["x", "factor"], "weighted"), "beside")] if read_elsewhere else []
    x_t, h_prev, w, b = step.AddExternalInputs("x_t", "h_prev", "w", "b")
    h_t = step.Tanh(step.Sum([step.FC([h_prev, w, b], "u", axis=2), x_t], "z"), "h_t")
    h_all, _ = recurrent_net(
        net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t}, scope="loop", outputs_with_grads="auto"
    )
    loss = net.Sum([*addends, net.SumElements(h_all, "of_loop")], "loss")
    return net, net.AddGradientOperators([loss])


def gradients_of(net, found):
    workspace.RunNetOnce(net)
    return {name: workspace.FetchBlob(str(found[name])) for name in ("x", "h0", "w", "b")}


@pytest.mark.parametrize("read_elsewhere", [True, False])
def test_who_reads_it_does_not_share_it_with_who_adds_to_it(read_elsewhere):
    net, found = elman_net(read_elsewhere)
    expected = gradients_of(net, found)
    assert optimize(net, rules=["parameter_gradients"]).counts == {"parameter_gradients": 1}
    operators = net.Proto().op
    (exposing,) = [operator for operator in operators if operator.output[:1] == ["x_grad"] != operator.input[:1]]
    assert exposing.input == ["loop/x_grad"]
    assert any(operator.type == "FCGradient" and "loop/x_grad" in operator.input for operator in operators)
    assert exposing.type == ("Copy" if read_elsewhere else "Alias")
    for name, gradient in gradients_of(net, found).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_where_no_rule_reads_it_the_alias_stays():
    net, _ = elman_net(True)
    assert optimize(net, rules=["forward_links"]).total == 1
    assert "Alias" in [operator.type for operator in net.Proto().op]
