"""The rule `activations`, and `widths.py`, by which it knows how large blobs are."""

import pytest
from caffe2.python import workspace

import comparing
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.loop_reading import read_loops
from caffe2_recurrent.rewriting import vectorised
from caffe2_recurrent.rewriting.rules import activations
from caffe2_recurrent.rewriting.widths import elements, width
from caffe2_recurrent.sizes import Sizes
from cells import CELLS
from rewriting_support import Optimised
from step_nets import D, Maker, N, T, scoped

EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])


def assert_right(step_net, executor=True, rules=("activations",)):
    """A step net run optimised gives what the numpy loop gives; returns report and net."""
    rewrite = Optimised(rules)
    outputs, gradients = comparing.run(recurrent_net, step_net, executor, rewrite)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    return rewrite.report, rewrite.net


def reasons(report):
    return [refusal.reason for refusal in report.refusals]


def kinds(net, step="step_net"):
    (loop,) = [operator for operator in net.Proto().op if operator.type == "RecurrentNetwork"]
    return [operator.type for argument in loop.arg if argument.name == step for operator in argument.n.op]


def gated(in_place=False, **options):
    """h = Negative(a) with a = Tanh(Sigmoid(W h + b) + x)."""
    make = Maker()
    x, h = make.sequence(), make.state()
    u = make.fc(h, "u")
    opened = make.cell.Sigmoid(u, u if in_place else "opened")
    total = make.cell.Sum([opened, x], "total")
    bounded = make.cell.Tanh(total, total if in_place else "bounded")
    make.link(h, make.cell.Negative(bounded, "h_t"))
    return make.done(**options)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward"])
@EXECUTOR
def test_values_and_gradients_stay(in_place, forward_only, executor):
    report, net = assert_right(gated(in_place, forward_only=forward_only), executor=executor)
    assert report.counts == {"activations": 2}
    assert not {"Sigmoid", "Tanh"} & set(kinds(net))
    assert [rewrite.what for rewrite in report.rewrites] == [
        "Sigmoid -> '{}'".format("u" if in_place else "opened"),
        "Tanh -> '{}'".format("total" if in_place else "bounded"),
    ]


def test_what_the_backward_step_computes_again():
    report, net = assert_right(gated(recompute_blobs_on_backward=scoped("u", "opened", "total", "bounded")))
    assert report.counts["activations"] == 4
    assert not {"Sigmoid", "Tanh"} & set(kinds(net) + kinds(net, "backward_step_net"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_cell(cell):
    """The whole registry, with the backward step computing again what it can and not."""
    for changed in (cell, cell.remembering_nothing()):
        workspace.ResetWorkspace()
        rewrite = Optimised(["activations", "unread_blobs"])
        outputs, gradients, _ = changed.run(rewrite=rewrite)
        assert (rewrite.report.counts["activations"] > 0) == (cell.name not in ("lstm", "milstm"))
        for index, expected in enumerate(changed.reference()):
            comparing.assert_close(outputs[index], expected, index)
        for name, expected in changed.reference_gradients().items():
            comparing.assert_close(gradients[name], expected, name)


# Refusals.


def linked(**options):
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, make.cell.Tanh(make.cell.Sum([x, h], "total"), "h_t"))
    return make.done(**options)


@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward"])
def test_a_linked_output(forward_only):
    report, net = assert_right(linked(forward_only=forward_only))
    assert (report.total, reasons(report)) == (0, ["'h_t' is linked to an outer blob"])
    assert "Tanh" in kinds(net)


def chained():
    """In place after another operator in place."""
    make = Maker()
    x, h = make.sequence(), make.state()
    u = make.fc(h, "u")
    make.cell.Sum([u, x], [u])
    make.cell.Tanh(u, [u])
    make.link(h, make.cell.Negative(u, "h_t"))
    return make.done(forward_only=True)


def read_before():
    """In place on a blob that something else has read before."""
    make = Maker()
    x, h = make.sequence(), make.state()
    u = make.cell.Sum([make.fc(h, "v"), x], "u")
    negative = make.cell.Negative(u, "negative")
    make.cell.Tanh(u, [u])
    make.link(h, make.cell.Sum([u, negative], "h_t"))
    return make.done(forward_only=True)


@pytest.mark.parametrize("make", [chained, read_before], ids=lambda make: make.__name__)
def test_in_place_where_the_blob_is_needed(make):
    report, _ = assert_right(make())
    assert (report.total, reasons(report)) == (0, ["it works in place, and something else needs 'u' from before"])


def test_without_aten(monkeypatch):
    monkeypatch.setattr(activations, "aten_is_missing", lambda: True)
    report, _ = assert_right(gated())
    assert (report.total, reasons(report)) == (0, ["this Caffe2 has no ATen operator"] * 2)


def built(shapes=None, feeding=True, **options):
    step_net = gated(**options)
    net, outputs = comparing.build(recurrent_net, step_net)
    if not options.get("forward_only"):
        net.AddGradientOperators({outputs[0]: net.AddExternalInput("given")})
    if feeding:
        comparing.feed(step_net)
    return optimize(net, ["activations"], shapes, dry_run=True)


# From here on ATen's operators are faster, as they are on some processors.
ENOUGH = {"Sigmoid": 1200, "Tanh": 2500}


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(vectorised, "aten_is_faster", lambda kind, elements: elements >= ENOUGH[kind])


def test_small_blobs_are_left_alone(tried):
    report = built()
    assert reasons(report) == ["with {} elements {} is faster".format(N * D, kind) for kind in ("Sigmoid", "Tanh")]
    assert report.total == 0


def test_blobs_of_unknown_size_are_left_alone():
    unknown = "its size is not known, and {} is faster for a small one; give shapes"
    report = built(feeding=False)
    assert (report.total, reasons(report)) == (0, [unknown.format("Sigmoid"), unknown.format("Tanh")])


def test_given_shapes_decide(tried):
    def fired(batch, **options):
        report = built({"X": (T, batch, D), "u_b": (D,)}, feeding=False, **options)
        return [rewrite.what.split(" ")[0] for rewrite in report.rewrites]

    assert fired(399) == []
    assert fired(400) == ["Sigmoid"]
    assert fired(833) == ["Sigmoid"]
    assert fired(834) == ["Sigmoid", "Tanh"]
    again = scoped("u", "opened", "total", "bounded")
    assert fired(834, recompute_blobs_on_backward=again) == ["Sigmoid", "Tanh"] * 2


# How large blobs are.


def measured(make, shapes):
    """`width` and `elements` of the blob 'y' of a step, with the sequence X `[5, 2, 6]`, the state of width 3."""
    x, h = make.sequence(size=6), make.state()
    yield x, h
    make.link(h, make.cell.Negative(h, "h_t"))
    net, _ = comparing.build(recurrent_net, make.done(forward_only=True))
    (loop,) = read_loops(net.Proto()).values()
    sizes = Sizes({"X": (5, 2, 6), "h_initial": (2, 3), **shapes})
    yield width(loop, sizes, "y"), elements(loop, sizes, "y")


def sized(add, **shapes):
    make = Maker()
    steps = measured(make, shapes)
    x, h = next(steps)
    add(make.cell, x, h)
    return next(steps)


def test_sizes_of_blobs_of_the_step():
    assert sized(lambda net, x, h: net.Tanh(x, "y")) == (6, 12)
    assert sized(lambda net, x, h: net.Sum([h, "unknown"], "y")) == (3, 6)
    assert sized(lambda net, x, h: net.Add([h, "unknown"], "y")) == (None, 6)
    assert sized(lambda net, x, h: net.Mul([h, h], "y")) == (3, 6)
    assert sized(lambda net, x, h: net.FC([h, "w", "b"], "y"), b=(7,)) == (7, 14)
    assert sized(lambda net, x, h: net.FC([h, "w", "b"], "y")) == (None, None)
    # Broadcast, so at least as large as the larger one.
    assert sized(lambda net, x, h: net.Add(["encoder", h], "y"), encoder=(40, 2, 3)) == (3, 240)
    assert sized(lambda net, x, h: net.Add([x, h], "y")) == (None, 12)
    # No operator that keeps sizes, or none whose inputs are known.
    assert sized(lambda net, x, h: net.Transpose(x, "y", axes=[2, 1, 0])) == (None, None)
    assert sized(lambda net, x, h: net.Tanh("unknown", "y")) == (None, None)
    assert sized(lambda net, x, h: net.Tanh("outer", "y"), outer=(4, 5)) == (5, 20)


def test_sizes_of_parts():
    assert sized(lambda net, x, h: net.Split(x, ["a", "y"], axis=2)) == (3, 6)
    assert sized(lambda net, x, h: net.Split(x, ["a", "y"], axis=2, split=[2, 4])) == (None, None)
    assert sized(lambda net, x, h: net.Split(x, ["a", "y"], axis=1)) == (None, None)
    assert sized(lambda net, x, h: net.Split([x, "parts"], ["a", "y"], axis=2)) == (None, None)


def test_sizes_before_an_operator_in_place():
    make = Maker()
    x, h = make.sequence(size=6), make.state()
    y = make.cell.Tanh(x, "y")
    make.cell.Relu(y, "seen")
    make.cell.FC([h, "w", "b"], y)
    make.link(h, make.cell.Negative(h, "h_t"))
    net, _ = comparing.build(recurrent_net, make.done(forward_only=True))
    (loop,) = read_loops(net.Proto()).values()
    sizes = Sizes({"X": (5, 2, 6), "b": (7,)})
    assert [width(loop, sizes, "y", before) for before in (1, 2, 3, None)] == [6, 6, 7, 7]
