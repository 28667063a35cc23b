"""`sequence_in_place`: what a step writes over the slice of its sequence, in a blob of its own."""

import numpy as np
import pytest
from caffe2.python import workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize
from caffe2_recurrent.loops.parts import State
from caffe2_recurrent.wiring import Link
from every_pair import every_pair
from step_nets import D, scoped
from test_rewriting_rules import EXECUTOR, SHAPES, loop_of, lstm_loop, made, reasons_in, why
from test_rewriting_sequence_bias import SEQUENCE, Net

RULE = "sequence_in_place"
RULES = pytest.mark.parametrize(
    "rules", [[RULE], [RULE, "gradient_buffer"], None], ids=["alone", "with a buffer", "all rules"]
)


# Steps, each with the blob that takes the gates.


def plain(make, x, h):
    u = make.fc(h, "u")
    make.cell.Sum([x, u], [x])
    return make.cell.Tanh(x, "h_t")


def of_joined_states(make, x, h):
    """As with attention; `joined` is read by the backward step as well."""
    joined, _ = make.cell.Concat([h, make.cell.Sigmoid(h, "v")], ["joined", "joined_sizes"], axis=2)
    u = make.cell.FC([joined, make.reference("u_w", D, 2 * D), make.reference("u_b", D)], "u", axis=2)
    make.cell.Sum([x, u], [x])
    return make.cell.Tanh(x, "h_t")


def read_twice(make, x, h):
    u = make.fc(h, "u")
    make.cell.Sum([x, u], [x])
    return make.cell.Mul([make.cell.Tanh(x, "tanh"), make.cell.Sigmoid(x, "sigmoid")], "h_t")


def other_form_of_sum(make, x, h):
    """Of what is no product."""
    u = make.cell.Scale(h, "u", scale=1.5)
    make.cell.Sum([x, u], [x])
    return make.cell.Sigmoid(x, "h_t")


STEPS = [plain, of_joined_states, read_twice, other_form_of_sum]
SHARED = {of_joined_states: ("v", "joined", "joined_sizes", "u")}
EVERY_STEP = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)


def options_of(step, way):
    if way == "recomputed":
        return {"recompute_blobs_on_backward": list(scoped(*SHARED.get(step, ("u",))))}
    return {"forward_only": True} if way == "forward only" else {}


@every_pair
@EXECUTOR
@RULES
@pytest.mark.parametrize("way", ["kept", "recomputed", "forward only"])
@EVERY_STEP
def test_values_and_gradients(step, way, rules, executor):
    options = options_of(step, way)
    expected = Net(step, **options).values()
    net = Net(step, **options)
    rewrite = support.Optimised(rules)
    rewrite(net.net)
    assert rewrite.report.counts[RULE] == 1 and reasons_in(rewrite.report, RULE) == []
    comparing.configure(net.net, executor)
    support.assert_same(net.values(), expected)


@pytest.mark.parametrize("way", ["kept", "recomputed", "forward only"])
@EVERY_STEP
def test_the_sequence_stays_what_it_is(step, way):
    net = Net(step, **options_of(step, way))
    net.values()
    x, w, b = (workspace.FetchBlob(blob) for blob in ("x", "w", "b"))
    product = x @ w.T + b
    assert np.abs(workspace.FetchBlob(SEQUENCE) - product).max() > 0.1
    optimize(net.net, [RULE], even_if_slower=True)
    net.values()
    np.testing.assert_allclose(workspace.FetchBlob(SEQUENCE), product, rtol=1e-5, atol=1e-5)


def test_what_is_made_again_until_it_has_a_place():
    model, _ = support.lstm(memory_optimization=True)
    optimize(model, [RULE], even_if_slower=True)
    loop = loop_of(model.net)
    product, total, unit = loop.operators
    gates = "layer/gates_t_shared"
    assert list(total.input) == [gates, "layer/input_t"]
    assert unit.input[2] == total.output[0] == gates
    assert loop.gradient.operators[:2] == [product, total]
    assert loop.gradient.operators[2].input[2] == gates
    assert loop.shared == [gates]


def test_nothing_is_made_again_in_the_end():
    model, _ = support.lstm(memory_optimization=True)
    optimize(model, [RULE, "gradient_buffer"], even_if_slower=True)
    loop = loop_of(model.net)
    assert [operator.type for operator in loop.gradient.operators][0] == "LSTMUnitGradient"
    assert loop.shared == [] and loop.link("layer/gates_t_shared_linked").outer == loop.gradient.sequence


# What it refuses.


def refused(step, **options):
    """The reasons of the rule, where values stay."""
    expected = Net(step, **options).values()
    net = Net(step, **options)
    rewrite = support.Optimised([RULE])
    rewrite(net.net)
    assert rewrite.report.total == 0
    support.assert_same(net.values(), expected)
    return reasons_in(rewrite.report, RULE)


def three(make, x, h):
    make.cell.Sum([x, make.fc(h, "u"), make.cell.Tanh(h, "v")], [x])
    return make.cell.Tanh(x, "h_t")


def needed_elsewhere(make, x, h):
    u = make.fc(h, "u")
    make.cell.Sum([x, u], [x])
    return make.cell.Tanh(make.cell.Sum([x, make.cell.Scale(u, "v", scale=0.5)], "total"), "h_t")


def a_state(make, x, h):
    make.cell.Sum([x, h], [x])
    return make.cell.Tanh(make.cell.Sum([make.fc(h, "u"), x], "total"), "h_t")


def read_before(make, x, h):
    v = make.cell.Scale(x, "v", scale=0.5)
    u = make.fc(h, "u")
    make.cell.Sum([x, u], [x])
    return make.cell.Tanh(make.cell.Sum([x, v], "total"), "h_t")


def written_again(make, x, h):
    u = make.fc(h, "u")
    make.cell.Sum([x, u], [x])
    make.cell.Tanh(x, x)
    return make.cell.Scale(x, "h_t", scale=0.5)


def by_some_operator(make, x, h):
    u = make.cell.Sinh(h, "u")
    make.cell.Sum([x, u], [x])
    return make.cell.Tanh(x, "h_t")


def needed_for_its_gradient(make, x, h):
    u = make.cell.Tanh(h, "u")
    make.cell.Sum([x, u], [x])
    return make.cell.Sigmoid(x, "h_t")


def changed_later(make, x, h):
    """What the product is made of is overwritten when the step ends."""
    v = make.cell.Scale(h, "v", scale=0.5)
    u = make.cell.Scale(v, "u", scale=2.0)
    make.cell.Sum([x, u], [x])
    make.cell.Sum([v, x], [v])
    return make.cell.Tanh(v, "h_t")


@pytest.mark.parametrize(
    "step, reason",
    [
        (three, "it is not the sum of the slice and one other blob"),
        (needed_elsewhere, "'u' is not made for this sum alone"),
        (a_state, "'h_prev' is not made for this sum alone"),
        (read_before, "'x_t' is read before it is written"),
        (written_again, "other operators write 'x_t' too"),
        (needed_for_its_gradient, "the backward step uses 'u' too"),
        (by_some_operator, "Sinh, which makes 'u', is not known to give the same each time it runs"),
        (changed_later, "'v', of which it is made, is overwritten later"),
    ],
)
def test_refuses_steps(step, reason):
    assert refused(step) == [reason]


def test_refuses_a_sequence_that_somebody_may_want_to_see():
    assert refused(plain, sequence="X") == [
        "'X' is not of the loop's own scope, so somebody may want to see it",
    ]


def test_other_sums_are_none_of_its_business():
    def step(make, x, h):
        total = make.cell.Sum([x, make.fc(h, "u")], "total")
        make.cell.Sum([total, h], [total])
        return make.cell.Tanh(total, "h_t")

    assert refused(step) == []


BEHIND = "'layer/input_t' and 'layer/gates_t_shared' are needed behind the step too"


@pytest.mark.parametrize("blob", ["layer/input_t", "layer/gates_t_shared"])
def test_refuses_what_the_step_exports(blob):
    loop = lstm_loop(memory_optimization=True)
    loop.net.external_output.append(blob)
    assert why(RULE, loop) == [BEHIND]


def test_refuses_a_product_that_is_a_slice_itself():
    loop = lstm_loop(memory_optimization=True)
    loop.links.append(Link("layer/gates_t_shared", "layer/states", 1))
    assert why(RULE, loop) == [BEHIND]


def test_refuses_what_the_backward_step_uses():
    loop = lstm_loop(memory_optimization=True)
    loop.gradient.operators.append(made("Tanh", ["layer/gates_t_shared"], ["again"]))
    assert why(RULE, loop) == ["the backward step uses 'layer/gates_t_shared' too"]
    loop.gradient.operators.insert(0, made("Tanh", ["layer/hidden_t"], ["layer/input_t"]))
    assert why(RULE, loop) == ["the backward step writes 'layer/input_t' too"]


def test_refuses_a_slice_that_the_backward_step_does_not_see():
    loop = lstm_loop(memory_optimization=True)
    loop.gradient.links[:] = [link for link in loop.gradient.links if link.inner != "layer/input_t"]
    assert why(RULE, loop) == ["the backward step does not see the slice of 'layer/i2h'"]


def test_refuses_where_the_gates_would_have_no_place():
    loop = lstm_loop(memory_optimization=True)
    assert why(RULE, loop) == [None]
    assert why(RULE, loop, {}) == ["the shape of the sequence 'layer/i2h' is not known; give shapes"]
    loop.states[0] = State(loop.gradient.sequence, "h0")
    assert why(RULE, loop, SHAPES) == ["the sequence's gradient holds another blob already"]
    loop.surroundings.busy.add(loop.gradient.sequence)
    expected = "other operators use '{}' before it holds the sequence's gradient"
    assert why(RULE, loop, SHAPES) == [expected.format(loop.gradient.sequence)]
