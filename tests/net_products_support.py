"""A net whose product makes the sequence of loops, for tests of rules about products around a loop."""

import numpy as np
from caffe2.python import core, workspace

import comparing
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, PRODUCT
from step_nets import D, Maker, N, T
from test_rewriting_rules import lstm_loop, why


class Net:
    """X = FC(x, w, b), and loops h_t = tanh(u_w h + u_b + X_t) over it; values for its inputs.

    `change` gets the finished net. `gradients` are those of the inputs that have one.
    """

    def __init__(self, shape=(T, N, 4), loops=1, axis=2, axis_w=1, change=lambda net: None):
        workspace.ResetWorkspace()
        inner = int(np.prod(shape[axis:]))
        self.net = core.Net("net")
        weights = (D, inner) if axis_w == 1 else (D, *shape[axis:])
        self.shapes = {"x": shape, "w": weights, "b": (D,), "seed": (T, N, D)}
        result = self.net.FC(["x", "w", "b"], "X", axis=axis, **({} if axis_w == 1 else {"axis_w": axis_w}))
        if axis == 1:
            result, _ = self.net.Reshape(result, ["sequence", "old_shape"], shape=[T, N, D])
        self.outputs = [self._loop(str(number), str(result)) for number in range(loops)]
        seed = self.net.AddExternalInput("seed")
        found = self.net.AddGradientOperators(dict.fromkeys(self.outputs, seed))
        self.gradients = {str(blob): str(gradient) for blob, gradient in found.items() if str(blob) in self.shapes}
        change(self.net)
        random = np.random.RandomState(1)
        for blob, size in self.shapes.items():
            workspace.FeedBlob(blob, random.uniform(-1, 1, size).astype(np.float32))

    def _loop(self, number, sequence):
        make = Maker(seed=int(number))
        (x,) = make.cell.AddScopedExternalInputs("x_t")
        make.inputs.append((x, sequence))
        state = make.state("h" + number)
        total = make.cell.Sum([make.fc(state, "u" + number), x], "total")
        make.link(state, make.cell.Tanh(total, "h_t"))
        self.shapes.update({name: value.shape for name, value in make.outer.items()})
        # Two loops over one sequence add up its gradient.
        options = {"scope": "loop" + number, "outputs_with_grads": "auto"}
        return comparing.build(recurrent_net, make.done(), self.net, **options)[1][0]

    def values(self):
        """Outputs and gradients by name, `X` among them, after a run."""
        workspace.RunNetOnce(self.net)
        gradients = {blob: workspace.FetchBlob(gradient) for blob, gradient in self.gradients.items()}
        return [workspace.FetchBlob(blob) for blob in [*map(str, self.outputs), "X"]], gradients


def outside(net):
    """The types of the products that the net itself runs, without Ifs."""
    return [operator.type for operator in net.Proto().op if operator.type in (PRODUCT, GRADIENT)]


def without_the_gradient_of_x(net):
    (gradient,) = [operator for operator in net.Proto().op if operator.output[:1] == ["w_grad"]]
    del gradient.output[2:]


def changed_between(net):
    """The gradient, before the second product continues from it."""
    position = next(index for index, operator in enumerate(net.Proto().op) if operator.type == "Alias")
    blob = net.Proto().op[position].output[0]
    doubled = core.CreateOperator("Scale", [blob], [blob], scale=2.0)
    operators = [*net.Proto().op[: position + 1], doubled, *net.Proto().op[position + 1 :]]
    del net.Proto().op[:]
    net.Proto().op.extend(operators)


SHAPES = {"layer/i2h_w": (16, 2), "layer/i2h": (9, 3, 16)}


def said(rule, shapes=SHAPES, change=lambda operator: None, **options):
    """What a rule says about the product of an LSTM, if it is about products, and about its gradient."""
    loop = lstm_loop()
    for operators in loop.surroundings.products.values():
        change(operators[0])
    return why(rule, loop, shapes, **options)
