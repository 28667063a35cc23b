"""`sequence_gradient`: the gradient of the sequence behind the loop, of what is there over all steps."""

import pytest
from caffe2.python import core, workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import MILSTM, optimize, recurrent_net
from caffe2_recurrent.loops.parts import Parameter, State
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import passes
from caffe2_recurrent.rewriting.rules import RULES
from caffe2_recurrent.wiring import Link
from onednn_support import assert_cell
from step_nets import D
from test_rewriting_rules import EVERY_STEP_NET, EXECUTOR, loop_of, made, reasons_in, why
from test_rewriting_sequence_bias import Net

RULE = "sequence_gradient"
MOVED = ["parameter_gradients", RULE]
WITH = pytest.mark.parametrize("rules", [MOVED, None], ids=["alone", "all rules"])


# Steps.


def linear(make, x, name):
    """s x + o"""
    parts = [x, make.reference(name + "_s", D), make.reference(name + "_o", D)]
    return make.cell.ElementwiseLinear(parts, name, axis=2)


def one(make, x, h):
    return make.cell.Tanh(make.cell.Sum([linear(make, x, "v"), make.fc(h, "u")], "total"), "h_t")


def several(make, x, h):
    """As in an MILSTM, once more."""
    gated = make.cell.Mul([linear(make, x, "v"), make.fc(h, "u")], "gated")
    others = [linear(make, x, "s"), make.cell.Sigmoid(linear(make, x, "r"), "opened")]
    return make.cell.Tanh(make.cell.Sum([gated, *others], "total"), "h_t")


STEPS = pytest.mark.parametrize("step", [one, several], ids=lambda step: step.__name__)


def assert_kept(step, rule, count, rules, executor, parameters=()):
    """The rule fires so often and leaves nothing; values and gradients stay. The net.

    `parameters` are those that an init net makes.
    """
    expected = Net(step).values()
    net = Net(step)
    rewrite = support.Optimised(rules)
    rewrite(net.model(parameters))
    report = rewrite.report
    assert (report.counts[rule], reasons_in(report, rule)) == (count, []), str(report)
    support.assert_same(net.values(executor), expected)
    return net.net


@EXECUTOR
@WITH
@STEPS
def test_values_and_gradients(step, rules, executor):
    gradient = loop_of(assert_kept(step, RULE, 1, rules, executor)).gradient
    assert [link for link in gradient.backward_links if link.outer == gradient.sequence] == []


@pytest.mark.parametrize("variant", ["kept", "recomputed"])
@WITH
def test_an_milstm(rules, variant):
    """Against the numpy loop."""
    rewrite = support.Optimised(rules)
    assert_cell("milstm", variant, rewrite)
    # What is computed again is not there over all steps.
    assert rewrite.report.counts[RULE] == (1 if variant == "kept" else rewrite.report.counts[RULE])


@EVERY_STEP_NET
def test_step_nets(make):
    step_net = make()
    found = comparing.run(recurrent_net, step_net, rewrite=support.Optimised(MOVED))
    comparing.assert_outputs_and_gradients(step_net, *found)


def assert_seen(rules, wrong):
    """Values tell where the first operator for which `wrong` is true gives a thousandth too much."""
    expected = Net(several).values()
    net = Net(several)
    optimize(net.net, rules, even_if_slower=True)
    operators = list(net.net.Proto().op)
    position = next(index for index, operator in enumerate(operators) if wrong(operator))
    blob = core.BlobReference(operators[position].output[0])
    net.insert(position + 1, "Scale", [blob], [blob], scale=1.001)
    with pytest.raises(AssertionError, match="gradient of"):
        support.assert_same(net.values(), expected)


@pytest.mark.parametrize("kind", ["Sum", "ElementwiseLinearGradient"])
def test_a_wrong_sum_is_seen(kind):
    assert_seen(MOVED, lambda operator: operator.type == kind)


# What it refuses.


def milstm_loop(move=True):
    """With the gradients of its vectors behind it, unless they are not to `move`."""
    model, _ = support.lstm(MILSTM)
    workspace.RunNetOnce(model.param_init_net)
    loop = loop_of(model.net)
    if move:
        rule = next(rule for rule in RULES if rule.name == "parameter_gradients")
        assert passes.apply(rule, loop, Sizes({}), even_if_slower=True)[0]
    return loop


def of_sequence(loop):
    (link,) = [link for link in loop.gradient.backward_links if link.outer == loop.gradient.sequence]
    return link


def test_what_is_no_sum_of_products_is_none_of_its_business():
    assert why(RULE, milstm_loop(move=False)) == []
    assert why(RULE, milstm_loop()) == [None]
    loop = milstm_loop()
    (total,) = [operator for operator in loop.gradient.operators if of_sequence(loop).inner in operator.output][1:]
    total.input[1] = "layer/gates_t_grad"
    assert why(RULE, loop) == []
    loop.gradient.operators.remove(total)
    loop.gradient.operators[:] = [
        operator for operator in loop.gradient.operators if of_sequence(loop).inner not in operator.output
    ]
    assert why(RULE, loop) == []


def test_refuses_what_is_not_known_over_all_steps():
    loop = milstm_loop()
    loop.after_gradient[:] = [op for op in loop.after_gradient if op.type != "ElementwiseLinearGradient"]
    assert why(RULE, loop) == ["'layer/input_t_grad' is not known over all steps"]


@pytest.mark.parametrize("of", ["the sum", "a product"])
def test_refuses_what_the_step_needs(of):
    loop = milstm_loop()
    total = [op for op in loop.gradient.operators if of_sequence(loop).inner in op.output][-1]
    blob = total.output[0] if of == "the sum" else total.input[1]
    loop.gradient.operators.append(made("Tanh", [blob], ["again"]))
    assert why(RULE, loop) == ["'{}' is needed elsewhere too".format(blob)]


def test_refuses_what_is_linked_twice():
    loop = milstm_loop()
    link = of_sequence(loop)
    loop.gradient.backward_links.append(Link(link.inner, "layer/other", 0))
    assert why(RULE, loop) == ["'{}' is linked more than once".format(link.inner)]


def shared_product(make, x, h):
    """A product of the sum of slice and state, whose gradient is the state's too."""
    both = linear(make, make.cell.Sum([x, h], "both"), "v")
    return make.cell.Tanh(make.cell.Mul([both, linear(make, x, "s")], "gated"), "h_t")


@EXECUTOR
def test_a_product_that_is_the_gradient_of_a_state_too(executor):
    expected = Net(shared_product).values()
    net = Net(shared_product)
    report = optimize(net.net, MOVED)
    assert (report.counts[RULE], reasons_in(report, RULE)) == (0, ["'both_grad' is needed elsewhere too"])
    support.assert_same(net.values(executor), expected)


def test_refuses_what_is_the_gradient_of_a_parameter_too():
    loop = milstm_loop()
    total = [op for op in loop.gradient.operators if of_sequence(loop).inner in op.output][-1]
    parameter = Parameter("layer/other", total.input[1], "layer/other_grad")
    loop.gradient.parameters.append(parameter)
    assert why(RULE, loop) == ["'{}' is needed elsewhere too".format(total.input[1])]


def test_refuses_memory_that_is_taken():
    loop = milstm_loop()
    loop.states[0] = State(loop.gradient.sequence, "h0")
    assert why(RULE, loop) == ["the sequence's gradient holds another blob already"]
