"""`fixed_splits`: splits of a backward step without the sizes that the forward step has seen."""

import numpy as np
import pytest
from caffe2.python import workspace

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from cells import CELLS
from step_nets import D, Maker, N, T
from test_rewriting_rules import EXECUTOR, loop_of, made, reasons_in, set_argument, why

RULE = "fixed_splits"
WIDE = 5


def joined(axis=2, options=None):
    """The state and a wider sequence, one behind the other."""
    make = Maker()
    x, h = make.sequence(size=WIDE if axis == 2 else D), make.state()
    both, _ = make.cell.Concat([h, x], ["both", "both_sizes"], axis=axis)
    if axis == 2:
        make.link(h, make.cell.Tanh(make.fc(both, "u", D + WIDE), "h_t"))
    else:
        # Twice as many rows, of which the state gets the sum of two.
        first, second = make.cell.Split(make.cell.Sin(make.fc(both, "u"), "v"), ["first", "second"], axis=axis)
        make.link(h, make.cell.Tanh(make.cell.Sum([first, second], "sum"), "h_t"))
    return make.done(**(options or {}))


def three():
    """Of three, one of them twice."""
    make = Maker()
    x, h = make.sequence(size=WIDE), make.state()
    both, _ = make.cell.Concat([h, x, h], ["both", "both_sizes"], axis=2)
    make.link(h, make.cell.Tanh(make.fc(both, "u", 2 * D + WIDE), "h_t"))
    return make.done()


def recomputed():
    """The backward step puts them together again."""
    return joined(options={"recompute_blobs_on_backward": ["both", "both_sizes"]})


def splits(net):
    return [operator for operator in support.backward_step(net).op if operator.type == "Split"]


def built(step_net):
    net, outputs = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    net.AddGradientOperators([outputs[0]])
    return net


@pytest.mark.parametrize("make", [joined, three, recomputed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("rules", [[RULE], [RULE, "parameter_gradients", "backward_loop"], None], ids=str)
@EXECUTOR
def test_values_and_gradients(make, rules, executor, backward_loops):
    with support.optimising(rules) as lines:
        comparing.assert_right(recurrent_net, make(), executor=executor)
    assert lines.counts[RULE] == 1


@pytest.mark.parametrize("make, split", [(joined, [D, WIDE]), (three, [D, WIDE, D])], ids=["two", "three"])
def test_the_step_keeps_no_sizes(make, split):
    net = built(make())
    (before,) = splits(net)
    assert [blob.split("/")[-1] for blob in before.input[1:]] == ["both_sizes"]
    assert optimize(net, [RULE]).counts == {RULE: 1}
    (after,) = splits(net)
    assert len(after.input) == 1 and list(support.argument(after, "split").ints) == split
    assert list(after.output) == list(before.output)
    support.assert_done(net, [RULE])


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.name.startswith("gru")], ids=lambda cell: cell.name)
def test_a_gru_has_the_values_and_gradients_of_a_numpy_loop(cell, backward_loops):
    rules = ["parameter_gradients", RULE, "backward_loop"]
    fired, reasons = support.fired_on(cell, rules, "backward_loop")
    assert fired, reasons
    # Where it keeps what its backward step reads, that is sizes too.
    without, _ = support.fired_on(cell, [rules[0], rules[2]], "backward_loop")
    assert without < fired


def runs_of_other_sizes(rules):
    net, outputs = comparing.build(recurrent_net, joined())
    comparing.feed(joined())
    gradients = net.AddGradientOperators([outputs[0]])
    optimize(net, rules)
    workspace.CreateNet(net)
    found = []
    for steps, batch in ((T, N), (1, 1), (7, 4), (2, N)):
        random = np.random.RandomState(steps)
        for blob, shape in {"X": (steps, batch, WIDE), "h_initial": (batch, D)}.items():
            workspace.FeedBlob(blob, random.randn(*shape).astype(np.float32))
        workspace.RunNet(net)
        found += support.values([outputs[0], *map(str, gradients.values())])[0]
    return found, {}


def test_runs_of_other_sizes():
    expected = runs_of_other_sizes([])
    workspace.ResetWorkspace()
    support.assert_same(runs_of_other_sizes([RULE]), expected)


def test_a_wrong_split_is_seen():
    def wrong(net):
        optimize(net, [RULE])
        (operator,) = splits(net)
        set_argument(operator, split=[WIDE, D])
        for given in support.operator(net, support.GRADIENT).arg:
            if given.name == "backward_step_net":
                (planted,) = [other for other in given.n.op if other.type == "Split"]
                planted.CopyFrom(operator)

    expected = comparing.run(recurrent_net, joined())
    workspace.ResetWorkspace()
    with pytest.raises((AssertionError, RuntimeError)):
        support.assert_same(comparing.run(recurrent_net, joined(), rewrite=wrong), expected)


# ------------------------------------------------------------------------------------------------------------ refusals


def of_another_axis(loop):
    (splitting,) = [operator for operator in loop.gradient.operators if operator.type == "Split"]
    set_argument(splitting, axis=1)


def another_writes_them(loop):
    (joining,) = [operator for operator in loop.operators if operator.type == "Concat"]
    loop.operators.append(made("Copy", [joining.input[0]], [joining.output[1]]))


@pytest.mark.parametrize(
    "plant, reason",
    [
        (lambda loop: None, None),
        (of_another_axis, "it is not about columns"),
        (another_writes_them, "several operators write '{}'"),
    ],
    ids=["none", "of another axis", "written twice"],
)
def test_refusals(plant, reason):
    loop = loop_of(built(joined()))
    plant(loop)
    (sizes,) = [operator.output[1] for operator in loop.operators if operator.type == "Concat"]
    shapes = {loop.inputs[0]: (T, N, WIDE), "h_initial": (N, D)}
    assert why(RULE, loop, shapes) == [reason and reason.format(sizes)]


def test_rows_are_not_columns():
    report = optimize(built(joined(axis=1)), [RULE])
    assert report.total == 0 and reasons_in(report, RULE) == ["it is not about columns"]


def test_sizes_that_are_not_known():
    loop = loop_of(built(joined()))
    (joining,) = [operator for operator in loop.operators if operator.type == "Concat"]
    reason = "the size of '{}' and '{}' is not known; give shapes".format(*joining.input)
    assert why(RULE, loop, {}) == [reason]
    # Where the batch is known, so is the state.
    reason = "the size of '{}' is not known; give shapes".format(joining.input[1])
    assert why(RULE, loop, {"h_initial": (N, D)}) == [reason]


def test_what_is_told_its_sizes_otherwise():
    """By the step, by an outer blob, or not at all."""
    loop = loop_of(built(joined()))
    (splitting,) = [operator for operator in loop.gradient.operators if operator.type == "Split"]
    rule = support.rule(RULE)
    splitting.input[1] = "outer_sizes"
    assert list(rule.sites(loop)) == []
    del splitting.input[1:]
    assert list(rule.sites(loop)) == []
    assert list(rule.sites(loop_of(support.lstm(gradients=False)[0].net))) == []
