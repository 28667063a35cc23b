"""`broadcasts`: sums and products with a fixed blob of another shape, by ATen's operators."""

import pytest

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.rules import broadcasts
from every_pair import every_pair
from onednn_support import leaving_no_trace
from step_nets import D, N, T
from test_rewriting_rules import EXECUTOR, loop_of, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net
from test_rewriting_sequence_gradient import assert_kept
from test_rewriting_vector_products import count_in_attention, every_attention, writing

RULE = "broadcasts"
WITH = pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
S = 5


def over_positions(make, x, h):
    """The sum over S of tanh(A h + B), and x."""
    scaled = make.cell.Mul([make.reference("A", S, N, D), h], "scaled")
    shifted = make.cell.Add([make.cell.Tanh(scaled, "bounded"), make.reference("B", 1, D)], "shifted")
    total = make.cell.ReduceFrontSum(make.cell.Tanh(shifted, shifted), "total")
    make.cell.ExpandDims(total, total, dims=[0])
    return make.cell.Tanh(make.cell.Sum([total, x], "sum"), "h_t")


def kinds(net):
    return [operator.type for operator in support.step(net).op]


@EXECUTOR
@WITH
def test_values_and_gradients(rules, executor):
    net = assert_kept(over_positions, RULE, 2, rules, executor)
    assert not {"Add", "Mul"} & set(kinds(net)) and "ATen" in kinds(net)


@every_pair
@every_attention
@WITH
def test_attention(cell, variant, rules):
    """Also where the sum is computed again."""
    assert count_in_attention(cell, variant, RULE, rules) == (1 if variant == "kept" else 2)


def test_a_wrong_sum_is_seen():
    expected = Net(over_positions).values()
    net = Net(over_positions)
    optimize(net.net, [RULE], even_if_slower=True)
    for operator in net.net.Proto().op:
        for given in operator.arg:
            if given.name == "step_net":
                (sum_, _) = reversed([other for other in given.n.op if other.type == "ATen"])
                set_argument(sum_, alpha=1.01)
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(net.values(), expected)


# What it refuses.

SHAPES = {"A": (S, N, D), "B": (1, D), "h_initial": (N, D), "loop/X": (T, N, D)}


def loop():
    return loop_of(Net(over_positions, forward_only=True).net)


def test_the_places_that_it_is_about():
    assert why(RULE, loop(), SHAPES) == [None, None]
    changed = loop()
    # Both of the step's own.
    writing(changed, "scaled").input[0] = "x_t"
    assert len(why(RULE, changed, SHAPES)) == 1
    changed = loop()
    writing(changed, "scaled").device_option.device_type = 5
    assert len(why(RULE, changed, SHAPES)) == 1


def test_refuses_without_aten(monkeypatch):
    monkeypatch.setattr(broadcasts, "aten_is_missing", lambda: True)
    assert why(RULE, loop(), SHAPES) == ["this Caffe2 has no ATen operator"] * 2


def test_refuses_a_linked_output():
    changed = loop()
    writing(changed, "scaled").output[0] = "h_t"
    assert why(RULE, changed, SHAPES)[0] == "'h_t' is linked to an outer blob"


def test_refuses_what_works_in_place():
    changed = loop()
    writing(changed, "shifted").output[0] = "bounded"
    assert why(RULE, changed, SHAPES)[1] == "it works in place"


@pytest.mark.parametrize("axis", [{"axis": 0}, {"axis_str": "C", "order": "NCHW"}], ids=str)
def test_refuses_axes(axis):
    changed = loop()
    set_argument(writing(changed, "scaled"), broadcast=1, **axis)
    reason = "it says which axes belong together, which ATen cannot be told"
    assert why(RULE, changed, SHAPES)[0] == reason


# Whether it is worth it.


def test_a_trial_decides(monkeypatch):
    asked = []

    def faster(kind, first, second):
        asked.append((kind, first, second))
        return kind == "Mul"

    monkeypatch.setattr(vectorised, "aten_broadcasts_faster", faster)
    report = optimize(Net(over_positions).net, [RULE])
    assert [rewrite.what for rewrite in report.rewrites] == ["Mul -> 'scaled'"]
    assert reasons_in(report, RULE) == ["for {} and {} Add is faster".format((S, N, D), (1, D))]
    assert set(asked) == {("Mul", (S, N, D), (1, N, D)), ("Add", (S, N, D), (1, D))}


def test_shapes_decide():
    alike = {**SHAPES, "A": (1, N, D), "B": (1, N, D)}
    assert why(RULE, loop(), alike, loss=True) == ["both are shaped alike"] * 2
    unknown = "the shape of '{}' is not known; give shapes"
    assert why(RULE, loop(), {}, loss=True) == [unknown.format(blob) for blob in ("A", "bounded")]


def test_without_trials_it_stays_as_it_is():
    assert optimize(Net(over_positions).net, [RULE], trials=False).counts[RULE] == 0


def test_both_are_tried():
    with leaving_no_trace():
        found = [vectorised.aten_broadcasts_faster.__wrapped__(kind, (7, 3, 5), (1, 3, 5)) for kind in ("Add", "Mul")]
    assert set(found) <= {True, False}


@pytest.mark.parametrize("trials", [True, False])
def test_slices_of_more_dimensions(trials):
    """[1, N, 4, D] times [4, D]: what runs so must not be tried as if it were [1, N, D]."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.value("X", T, N, 4, D)
    product = make.cell.Mul([x, make.reference("A", 4, D)], "product")
    mean = make.cell.ReduceMean(product, "mean", axes=[2], keepdims=0)
    make.link(h, make.cell.Tanh(make.cell.Sum([mean, h], "sum"), "h_t"))
    step_net = make.done(outputs_with_grads="auto")
    outputs, gradients = comparing.run(recurrent_net, step_net, rewrite=lambda net: optimize(net, trials=trials))
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
