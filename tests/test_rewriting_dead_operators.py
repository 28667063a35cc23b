"""What is overwritten before anything reads it is not run: the RNN executor might run it last."""

import types

import pytest
from caffe2.python import core

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.steps import dead_operators
from rewritten_loops import build

RULE = "sequence_operators"


def reader_that_can_be_moved_out(overwriting=None):
    """The Mul in place is ordered by what it reads, until that is a slice of what is made of all steps at once.

    What overwrites its result is a product of what has been read of it, or of a reference called `overwriting`.
    """
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    scaled = make.cell.Scale(x, "v", scale=0.5)
    negative = make.cell.Negative(scaled, "w")
    make.cell.Mul([scaled, h], scaled)
    factor = make.reference(overwriting, 1, step_nets.N, step_nets.D) if overwriting else negative
    make.cell.Mul([factor, factor], scaled)
    product = make.cell.Mul([make.fc(negative, "u"), h], "product")
    make.link(h, make.cell.Tanh(make.cell.Sum([scaled, product], "total"), "h_t"))
    return make.done()


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
def test_what_a_rule_has_left_without_a_reader_goes(executor):
    net, _, _ = build(reader_that_can_be_moved_out())
    assert support.unordered(net.Proto()) == []
    assert optimize(net, [RULE], even_if_slower=True).counts[RULE] == 3
    assert support.unordered(net.Proto()) == []
    assert [operator.type for operator in support.step(net).op] == ["Mul", "Mul", "Sum", "Tanh"]
    with support.optimising([RULE]):
        comparing.assert_right(recurrent_net, reader_that_can_be_moved_out(), executor=executor)


def test_it_is_seen_where_it_does_not_go(monkeypatch):
    monkeypatch.setattr(dead_operators, "remove", lambda loop, but: False)
    net, _, _ = build(reader_that_can_be_moved_out())
    optimize(net, [RULE], even_if_slower=True)
    assert set(support.unordered(net.Proto())) == {"v"}


def stateful(kind):
    """A loop that Caffe2's own builder might have made, of operators that nobody reads, and two sums to merge."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    total = make.cell.Sum([make.cell.Sum([x, h], "sum"), x], "total")
    make.link(h, make.cell.Tanh(total, "h_t"))
    net, _, _ = build(make.done(forward_only=True))
    step = support.step(net).op
    for _ in range(2):
        step.add(type=kind, input=["x_t"], output=["dummy"])
    return net


@pytest.mark.parametrize("kind", ["Python", "CountUp", "Tanh"])
def test_what_was_so_before_stays(kind):
    net = stateful(kind)
    assert optimize(net, ["merged_sums"]).counts["merged_sums"] == 1
    assert [operator.type for operator in support.step(net).op].count(kind) == (3 if kind == "Tanh" else 2)


def test_memory_that_is_read_by_another_name_stays():
    operators = [
        core.CreateOperator("Sum", ["x", "h"], ["a"]),
        core.CreateOperator("Alias", ["a"], ["v"]),
        core.CreateOperator("Negative", ["x"], ["a"]),
        core.CreateOperator("Copy", ["v"], ["h_t"]),
        core.CreateOperator("Copy", ["h"], ["a"]),
    ]
    loop = types.SimpleNamespace(steps=[operators])
    assert not dead_operators.remove(loop, frozenset())
    del operators[1], operators[2]
    # Without the other name the first two are dead.
    assert dead_operators.remove(loop, frozenset())
    assert [operator.type for operator in operators] == ["Copy"]


def test_rules_that_were_in_doubt_are_asked_again():
    """Two operators write a blob, so that `invariants` leaves both where they are, until one of them is gone."""
    step_net = reader_that_can_be_moved_out(overwriting="reference")
    net, _, _ = build(step_net)
    report = optimize(net, ["invariants", RULE], even_if_slower=True)
    assert (report.counts["invariants"], report.counts[RULE]) == (1, 3)
    assert optimize(net, ["invariants", RULE], even_if_slower=True).total == 0
    with support.optimising(["invariants", RULE]):
        comparing.assert_right(recurrent_net, step_net)


def test_recomputing_leaves_out_what_is_overwritten_before_it_is_read():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    scaled = make.cell.Scale(x, "v", scale=0.5)
    read = make.cell.Tanh(make.cell.Sum([scaled, h], "total"), "read")
    make.cell.Mul([x, read], scaled)
    make.link(h, make.cell.Mul([scaled, read], "h_t"))
    step_net = make.done(recompute_blobs_on_backward=step_nets.scoped("v"))
    net, _, _ = build(step_net)
    assert support.unordered(net.Proto()) == []
    comparing.assert_right(recurrent_net, step_net)
