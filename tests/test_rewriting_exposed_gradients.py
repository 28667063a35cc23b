"""The gradient of a sequence that is read beside the loop too, in a net that may run its operators side by side."""

import numpy as np
import pytest
from caffe2.python import core, workspace

from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.operators import copied
from caffe2_recurrent.rewriting import exposed_gradients

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
def test_what_adds_to_it_waits_for_what_reads_it(read_elsewhere):
    net, found = elman_net(read_elsewhere)
    # The two names are one tensor from here on, whatever the next net does with them.
    expected = gradients_of(net, found)
    assert optimize(net, rules=["parameter_gradients"]).counts == {"parameter_gradients": 1}
    operators = net.Proto().op
    assert any(operator.type == "FCGradient" and "loop/x_grad" in operator.input for operator in operators)
    adding = [operator for operator in operators if operator.type == "Sum" and "x_grad" in operator.output]
    assert [list(operator.control_input) for operator in adding] == [["w_grad", "b_grad"]] * read_elsewhere
    for _ in range(30 if read_elsewhere else 1):
        for name, gradient in gradients_of(net, found).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_reader_by_a_view_is_waited_for_and_the_given_operators_stay():
    given = [
        core.CreateOperator("RecurrentNetworkGradient", ["h_grad"], ["loop/x_grad"]),
        core.CreateOperator("Alias", ["loop/x_grad"], ["rows"]),
        core.CreateOperator("Alias", ["loop/x_grad"], ["x_grad"]),
        core.CreateOperator("ReduceFrontSum", ["rows"], ["b_grad"]),
        core.CreateOperator("Relu", ["other"], ["another"]),
        core.CreateOperator("Sum", ["x_grad", "another"], ["x_grad"], control_input=["other"]),
        core.CreateOperator("ReduceFrontSum", ["rows"], ["later"]),
        core.CreateOperator("Sum", ["x_grad", "later"], ["x_grad"]),
    ]
    before = [copied(operator) for operator in given]
    ordered = list(given)
    exposed_gradients.keep_order(ordered)
    assert given == before
    assert [list(operator.control_input) for operator in ordered if operator.type == "Sum"] == [
        ["other", "rows", "b_grad"],
        [],
    ]
    again = list(ordered)
    exposed_gradients.keep_order(again)
    assert again == ordered


def test_where_no_rule_reads_it_nothing_waits():
    net, _ = elman_net(True)
    assert optimize(net, rules=["forward_links"]).total == 1
    assert not any(operator.control_input for operator in net.Proto().op)
