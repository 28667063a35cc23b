"""Sums of products that oneDNN makes: taken there where nothing else is lost, so that nothing is copied back."""

import numpy as np
import pytest

import comparing
import rewriting_support as support
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.rewriting.products import onednn, separate_rows, sums
from caffe2_recurrent.rewriting.products.product import Product
from onednn_support import ADDED_THERE, FROM, THERE, force, on_onednn, outputs_and_step
from step_nets import D, Maker
from test_rewriting_rules import loop_of

RULE = "packed_products"
WAYS = [way for way in onednn.ways() if separate_rows.in_steps(way, D, D)]


pytestmark = pytest.mark.usefixtures("every_size")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """The way in which products are done, whatever is faster."""
    force(monkeypatch, request.param)
    return request.param


# Steps: `added(make, product, x, h)` makes h_t of the product h W + b.


def apart(make, u, x, h):
    return make.cell.Tanh(make.cell.Sum([u, x], "total"), "h_t")


def behind(make, u, x, h):
    return make.cell.Tanh(make.cell.Sum([x, u], "total"), "h_t")


def in_place(make, u, x, h):
    make.cell.Sum([u, x], [u])
    return make.cell.Tanh(u, "h_t")


def linked(make, u, x, h):
    """The sum is a slice of the states."""
    return make.cell.Sum([u, x], "h_t")


def later(make, u, x, h):
    """Something else is done in between."""
    v = make.cell.Tanh(make.cell.Mul([h, x], "product"), "v")
    return make.cell.Mul([make.cell.Sum([u, x], "total"), v], "h_t")


def used_twice(make, u, x, h):
    total = make.cell.Sum([u, x], "total")
    return make.cell.Sum([make.cell.Tanh(total, "v"), total], "h_t")


STEPS = [apart, behind, in_place, linked, later, used_twice]


def step_net(added, **options):
    make = Maker()
    x, h = make.sequence(), make.state()
    make.link(h, added(make, make.fc(h, "u"), x, h))
    return make.done(**options)


def assert_there(step, there, rules=(RULE,)):
    """With the values of the numpy loop; gives the operators of the step."""
    (outputs, gradients), operators = outputs_and_step(step, rules)
    comparing.assert_outputs_and_gradients(step, outputs, gradients)
    assert on_onednn(operators) == there
    return operators


@pytest.mark.parametrize("added", STEPS, ids=lambda added: added.__name__)
@pytest.mark.parametrize("options", [{}, {"forward_only": True}], ids=str)
def test_a_sum(added, options, way):
    operators = assert_there(step_net(added, **options), ADDED_THERE[way])
    kinds = [operator.type for operator in operators]
    sums_before = 2 if added is used_twice else 1
    assert kinds.count("Sum") == sums_before - (ADDED_THERE[way] != THERE[way])


def in_the_addend(make, u, x, h):
    """In the place of the other addend."""
    v = make.cell.Tanh(x, "v")
    make.cell.Sum([v, u], [v])
    return make.cell.Tanh(v, "h_t")


def of_three(make, u, x, h):
    return make.cell.Sum([u, x, h], "h_t")


def twice(make, u, x, h):
    return make.cell.Tanh(make.cell.Sum([u, u], "total"), "h_t")


def read_again(make, u, x, h):
    return make.cell.Mul([make.cell.Sum([u, x], "total"), make.cell.Tanh(u, "v")], "h_t")


def added_later(make, u, x, h):
    """Its addend is made behind the product."""
    return make.cell.Sum([u, make.cell.Tanh(x, "v")], "h_t")


LEFT = [in_the_addend, of_three, twice, read_again, added_later]


@pytest.mark.parametrize("added", LEFT, ids=lambda added: added.__name__)
def test_sums_that_must_stay(added, way):
    assert_there(step_net(added, forward_only=True), THERE[way])


def test_a_product_that_is_computed_again(way):
    """By the backward step, which adds it itself."""
    assert_there(step_net(apart, recompute_blobs_on_backward=["u", "total"]), THERE[way], ["parameter_gradients", RULE])


def test_a_caffe2_that_does_not_add_there(way, monkeypatch):
    monkeypatch.setattr(onednn, "_adds", lambda: False)
    assert_there(step_net(apart), THERE[way])


@pytest.mark.parametrize("failing", ["not known", "not for the CPU"])
def test_whether_this_caffe2_adds_there(failing, monkeypatch):
    there = onednn.on_onednn

    def on_onednn(operator):
        if operator.type == "Add":
            operator.type = "NoSuchOperator" if failing == "not known" else "Sub"
        return there(operator)

    monkeypatch.setattr(onednn, "on_onednn", on_onednn)
    assert onednn._adds.__wrapped__() is False


def test_blobs_that_all_steps_share():
    """The product alone is nobody's any more."""
    net, _ = comparing.build(recurrent_net, step_net(apart, forward_only=True))
    loop = loop_of(net)
    loop.shared[:] = ["u", "total"]
    product = sums.with_sum(
        onednn.INNER_PRODUCT, loop, loop.operators, 0, Product("h_prev", None, "u_w", "u_b", "u", 2, D, D)
    )
    if onednn.adds(onednn.INNER_PRODUCT):
        assert (product.addend, product.output, loop.shared) == ("x_t", "total", ["total"])
    else:
        assert (product.addend, product.output, loop.shared) == (None, "u", ["u", "total"])


def plants():
    def another_operator(loop):
        loop.operators[1].type = "Mul"

    def there_already(loop):
        onednn.on_onednn(loop.operators[1])

    def no_sole_reader(loop):
        loop.net.external_output.append("u")

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("plant", plants(), ids=lambda plant: plant.__name__)
def test_near_misses(plant):
    loop = loop_of(comparing.build(recurrent_net, step_net(apart, forward_only=True))[0])
    assert sums.sum_of(loop, loop.operators, 0) == 1
    plant(loop)
    assert sums.sum_of(loop, loop.operators, 0) is None


def test_rows_that_are_no_numbers(way):
    step = step_net(apart, forward_only=True)
    value = step.outer["h_initial"]
    value[1] = np.resize([np.nan, np.inf, -np.inf, 0], D)
    (expected, _), _ = outputs_and_step(step, [])
    (found, _), operators = outputs_and_step(step, [RULE])
    assert on_onednn(operators) == ADDED_THERE[way]
    for ours, theirs in zip(found, expected):
        assert np.isnan(theirs[:, 1]).any() and np.isfinite(theirs[:, 0]).all()
        assert support.difference(ours[:, [0]], theirs[:, [0]]) < support.TOLERANCE


def test_a_wrong_sum_is_seen(monkeypatch):
    """What the tests above compare would not pass over the product alone."""
    force(monkeypatch, onednn.INNER_PRODUCT)
    with_sum = sums.with_sum

    def without(way, loop, operators, position, product):
        return with_sum(way, loop, operators, position, product)._replace(addend=None)

    monkeypatch.setattr("caffe2_recurrent.rewriting.rules.packed_products.with_sum", without)
    if not onednn.adds(onednn.INNER_PRODUCT):
        return
    with pytest.raises(AssertionError, match="output 0"):
        assert_there(step_net(apart), ["Scale", "FC", FROM])
