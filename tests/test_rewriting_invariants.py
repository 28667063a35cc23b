"""Operators whose result no step changes run once, before the loop."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core
from hypothesis import given
from hypothesis import strategies as st

import cells
import random_step_nets
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

RULE = "invariants"
D, N, T = step_nets.D, step_nets.N, step_nets.T
seeds = st.integers(0, 2**32 - 1)
alone = Alone(RULE)
assert_kept, assert_right, refusals = alone.assert_kept, alone.assert_right, alone.refusals


def masked(**options):
    """h_t = tanh(x * h * sigmoid(mask)): the sigmoid is the same in all steps."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    gate = make.cell.Sigmoid(make.reference("mask", 1, N, D), "gate")
    make.link(h, make.cell.Tanh(make.cell.Mul([make.cell.Mul([x, h], "xh"), gate], "gated"), "h_t"))
    return make.done(**options)


def test_an_operator_on_references_runs_before_the_loop():
    net, _, _ = build(masked())
    report = optimize(net, rules=[RULE])
    assert report.counts == {RULE: 1}
    assert [rewrite.what for rewrite in report.rewrites] == ["Sigmoid -> 'gate'"]
    assert [operator.type for operator in net.Proto().op][:2] == ["Sigmoid", "RecurrentNetwork"]
    outer = net.Proto().op[0].output[0]
    assert outer != "gate"
    assert outer in loop_operator(net).input and outer in loop_operator(net, "RecurrentNetworkGradient").input
    assert step_types(net) == ["Mul", "Mul", "Tanh"]
    # Its gradient operator stays, and reads the outer blob.
    (of_gate,) = [
        operator
        for operator in argument(loop_operator(net), "backward_step_net").n.op
        if operator.type == "SigmoidGradient"
    ]
    assert of_gate.input[0] == outer
    assert_right(masked())


@pytest.mark.parametrize("options", [{"forward_only": True}, {"recompute_blobs_on_backward": ["gate"]}], ids=str)
def test_without_a_backward_step_and_with_recomputed_blobs(options):
    assert assert_right(masked(**options)).counts == {RULE: 1}


def test_a_recomputed_operator_is_not_run_again():
    net, _, _ = build(masked(recompute_blobs_on_backward=["gate", "xh"]))
    assert "Sigmoid" in step_types(net, "backward_step_net")
    optimize(net, rules=[RULE])
    assert "Sigmoid" not in step_types(net, "backward_step_net")
    assert [blob.decode() for blob in argument(loop_operator(net), "recompute_blobs_on_backward").strings] == [
        "xh_shared"
    ]


def test_chains_move_operator_by_operator():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    first = make.cell.Mul([make.reference("v", 1, N, D), make.reference("w", 1, N, D)], "vw")
    second = make.cell.Tanh(first, "squashed")
    parts = make.cell.Split(second, ["left", "middle", "right"], axis=2)
    joined, _ = make.cell.Concat([parts[1], parts[0], parts[2]], ["joined", "joined_sizes"], axis=2)
    make.link(h, make.cell.Mul([make.cell.Sum([x, h], "xh"), joined], "h_t"))
    step_net = make.done()
    net, _, _ = build(step_net)
    assert optimize(net, rules=[RULE]).counts == {RULE: 4}
    assert step_types(net) == ["Sum", "Mul"]
    # There is no numpy Split or Concat.
    assert_kept(step_net)


def test_values_that_are_overwritten_are_versions():
    """y is tanh of w, read, and then added to in place."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    y = make.cell.Tanh(make.reference("w", 1, N, D), "y")
    sum_before = make.cell.Sum([y, h], "yh")
    make.cell.Sum([y, x], [y])
    make.link(h, make.cell.Mul([make.cell.Sum([y, sum_before], "both"), x], "h_t"))
    step_net = make.done(forward_only=True)
    assert assert_right(step_net).counts == {RULE: 1}


@pytest.mark.parametrize("recomputed", [[], ["y"], ["y", "squashed"]], ids=str)
def test_values_that_are_overwritten_and_computed_again(recomputed):
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    y = make.cell.Scale(make.reference("w", 1, N, D), "y", scale=0.5)
    make.cell.Sum([y, x], [y])
    make.link(h, make.cell.Mul([make.cell.Tanh(y, "squashed"), h], "h_t"))
    assert assert_right(make.done(recompute_blobs_on_backward=recomputed)).counts == {RULE: 1}


def test_in_place_operators_move_behind_each_other():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    y = make.cell.Scale(make.reference("w", 1, N, D), "y", scale=0.5)
    make.cell.Tanh(y, y)
    make.link(h, make.cell.Mul([make.cell.Sum([x, h], "xh"), y], "h_t"))
    assert assert_right(make.done()).counts == {RULE: 2}


def test_operators_without_inputs_move():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    half = make.cell.ConstantFill([], "half", shape=[1, N, D], value=0.5)
    make.link(h, make.cell.Mul([make.cell.Mul([x, h], "xh"), half], "h_t"))
    # There is no numpy ConstantFill.
    assert assert_kept(make.done(forward_only=True)).counts == {RULE: 1}


def test_an_operator_that_nothing_reads_moves_too():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.cell.Tanh(make.reference("w", 1, N, D), "unread")
    make.link(h, make.cell.Mul([x, h], "h_t"))
    net, _, _ = build(make.done())
    assert optimize(net, rules=[RULE]).counts == {RULE: 1}
    assert list(loop_operator(net).input) == ["X", "h_initial", "w"]


def test_operators_of_the_backward_step_move():
    """The joined indices of a table's two gradients are the same in all steps, and what makes them flat."""
    net, _, _ = build(step_nets.sparse_and_twice())
    report = optimize(net, rules=[RULE])
    assert [rewrite.what.split()[0] for rewrite in report.rewrites] == [
        "Gather",
        "ExpandDims",
        "Gather",
        "ExpandDims",
        *2 * ["Shape", "Slice", "FlattenToVec", "Shape", "Concat", "FlattenToVec"],
        "Concat",
    ]
    # That of the values stays.
    assert step_types(net, "backward_step_net").count("Concat") == 1
    assert_right(step_nets.sparse_and_twice())


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_registry(make):
    expected = {
        "multiplicative": 1,
        "undifferentiated_reference": 1,
        "initial_state_compared_in_the_step": 3,
        "sequence_read_whole": 2,
        "sparse_and_twice": 17,
        # The shape of a row of the table.
        "sequence_without_gradient": 2,
    }
    assert assert_kept(make()).counts == {RULE: expected.get(make.__name__, 0)}


@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_layers_have_no_invariants(cell):
    report = rewritten_layer(cell, [RULE])
    assert report.total == 0 and report.refusals == ()


@given(seeds, st.integers(1, 2), st.booleans())
def test_random_step_nets(seed, sequences, recompute):
    step_net, options = random_case(seed, sequences, recompute)
    assert_kept(step_net, **options)


def test_some_random_step_nets_have_invariants():
    """The property above would say little if none had."""
    counted = [optimize(build(random_step_nets.step_net(seed))[0], rules=[RULE]).total for seed in range(40)]
    assert sum(count > 0 for count in counted) > 5


# Refusals. The step nets are changed by hand where no builder makes what is refused.


def forward_net(add):
    """A step net without backward step: `add(make, w)` adds operators on the reference `w`, and gives one to read."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    read = add(make, make.reference("w", 1, N, D))
    make.link(h, make.cell.Mul([make.cell.Mul([x, h], "xh"), read], "h_t"))
    return make.done(forward_only=True)


def test_refuses_random_operators():
    step_net = forward_net(lambda make, w: make.cell.UniformFill([w], "noise", input_as_shape=0))
    assert refusals(step_net) == {"UniformFill -> 'noise'": "it draws other numbers in each step"}


def test_refuses_operators_it_does_not_know():
    step_net = forward_net(lambda make, w: make.cell.DequeueBlobs([w], "next"))
    assert refusals(step_net) == {"DequeueBlobs -> 'next'": "it is not known to give the same each time it runs"}


def test_refuses_states():
    """The step has to fill its slice of the states."""
    make = step_nets.Maker()
    make.sequence()
    make.link(make.state(), make.cell.Tanh(make.reference("w", 1, N, D), "h_t"))
    reason = "'h_t' is a slice of an outer blob, which each step has to fill"
    assert refusals(make.done(forward_only=True)) == {"Tanh -> 'h_t'": reason}


def test_refuses_outputs_of_the_step():
    def add(make, w):
        watched = make.cell.Tanh(w, "watched")
        make.cell.AddExternalOutputs(watched)
        return watched

    assert refusals(forward_net(add)) == {"Tanh -> 'watched'": "'watched' is an output of the step"}


def test_refuses_what_is_read_before_it_is_written():
    """A step that finds what the step before has left there."""
    step_net = masked(forward_only=True)
    net, _, _ = build(step_net)
    operators = argument(loop_operator(net), "step_net").n.op
    early = caffe2_pb2.OperatorDef()
    early.CopyFrom(core.CreateOperator("Copy", ["gate"], ["before"]))
    reordered = [early, *operators]
    copies = caffe2_pb2.NetDef()
    copies.op.extend(reordered)
    del operators[:]
    operators.extend(copies.op)
    assert reasons(net, RULE) == {"Sigmoid -> 'gate'": "'gate' is read before it is written"}


def test_refuses_what_an_unknown_operator_changes_in_place():
    def add(make, w):
        y = make.cell.Copy(w, "y")
        rows = make.cell.AddScopedExternalInputs("rows")[0]
        make.outer[str(rows)] = np.array([0], dtype=np.int64)
        make.cell.ScatterAssign([y, rows, make.inputs[0][0]], [y])
        return y

    assert refusals(forward_net(add)) == {"Copy -> 'y'": "ScatterAssign works in place on 'y'"}


def test_refuses_what_the_backward_step_writes_in_another_way():
    net, _, _ = build(masked())
    for operators in backward_operators(net):
        operators.extend([core.CreateOperator("Copy", ["h_t_grad"], ["gate"])])
    assert reasons(net, RULE) == {"Sigmoid -> 'gate'": "the backward step writes 'gate' too"}


def test_refuses_kept_values_that_the_backward_step_computes_again():
    """The backward step reads y before it computes y again; whose value that is is not ours to know."""
    net, _, _ = build(masked(recompute_blobs_on_backward=["gate"]))
    for operators in backward_operators(net):
        copies = caffe2_pb2.NetDef()
        copies.op.extend([core.CreateOperator("Copy", ["gate"], ["early"]), *operators])
        del operators[:]
        operators.extend(copies.op)
    assert reasons(net, RULE) == {"Sigmoid -> 'gate'": "the backward step writes 'gate' too"}


def test_refuses_gradients_that_are_added_up():
    """A gradient that is the same in each step still counts once a step."""
    net, _, _ = build(masked())
    (name,) = [
        blob.decode() for blob in argument(loop_operator(net, "RecurrentNetworkGradient"), "param_grads").strings
    ]
    for operators in backward_operators(net):
        (writing,) = [operator for operator in operators if name in operator.output]
        writing.CopyFrom(core.CreateOperator("Copy", ["mask"], [name]))
    assert reasons(net, RULE, count=1) == {"Copy -> '{}'".format(name): "'{}' is an output of the step".format(name)}


@pytest.mark.parametrize("kind", ["Copy", "Sum"])
def test_refuses_backward_operators_on_blobs_of_the_forward_step(kind):
    """Copy h_prev -> blob, or h_prev + blob -> total, in the forward step; Copy mask -> blob in the backward step."""
    net, _, _ = build(masked())
    added = {
        "Copy": core.CreateOperator("Copy", ["h_prev"], ["blob"]),
        "Sum": core.CreateOperator("Sum", ["h_prev", "blob"], ["total"]),
    }
    for operator_kind in ("RecurrentNetwork", "RecurrentNetworkGradient"):
        argument(loop_operator(net, operator_kind), "step_net").n.op.extend([added[kind]])
    for operators in backward_operators(net):
        operators.extend([core.CreateOperator("Copy", ["mask"], ["blob"])])
    assert reasons(net, RULE, count=1) == {"Copy -> 'blob'": "the forward step uses 'blob' too"}


def test_state_blobs_are_no_references():
    """An operator that reads all states by the name of their outer blob sees other values in each step."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Mul([x, h], "h_t"))
    net, _, _ = build(make.done(forward_only=True))
    operator = loop_operator(net)
    states = argument(operator, "recurrent_states").strings[0].decode()
    operator.input.append(states)
    argument(operator, "step_net").n.op.extend([core.CreateOperator("Copy", [states], ["all"])])
    assert reasons(net, RULE) == {}
