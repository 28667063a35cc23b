"""`vector_products`: products of matrices with a vector each, the vector as a row."""

import numpy as np
import pytest

import rewriting_support as support
from caffe2_recurrent import optimize
from caffe2_recurrent.rewriting.rules import vector_products
from caffe2_recurrent.rewriting.rules.vector_products import AS_IT_IS, AS_THEY_LIE, LAID_OUT, Size
from caffe2_recurrent.rewriting.trials.timing import Seconds, result
from every_pair import every_pair
from onednn_support import assert_cell, leaving_no_trace
from step_nets import D, N
from test_rewriting_rules import EXECUTOR, loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net
from test_rewriting_sequence_gradient import assert_kept

RULE = "vector_products"
K = 5
ATTENTIONS = ["attention_regular", "attention_recurrent", "attention_lengths", "attention_weighted"]
WITH = pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
WAYS = pytest.mark.parametrize("way", [AS_THEY_LIE, LAID_OUT])


def column_of(make, row, name):
    """`[1, N, D]` as `[N, D, 1]`"""
    return make.cell.ExpandDims(make.cell.Squeeze(row, name + "_rows", dims=[0]), name, dims=[2])


def there_and_back(make, x, h):
    """tanh(x + B' A h), with an A and a B for each sequence."""
    inner = make.cell.BatchMatMul([make.reference("A", N, K, D), column_of(make, h, "column")], "inner")
    back = make.cell.BatchMatMul([make.reference("B", N, K, D), inner], "back", trans_a=1)
    make.cell.Squeeze(back, back, dims=[2])
    make.cell.ExpandDims(back, back, dims=[0])
    return make.cell.Tanh(make.cell.Sum([back, x], "total"), "h_t")


def make_up(monkeypatch, as_it_is, **ways):
    """Times of the ways, in seconds of a step; the sizes that were asked about."""
    asked = []

    def tried(size, steps):
        asked.append((size, steps))
        found = {AS_IT_IS: as_it_is, AS_THEY_LIE: ways.get("as_they_lie", 9.0), LAID_OUT: ways.get("laid_out", 9.0)}
        if not size.are_fixed:
            del found[LAID_OUT]
        return {way: Seconds(0.0, seconds) for way, seconds in found.items()}

    monkeypatch.setattr(vector_products, "_tried", tried)
    return asked


def force(monkeypatch, way):
    make_up(monkeypatch, 1.0, **{way.replace(" ", "_"): 0.5})


# Values.


@EXECUTOR
@WITH
@WAYS
def test_values_and_gradients(rules, way, executor, monkeypatch):
    force(monkeypatch, way)
    net = assert_kept(there_and_back, RULE, 4, rules, executor)
    transposes = [operator for operator in net.Proto().op if operator.type == "Transpose" and "A" in operator.input]
    assert len(transposes) == (1 if way == LAID_OUT else 0)


def every_attention(test):
    """With what it can compute again in the backward step kept, and computed again."""
    variants = pytest.mark.parametrize("variant", ["kept", "recomputed"])
    return variants(pytest.mark.parametrize("cell", ATTENTIONS)(test))


def count_in_attention(cell, variant, rule, rules):
    """How often the rule fires; values and gradients are those of the numpy loop."""
    rewrite = support.Optimised(rules)
    assert_cell(cell, variant, rewrite)
    return rewrite.report.counts[rule]


@every_pair
@every_attention
@WITH
@WAYS
def test_attention(cell, variant, rules, way, monkeypatch):
    force(monkeypatch, way)
    # The context, also where it is computed again, and the gradient of the weights.
    assert count_in_attention(cell, variant, RULE, rules) >= 2


def test_it_runs_with_other_sizes(monkeypatch):
    force(monkeypatch, LAID_OUT)
    net = Net(there_and_back)
    optimize(net.net, [RULE])
    steps, batch = 2, 3
    again = Net(there_and_back)
    found = []
    for tried in (net, again):
        sized = {"x": (steps, batch, 4), "seed": (steps, batch, D), "h_initial": (batch, D)}
        tried.feed({**sized, "A": (batch, K, D), "B": (batch, K, D)})
        found.append(tried.values())
    support.assert_same(*found)


@pytest.mark.parametrize("kind", ["BatchMatMul", "ExpandDims"])
def test_a_wrong_product_is_seen(kind):
    expected = Net(there_and_back).values()
    net = Net(there_and_back)
    optimize(net.net, [RULE], even_if_slower=True)
    for name in ("step_net", "backward_step_net"):
        for operator in net.net.Proto().op:
            for given in operator.arg:
                if given.name == name:
                    position = [other.type for other in given.n.op].index(kind)
                    blob = given.n.op[position].output[0]
                    operators = list(given.n.op)
                    operators.insert(position + 1, made("Scale", [blob], [blob], scale=1.001))
                    del given.n.op[:]
                    given.n.op.extend(operators)
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(net.values(), expected)


# What it refuses.

SHAPES = {"A": (N, K, D), "B": (N, K, D), "h_initial": (N, D), "loop/X": (9, N, D)}


def loop():
    return loop_of(Net(there_and_back, forward_only=True).net)


def writing(loop, blob):
    return next(operator for operator in loop.operators if blob in operator.output)


def test_the_places_that_it_is_about():
    assert why(RULE, loop(), SHAPES) == [None, None]
    for argument in ("broadcast", "trans_b"):
        changed = loop()
        set_argument(writing(changed, "inner"), **{argument: 1})
        assert len(why(RULE, changed, SHAPES)) == 1


def test_refuses_shapes_that_are_not_known():
    assert why(RULE, loop(), {}) == ["the shape of '{}' is not known; give shapes".format(blob) for blob in "AB"]
    known = {"A": SHAPES["A"], "B": SHAPES["B"]}
    unknown = "the shape of '{}' is not known; give shapes"
    assert why(RULE, loop(), known) == [unknown.format(blob) for blob in ("column", "inner")]


def test_refuses_what_has_other_dimensions():
    changed = loop()
    writing(changed, "inner").input[1] = "column_rows"
    (reason, _) = why(RULE, changed, SHAPES)
    assert reason == "it is no product of matrices one by one: {} and {}".format((N, K, D), (N, D))


def test_refuses_what_has_several_columns():
    changed = loop()
    writing(changed, "inner").input[1] = "B"
    reason = "'B' has no columns of one number: {}".format((N, K, D))
    assert why(RULE, changed, {**SHAPES, "A": (N, D, K)})[0] == reason


def test_refuses_what_may_have_several_columns_in_another_run():
    changed = loop()
    writing(changed, "inner").input[1] = "B"
    reason = "'B' {} may be larger in another run, as nothing says that it is a parameter".format((N, K, 1))
    assert why(RULE, changed, {**SHAPES, "A": (N, D, K), "B": (N, K, 1)})[0] == reason


def test_refuses_two_vectors():
    assert why(RULE, loop(), {**SHAPES, "A": (N, 1, D)})[0] == "'A' holds vectors too: {}".format((N, 1, D))


def test_refuses_onednns():
    changed = loop()
    writing(changed, "inner").device_option.device_type = 5
    assert why(RULE, changed, SHAPES)[0] == "it is oneDNN's"


# Whether it is worth it.


@pytest.mark.parametrize("as_it_is, is_faster", [(1.5, True), (1.05, False), (0.9, False)])
def test_a_trial_decides(as_it_is, is_faster, monkeypatch):
    asked = make_up(monkeypatch, as_it_is, as_they_lie=1.0)
    net = Net(there_and_back)
    report = optimize(net.net, [RULE])
    assert report.counts[RULE] == (4 if is_faster else 0)
    slower = "for matrices of {} it is not faster".format((N, K, D))
    assert set(reasons_in(report, RULE)) == (set() if is_faster else {slower})
    sizes = {Size((N, K, D), transposes, are_fixed=True) for transposes in (False, True)}
    assert {size for size, _ in asked} == sizes


def test_without_the_number_of_steps_nothing_is_laid_out():
    loss = why(RULE, loop(), {blob: SHAPES[blob] for blob in ("A", "B", "h_initial")}, loss=True)
    assert loss == ["the number of steps is not known, and laying out may cost more than it gains; give shapes"] * 2


def test_without_trials_it_stays_as_it_is():
    assert optimize(Net(there_and_back).net, [RULE], trials=False).counts[RULE] == 0


@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("are_fixed", [False, True])
def test_all_ways_are_tried(transposes, are_fixed):
    """Each runs by itself and gives the same; nobody knows how long that takes."""
    size = Size((3, 7, 5), transposes, are_fixed)
    ways = [AS_IT_IS, AS_THEY_LIE] + [LAID_OUT] * are_fixed
    with leaving_no_trace():
        found = vector_products._tried.__wrapped__(size, 9)
    assert list(found) == ways and min(seconds.step for seconds in found.values()) > 0
    random = np.random.RandomState(0)
    subjects = [vector_products._subject(size, way) for way in ways]
    values = {blob: random.randn(*shape).astype(np.float32) for blob, shape in subjects[0].shapes.items()}
    expected, *others = (result([*subject.once, *subject.step], values, "result") for subject in subjects)
    for other in others:
        assert other.shape == expected.shape and support.difference(other, expected) < support.TOLERANCE
