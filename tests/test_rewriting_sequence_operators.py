"""Products with slices of a sequence are computed for all steps at once."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from hypothesis import given
from hypothesis import strategies as st

import cells
import comparing
import rewritten_loops
import step_memory
import step_nets
from caffe2_recurrent import optimize
from rewritten_loops import (
    Alone,
    argument,
    backward_operators,
    build,
    loop_operator,
    random_case,
    reasons,
    rewritten_layer,
    step_types,
)

RULE = "sequence_operators"
D, N, T = step_nets.D, step_nets.N, step_nets.T
STEP_NUMBER_BYTES = 4
seeds = st.integers(0, 2**32 - 1)
alone = Alone(RULE)
assert_kept, assert_right, refusals = alone.assert_kept, alone.assert_right, alone.refusals


def linked(net, kind="RecurrentNetwork"):
    return [blob.decode() for blob in argument(loop_operator(net, kind), "link_internal").strings]


def recurrent(in_front=lambda make, x: x, behind=lambda make, v: v, **options):
    """h_t = tanh(V x_t + U h_{t-1}), with something in front of the product V x_t or behind it."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    v = behind(make, make.fc(in_front(make, x), "v"))
    total = make.cell.Sum([v, make.fc(h, "u")], "total")
    make.link(h, make.cell.Tanh(total, "h_t"))
    return make.done(**options)


def test_a_product_with_a_sequence_is_computed_before_the_loop():
    net, _, _ = build(recurrent())
    report = optimize(net, rules=[RULE])
    assert report.counts == {RULE: 1}
    assert report.rewrites[0].what == "FC -> 'v'"
    moved = net.Proto().op[0]
    assert moved.type == "FC" and list(moved.input) == ["X", "v_w", "v_b"]
    assert moved.output[0] in loop_operator(net).input
    assert step_types(net) == ["FC", "Sum", "Tanh"]
    assert "v_linked" in linked(net)
    # The backward step still reads x_t.
    assert "x_t" in linked(net) and "x_t" in linked(net, "RecurrentNetworkGradient")
    assert_right(recurrent())


def test_without_a_backward_step_nothing_sees_the_sequence():
    net, _, _ = build(recurrent(forward_only=True))
    optimize(net, rules=[RULE])
    assert "x_t" not in linked(net)
    assert_right(recurrent(forward_only=True))


def test_the_backward_step_may_not_see_the_sequence_either():
    """Once the parameters' gradients are computed after the loop, no step reads x_t."""
    step_net = recurrent()
    net, _, _ = build(step_net)
    optimize(net, rules=["parameter_gradients"], even_if_slower=True)
    optimize(net, rules=[RULE], even_if_slower=True)
    assert "x_t" not in linked(net) + linked(net, "RecurrentNetworkGradient")
    rewritten_loops.assert_kept(step_net, ["parameter_gradients", RULE])


IN_FRONT = {
    "tanh": lambda make, x: make.cell.Tanh(x, "front"),
    "two": lambda make, x: make.cell.Sigmoid(make.cell.Scale(x, "front", scale=2.0), "front2"),
    "another product": lambda make, x: make.cell.Tanh(make.fc(x, "front"), "front2"),
    "elementwise": lambda make, x: make.cell.ElementwiseLinear(
        [x, make.reference("scale", D), make.reference("shift", D)], "front", axis=2
    ),
    "in place": lambda make, x: make.cell.Tanh(make.cell.Scale(x, "front", scale=2.0), "front"),
    "softmax": lambda make, x: make.cell.Softmax(x, "front", axis=2),
}
COUNTS = {"tanh": 2, "two": 3, "another product": 3, "elementwise": 2, "in place": 3, "softmax": 2}


@pytest.mark.parametrize("name", IN_FRONT)
def test_operators_in_front_of_a_product_move_with_it(name):
    step_net = recurrent(IN_FRONT[name])
    net, _, _ = build(step_net)
    assert optimize(net, rules=[RULE]).counts == {RULE: COUNTS[name]}
    assert step_types(net) == ["FC", "Sum", "Tanh"]
    assert_kept(step_net)


@pytest.mark.parametrize("name", ["tanh", "two", "another product", "in place"])
@pytest.mark.parametrize("recompute", [False, True])
def test_operators_in_front_are_right(name, recompute):
    step_net = recurrent(IN_FRONT[name])
    if recompute:
        written = {blob for operator in step_net.cell.Proto().op for blob in operator.output}
        step_net.options["recompute_blobs_on_backward"] = sorted(written - {"h_t"})
        # An operator in front of a product that is computed again stays until the product moves.
        assert assert_right(step_net).total <= COUNTS[name]
    else:
        assert assert_right(step_net).counts == {RULE: COUNTS[name]}


def test_a_part_of_a_sequence():
    def part(make, x):
        return make.cell.Split(make.sequence("y_t", 2 * D), ["left", "right"], axis=2)[1]

    step_net = recurrent(part)
    assert assert_kept(step_net).counts == {RULE: 2}


def test_products_behind_each_other():
    assert assert_right(recurrent(behind=lambda make, v: make.fc(v, "w"))).counts == {RULE: 2}


@pytest.mark.parametrize("recomputed", [[], ["v"], ["v", "squashed"]], ids=str)
def test_products_that_are_changed_in_place(recomputed):
    """A usual way to write it: v = V x_t; v += U h."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    v = make.fc(x, "v")
    make.cell.Sum([v, make.fc(h, "u")], [v])
    make.link(h, make.cell.Mul([make.cell.Tanh(v, "squashed"), h], "h_t"))
    step_net = make.done(recompute_blobs_on_backward=recomputed)
    assert assert_right(step_net).counts == {RULE: 1}


def test_a_blob_that_is_computed_again_is_kept_outside():
    step_net = recurrent(recompute_blobs_on_backward=["v", "u", "total"])
    net, _, _ = build(step_net)
    assert step_types(net, "backward_step_net").count("FC") == 2
    optimize(net, rules=[RULE], even_if_slower=True)
    assert step_types(net, "backward_step_net").count("FC") == 1
    shared = argument(loop_operator(net), "recompute_blobs_on_backward").strings
    assert sorted(blob.decode() for blob in shared) == ["total_shared", "u_shared"]
    assert_right(step_net)


@pytest.mark.parametrize("executor", [False, True])
def test_steps_keep_no_more_than_before(executor):
    step_net = recurrent(recompute_blobs_on_backward=["v", "u", "total"])
    for rules in ([], [RULE]):
        workspace.ResetWorkspace()
        net, _, _ = build(step_net)
        if rules:
            assert optimize(net, rules=rules, even_if_slower=True).total == 1
        comparing.configure(net, executor)
        for name, value in step_net.outer.items():
            workspace.FeedBlob(name, value)
        workspace.FeedBlob("given_gradient_0", np.ones((T, N, D), dtype=np.float32))
        workspace.RunNetOnce(net)
        assert step_memory.owned_bytes(net) == [STEP_NUMBER_BYTES] * T


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_registry(make):
    with_product = [
        "several_parameters",
        "value_read_before_it_is_added_to",
        "unused_previous_state",
        "several_sequences",
        "several_sequences_auto",
    ]
    assert assert_kept(make()).counts == {RULE: int(make.__name__ in with_product)}


@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_layers_compute_their_products_outside_already(cell):
    """MILSTM has operators on its sequence, which no product needs."""
    report = rewritten_layer(cell, [RULE])
    assert report.total == 0 and report.refusals == ()


@given(seeds, st.integers(1, 3), st.booleans())
def test_random_step_nets(seed, sequences, recompute):
    step_net, options = random_case(seed, sequences, recompute)
    assert_kept(step_net, **options)


@given(seeds, st.booleans())
def test_random_step_nets_with_all_three_rules(seed, recompute):
    step_net, options = random_case(seed, 2, recompute)
    rewritten_loops.assert_kept(step_net, ["invariants", "merged_sums", RULE], **options)


def test_some_random_step_nets_have_such_products():
    """The properties above would say little if none had."""
    counted = [optimize(build(random_case(seed, 2, False)[0])[0], rules=[RULE]).total for seed in range(80)]
    assert sum(count > 0 for count in counted) > 5


# Refusals, and what had better stay.


def test_products_that_are_computed_again_stay_to_save_memory():
    net, _, _ = build(recurrent(IN_FRONT["tanh"], recompute_blobs_on_backward=["v"]))
    assert reasons(net, RULE, even_if_slower=False) == {}
    net, _, _ = build(recurrent(recompute_blobs_on_backward=["v"]))
    reason = "'v' is computed again in the backward step to save memory"
    assert reasons(net, RULE, even_if_slower=False) == {"FC -> 'v'": reason}


def test_products_of_many_sequences_stay():
    net, _, _ = build(recurrent())
    shapes = {"X": (T, 64, D)}
    reason = "with 64 sequences the product of a step is as fast"
    assert reasons(net, RULE, even_if_slower=False, shapes=shapes) == {"FC -> 'v'": reason}
    assert reasons(net, RULE, even_if_slower=False, shapes={"X": (T, 63, D)}, count=1) == {}


def test_refuses_weights_that_change():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    weights = make.cell.Squeeze(make.state("w", size=D, shape=(1, D, D)), "w", dims=[0])
    make.link(make.initial[1][0], make.cell.ExpandDims(weights, "w_t", dims=[0]))
    v = make.cell.FC([x, weights, make.reference("b", D)], "v", axis=2)
    make.link(h, make.cell.Tanh(v, "h_t"))
    assert refusals(make.done(forward_only=True)) == {"FC -> 'v'": "'w' is not the same in all steps"}


def test_refuses_sequences_that_the_step_changes():
    step_net = recurrent(behind=lambda make, v: make.cell.Copy(v, "copied"), forward_only=True)
    step_net.cell.Copy("copied", "x_t")
    assert refusals(step_net) == {"FC -> 'v'": "the step writes to 'x_t'"}


def test_refuses_states():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.fc(x, "h_t"))
    assert refusals(make.done()) == {"FC -> 'h_t'": "'h_t' is a slice of another blob already"}


def test_refuses_outputs_of_the_step():
    def watched(make, v):
        make.cell.AddExternalOutputs(v)
        return v

    assert refusals(recurrent(behind=watched)) == {"FC -> 'v'": "'v' is an output of the step"}


def test_refuses_what_the_backward_step_writes_in_another_way():
    net, _, _ = build(recurrent())
    for operators in backward_operators(net):
        operators.extend([core.CreateOperator("Copy", ["u"], ["v"])])
    assert reasons(net, RULE) == {"FC -> 'v'": "the backward step writes 'v' too"}


def test_states_are_no_sequences():
    """Neither the state of this step, nor one that the net names as an input as well."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.cell.Sum([x, make.fc(h, "u")], "total"), "h_t"))
    net, _, _ = build(make.done(forward_only=True))
    operator = loop_operator(net)
    operator.input.append(argument(operator, "recurrent_states").strings[0].decode())
    assert reasons(net, RULE) == {}


@pytest.mark.parametrize("axis", [1, 3])
def test_products_along_other_axes_are_left_alone(axis):
    net, _, _ = build(recurrent(forward_only=True))
    operator = argument(loop_operator(net), "step_net").n.op[0]
    argument(operator, "axis").i = axis
    assert reasons(net, RULE) == {}


def test_operators_in_front_stay_if_their_product_does():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    front = make.cell.Tanh(make.cell.Sigmoid(x, "front"), "front2")
    make.link(h, make.fc(front, "h_t"))
    assert refusals(make.done()) == {}


def test_operators_in_front_stay_where_they_are_read_as_something_else():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    weights = make.cell.Squeeze(make.cell.Tanh(make.sequence("w_t", D), "wide"), "weights", dims=[0])
    make.link(h, make.cell.Mul([make.cell.FC([h, weights, make.reference("b", N)], "u", axis=2), x], "h_t"))
    assert refusals(make.done(forward_only=True)) == {}


def test_operators_in_front_stay_where_their_value_cannot_be_told():
    step_net = recurrent(IN_FRONT["tanh"], forward_only=True)
    net, _, _ = build(step_net)
    operators = argument(loop_operator(net), "step_net").n.op
    copies = caffe2_pb2.NetDef()
    copies.op.extend([core.CreateOperator("Copy", ["front"], ["early"]), *operators])
    del operators[:]
    operators.extend(copies.op)
    assert reasons(net, RULE) == {}
