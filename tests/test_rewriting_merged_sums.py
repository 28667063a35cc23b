"""Sums of sums become one sum."""

import random

import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core
from hypothesis import given
from hypothesis import strategies as st

import cells
import step_nets
from caffe2_recurrent import optimize
from rewritten_loops import argument, backward_operators, build, loop_operator, random_case, reasons, rewritten_layer
from rewritten_loops import assert_kept as kept
from rewritten_loops import assert_right as right

RULE = "merged_sums"
seeds = st.integers(0, 2**32 - 1)


def assert_kept(step_net, **options):
    return kept(step_net, [RULE], **options)


def assert_right(step_net, **options):
    return right(step_net, [RULE], **options)


def sums(net, name="step_net"):
    """Inputs and output of the sums of a step."""
    operators = argument(loop_operator(net), name).n.op
    return [(list(operator.input), operator.output[0]) for operator in operators if operator.type == "Sum"]


def chain(first, second, add=None, **options):
    """p = x * x, q = x * h, r = h * h, and sums as told, like `chain(('pq', 's'), ('sr', 'y'))`; h_t = tanh(y)."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    for name, factors in (("p", [x, x]), ("q", [x, h]), ("r", [h, h])):
        make.cell.Mul(factors, [name])
    make.cell.Sum(list(first[0]), [first[1]])
    if add is not None:
        add(make)
    make.cell.Sum(list(second[0]), [second[1]])
    make.link(h, make.cell.Tanh(second[1], "h_t"))
    return make.done(**options)


# Sums before, and the one after them.
CHAINS = {
    "apart": (("pq", "s"), ("sr", "y"), ("pqr", "y")),
    "second": (("pq", "s"), ("rs", "y"), ("rpq", "y")),
    "first in place": (("pq", "p"), ("pr", "y"), ("pqr", "y")),
    "second in place": (("pq", "s"), ("sr", "s"), ("pqr", "s")),
    "both in place": (("pq", "p"), ("pr", "p"), ("pqr", "p")),
    "in the place of the other": (("pq", "s"), ("rs", "r"), ("rpq", "r")),
    "in the place of the first": (("pq", "s"), ("sr", "p"), ("pqr", "p")),
    "in the place of the last": (("pq", "s"), ("sr", "q"), ("qpr", "q")),
    "three and one": (("pqr", "s"), ("s", "y"), ("pqr", "y")),
    "the same twice": (("pp", "s"), ("sp", "y"), ("ppp", "y")),
}


@pytest.mark.parametrize("name", CHAINS)
def test_two_sums_become_one(name):
    first, second, (addends, total) = CHAINS[name]
    net, _, _ = build(chain(first, second))
    report = optimize(net, rules=[RULE])
    assert report.counts[RULE] >= 1
    assert report.rewrites[0].what == "Sum '{}' -> Sum '{}'".format(first[1], second[1])
    assert sums(net) == [(list(addends), total)]
    assert_right(chain(first, second))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_without_a_backward_step_and_with_recomputed_blobs(name, recomputed):
    first, second, _ = CHAINS[name]
    if recomputed:
        options = {"recompute_blobs_on_backward": sorted({"p", "q", "r", first[1], second[1]})}
    else:
        options = {"forward_only": True}
    assert assert_right(chain(first, second, **options)).counts[RULE] >= 1


def test_sums_that_are_computed_again_are_merged_there_too():
    net, _, _ = build(chain(("pq", "s"), ("sr", "y"), recompute_blobs_on_backward=["s", "y"]))
    assert optimize(net, rules=[RULE]).counts == {RULE: 2}
    assert (["p", "q", "r"], "y_shared") in sums(net, "backward_step_net")
    shared = argument(loop_operator(net), "recompute_blobs_on_backward").strings
    assert [blob.decode() for blob in shared] == ["y_shared"]


def test_what_the_backward_step_computes_again_for_others_stays_shared():
    """There s is read twice, and only the forward step can do without it."""
    net, _, _ = build(chain(("pq", "s"), ("sr", "y"), recompute_blobs_on_backward=["s", "y"]))
    for operators in backward_operators(net):
        operators.extend([core.CreateOperator("Copy", ["s"], ["reader"])])
    assert optimize(net, rules=[RULE]).counts == {RULE: 1}
    shared = argument(loop_operator(net), "recompute_blobs_on_backward").strings
    assert sorted(blob.decode() for blob in shared) == ["s_shared", "y_shared"]


def test_long_chains():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    total = make.cell.Mul([x, h], "v0")
    for number in range(1, 5):
        total = make.cell.Sum(
            [total, make.cell.Scale(h, "u{}".format(number), scale=0.1 * number)], ["v{}".format(number)]
        )
    make.link(h, make.cell.Tanh(total, "h_t"))
    step_net = make.done()
    net, _, _ = build(step_net)
    optimize(net, rules=[RULE])
    assert sums(net) == [(["v0", "u1", "u2", "u3", "u4"], "v4")]
    assert_right(step_net)


def test_sums_of_the_backward_step():
    """Three gradients meet that of a_t, which the next step and the outside give."""
    net, _, _ = build(step_nets.state_read_twice_by_others())
    before = sums(net, "backward_step_net")
    assert optimize(net, rules=[RULE]).counts == {RULE: 1}
    assert len(sums(net, "backward_step_net")) == len(before) - 1
    assert_right(step_nets.state_read_twice_by_others())


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_registry(make):
    expected = {"multiplicative": 1, "state_read_twice_by_others": 1}
    assert assert_kept(make()).counts == {RULE: expected.get(make.__name__, 0)}


@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_layers_have_no_sums_of_sums(cell):
    assert rewritten_layer(cell, [RULE]).total == 0


@given(seeds, st.integers(1, 2), st.booleans())
def test_random_step_nets(seed, sequences, recompute):
    step_net, options = random_case(seed, sequences, recompute)
    assert_kept(step_net, **options)


def adding(seed):
    """A random step net of sums, half of them in place, and a few other operators."""
    draw = random.Random(seed)
    make = step_nets.Maker(seed % 2**32)
    readable = [make.sequence(), make.state()]
    written = []
    for number in range(draw.randint(4, 9)):
        addends = [draw.choice(readable) for _ in range(draw.randint(2, 3))]
        output = "v{}".format(number)
        if written and draw.random() < 0.5:
            output = draw.choice(written)
            addends = [output] + [blob for blob in addends[1:] if blob != output]
        if draw.random() < 0.2:
            # Its gradient reads no values, so that they may be overwritten.
            addends, kind = addends[:1], "Negative"
            output = "v{}".format(number)
        else:
            kind = "Sum"
        getattr(make.cell, kind)(addends, [output])
        written = [blob for blob in written if blob != output] + [output]
        readable.append(output)
    # Sums of sums grow, and where tanh is flat its gradient is nothing but rounding.
    small = make.cell.Scale(written[-1], "small", scale=0.01)
    make.link(make.initial[0][0], make.cell.Tanh(small, "h_t"))
    recomputed = sorted(set(written)) if draw.random() < 0.4 else []
    return make.done(recompute_blobs_on_backward=recomputed)


@given(seeds)
def test_random_sums(seed):
    assert_kept(adding(seed))


def test_many_random_sums_are_merged():
    counted = [optimize(build(adding(seed))[0], rules=[RULE]).total for seed in range(40)]
    assert sum(count > 0 for count in counted) > 20


# Refusals.


def refusals(step_net, **options):
    return reasons(build(step_net, **options)[0], RULE)


def between(kind, inputs, output):
    return lambda make: getattr(make.cell, kind)(inputs, [output])


def test_refuses_sums_that_are_read_elsewhere_too():
    step_net = chain(("pq", "s"), ("sr", "y"), between("Tanh", ["s"], "other"), forward_only=True)
    assert refusals(step_net) == {"Sum 's' -> Sum 'y'": "'s' is read elsewhere too"}


def test_refuses_sums_that_are_added_more_than_once():
    step_net = chain(("pq", "s"), ("ss", "y"), forward_only=True)
    assert refusals(step_net) == {"Sum 's' -> Sum 'y'": "'s' is added more than once"}


def test_refuses_to_add_a_blob_twice_in_its_own_place():
    """p = p + q + p would add to p what has changed already."""
    step_net = chain(("pp", "s"), ("sr", "p"), forward_only=True)
    reason = "'p' is added more than once, and the sum takes its place"
    assert refusals(step_net) == {"Sum 's' -> Sum 'p'": reason}


def test_refuses_addends_that_are_overwritten():
    step_net = chain(("pq", "s"), ("sr", "y"), between("Tanh", ["q"], "q"), forward_only=True)
    assert refusals(step_net) == {"Sum 's' -> Sum 'y'": "'q' is overwritten between the two"}


def test_refuses_addends_whose_slice_is_overwritten():
    """Two names for slice t of one outer blob."""
    step_net = chain(("pq", "s"), ("sr", "y"), between("Copy", ["r"], "other"), forward_only=True)
    net, _, _ = build(step_net)
    operator = loop_operator(net)
    for blob in ("q", "other"):
        argument(operator, "link_internal").strings.append(blob.encode())
        argument(operator, "link_external").strings.append(b"buffer")
        argument(operator, "link_offset").ints.append(0)
    assert reasons(net, RULE) == {"Sum 's' -> Sum 'y'": "'q' is overwritten between the two"}


def test_refuses_states():
    make = step_nets.Maker()
    x, a, b = make.sequence(), make.state("a"), make.state("b")
    a_t = make.cell.Sum([x, a], "a_t")
    make.link(a, a_t)
    make.link(b, make.cell.Sum([a_t, b], "b_t"))
    assert refusals(make.done(forward_only=True)) == {"Sum 'a_t' -> Sum 'b_t'": "'a_t' is needed outside of the step"}


def test_refuses_outputs_of_the_step():
    step_net = chain(
        ("pq", "s"), ("sr", "y"), lambda make: make.cell.AddExternalOutputs(core.BlobReference("s")), forward_only=True
    )
    assert refusals(step_net) == {"Sum 's' -> Sum 'y'": "'s' is needed outside of the step"}


def test_refuses_what_the_backward_step_reads():
    net, _, _ = build(chain(("pq", "s"), ("sr", "y")))
    for operators in backward_operators(net):
        operators.extend([core.CreateOperator("Copy", ["s"], ["reader"])])
    assert reasons(net, RULE) == {"Sum 's' -> Sum 'y'": "'s' is needed outside of the step"}


def test_refuses_gradients_that_are_added_up():
    """The gradient of w is one, and goes on into another sum."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    w = make.reference("w", 1, step_nets.N, step_nets.D)
    make.link(h, make.cell.Mul([make.cell.Mul([x, h], "xh"), w], "h_t"))
    net, _, _ = build(make.done())
    operator = loop_operator(net, "RecurrentNetworkGradient")
    (name,) = [blob.decode() for blob in argument(operator, "param_grads").strings]
    for operators in backward_operators(net):
        copies = caffe2_pb2.NetDef()
        copies.op.extend(operators)
        (writing,) = [operator for operator in copies.op if name in operator.output]
        writing.output[list(writing.output).index(name)] = "share"
        copies.op.extend(
            [
                core.CreateOperator("Sum", ["share", "share"], [name]),
                core.CreateOperator("Sum", [name, "share"], ["more"]),
            ]
        )
        del operators[:]
        operators.extend(copies.op)
    assert reasons(net, RULE) == {
        "Sum '{}' -> Sum 'more'".format(name): "'{}' is needed outside of the step".format(name)
    }


def test_what_was_a_zero_among_the_addends_of_a_sum_goes_with_it():
    """x is seen as x_t and as y_t, of which the step makes nothing: its gradient is a sum, and that with zeros."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.inputs.append((make.cell.AddExternalInput("y_t"), make.inputs[0][1]))
    make.link(h, make.cell.Sum([make.cell.Mul([x, h], "xh"), make.cell.Sqr(x, "xx")], "h_t"))
    net, _, _ = build(make.done(outputs_with_grads="auto"))
    report = optimize(net, trials=False)
    assert {report.counts["merged_sums"], report.counts["zero_gradients"]} == {1}
    assert not optimize(net, trials=False).total


def test_a_sum_that_is_overwritten_before_anything_reads_it():
    """Nobody would wait for it then: the RNN executor might write it after what overwrites it."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    total = make.cell.Sum([x, h], ["s"])
    make.cell.Sum([total, h], [total])
    make.link(h, make.cell.Mul([make.cell.Tanh(x, total), h], "h_t"))
    net, _, _ = build(make.done())
    assert reasons(net, RULE) == {"Sum 's' -> Sum 's'": "'s' is overwritten before anything reads it"}
