"""The rule `activations`."""

import pytest
from caffe2.python import workspace

import comparing
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.rules import activations
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


def chained(before, **options):
    """In place after another operator in place."""
    make = Maker()
    x, h = make.sequence(), make.state()
    u = make.fc(h, "u")
    before(make, u, x)
    make.cell.Tanh(u, [u])
    make.link(h, make.cell.Negative(u, "h_t"))
    return make.done(**options)


@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward"])
@pytest.mark.parametrize("executor", [False, True], ids=["plain", "executor"])
def test_in_place_after_a_sum_in_place(forward_only, executor):
    step = chained(lambda make, u, x: make.cell.Sum([u, x], [u]), forward_only=forward_only)
    report, net = assert_right(step, executor=executor)
    assert [rewrite.what for rewrite in report.rewrites] == ["Tanh -> 'u'"]
    assert "Tanh" not in kinds(net)


def limited():
    """In place after another one that is not known to do as well elsewhere."""
    return chained(lambda make, u, x: make.cell.Sqr([u], [u]), forward_only=True)


def read_before():
    """In place on a blob that something else has read before."""
    make = Maker()
    x, h = make.sequence(), make.state()
    u = make.cell.Sum([make.fc(h, "v"), x], "u")
    negative = make.cell.Negative(u, "negative")
    make.cell.Tanh(u, [u])
    make.link(h, make.cell.Sum([u, negative], "h_t"))
    return make.done(forward_only=True)


@pytest.mark.parametrize("make", [limited, read_before], ids=lambda make: make.__name__)
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
        shapes = {"X": (T, batch, D), "h_initial": (batch, D), "u_w": (D, D), "u_b": (D,)}
        report = built(shapes, feeding=False, **options)
        return [rewrite.what.split(" ")[0] for rewrite in report.rewrites]

    assert fired(399) == []
    assert fired(400) == ["Sigmoid"]
    assert fired(833) == ["Sigmoid"]
    assert fired(834) == ["Sigmoid", "Tanh"]
    again = scoped("u", "opened", "total", "bounded")
    assert fired(834, recompute_blobs_on_backward=again) == ["Sigmoid", "Tanh"] * 2
