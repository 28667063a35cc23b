"""Sigmoids of products that oneDNN makes: taken there, where a trial finds it faster and nothing else is lost."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.operators import as_bytes, new_operator
from caffe2_recurrent.rewriting.products import onednn, separate_rows, sigmoids
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.trials.timing import Seconds
from onednn_support import FROM, THERE, force, leaving_no_trace, on_onednn, outputs_and_step
from step_nets import D, Maker, N, T
from test_rewriting_rules import loop_of, made

RULE = "packed_products"
BESIDE = caffe2_pb2.OperatorDef()
WAYS = [way for way in onednn.ways() if separate_rows.in_steps(way, D, D)]


pytestmark = pytest.mark.usefixtures("every_size")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """The way in which products are done, and their sigmoids there, whatever is faster."""
    force(monkeypatch, request.param)
    make_up(monkeypatch, True)
    return request.param


def make_up(monkeypatch, is_faster):
    monkeypatch.setattr(sigmoids, "_is_faster_there", lambda *_: is_faster)


# Steps: `taken(make, product, x, h)` makes h_t of the product h W, or h W + b.


def gate(make, u, x, h):
    return make.cell.Mul([make.cell.Sigmoid(u, "s"), x], "h_t")


def in_place(make, u, x, h):
    make.cell.Sigmoid(u, [u])
    return make.cell.Mul([u, x], "h_t")


def linked(make, u, x, h):
    """The sigmoid is a slice of the states."""
    return make.cell.Sigmoid(u, "h_t")


def later(make, u, x, h):
    """Something else is done in between."""
    v = make.cell.Tanh(make.cell.Sum([h, x], "total"), "v")
    return make.cell.Mul([make.cell.Sigmoid(u, "s"), v], "h_t")


def used_twice(make, u, x, h):
    s = make.cell.Sigmoid(u, "s")
    return make.cell.Sum([make.cell.Mul([s, x], "sx"), s], "h_t")


def by_aten(make, u, x, h):
    return make.cell.Mul([make.cell.ATen([u], "s", operator="sigmoid"), x], "h_t")


STEPS = [gate, in_place, linked, later, used_twice]


def step_net(taken, has_bias, **options):
    make = Maker()
    x, h = make.sequence(), make.state()
    if has_bias:
        u = make.fc(h, "u")
    else:
        u = make.cell.BatchMatMul([h, make.reference("u_w", D, D)], "u", broadcast=1)
    make.link(h, taken(make, u, x, h))
    return make.done(**options)


def assert_taken_there(step, way, **options):
    """With the values of the net as it was; the operators of the step."""
    expected, _ = outputs_and_step(step, [], **options)
    found, operators = outputs_and_step(step, [RULE], **options)
    support.assert_same(found, expected)
    *before, last = THERE[way]
    assert on_onednn(operators) == [*before, "Sigmoid", last]
    assert [operator.type for operator in operators].count("Sigmoid") == 1
    assert not any(operator.type == "ATen" for operator in operators)
    return operators


@pytest.mark.parametrize("taken", [*STEPS, by_aten], ids=lambda taken: taken.__name__)
def test_without_a_bias(taken, way):
    operators = assert_taken_there(step_net(taken, False, forward_only=True), way)
    written = [blob for operator in operators for blob in operator.output]
    assert ("u" in written) == (taken is in_place)


def test_another_rule_does_not_take_it_back(way):
    net, _ = comparing.build(recurrent_net, step_net(gate, False, forward_only=True))
    shapes = {"u_w": (D, D), "X": (T, N, D)}
    assert optimize(net, [RULE], even_if_slower=True, shapes=shapes).total == 1
    assert "Sigmoid" in on_onednn(support.step(net).op)
    assert optimize(net, ["activations"], even_if_slower=True).total == 0


@pytest.mark.parametrize("taken", STEPS, ids=lambda taken: taken.__name__)
@pytest.mark.parametrize("options", [{}, {"forward_only": True}], ids=str)
def test_with_a_bias(taken, options, monkeypatch):
    """An inner product has it there; the gradient of the sigmoid is that of its value."""
    if onednn.INNER_PRODUCT not in WAYS:
        return
    force(monkeypatch, onednn.INNER_PRODUCT)
    make_up(monkeypatch, True)
    assert_taken_there(step_net(taken, True, **options), onednn.INNER_PRODUCT)


def assert_left(step, rules=(RULE,), count=1, **options):
    """The sigmoid stays the step's own, with `count` products by oneDNN beside it; values are what they were."""
    expected, _ = outputs_and_step(step, [], **options)
    found, operators = outputs_and_step(step, list(rules), **options)
    support.assert_same(found, expected)
    placed = on_onednn(operators)
    assert "Sigmoid" not in placed and placed.count(FROM) == count


def test_a_bias_that_a_convolution_gets_later(monkeypatch):
    force(monkeypatch, onednn.CONVOLUTION)
    make_up(monkeypatch, True)
    assert_left(step_net(gate, True))


def test_it_is_not_faster(way, monkeypatch):
    make_up(monkeypatch, False)
    assert_left(step_net(gate, False, forward_only=True))


def read_again(make, u, x, h):
    s = make.cell.Sigmoid(u, "s")
    return make.cell.Mul([s, make.cell.Tanh(u, "v")], "h_t")


def read_before(make, u, x, h):
    v = make.cell.Tanh(u, "v")
    return make.cell.Mul([make.cell.Sigmoid(u, "s"), v], "h_t")


@pytest.mark.parametrize("taken", [read_again, read_before], ids=lambda taken: taken.__name__)
def test_a_product_that_something_else_reads(taken, way):
    assert_left(step_net(taken, False, forward_only=True))


def test_a_product_that_is_computed_again(way):
    """By the backward step, which then takes the sigmoid of it too."""
    again = ["u", "s"]
    assert_left(step_net(gate, True, recompute_blobs_on_backward=again), ["parameter_gradients", RULE])


def read_loop(taken, has_bias, **options):
    """The loop of a net; with gradients unless it is forward only."""
    step = step_net(taken, has_bias, **options)
    net, outputs = comparing.build(recurrent_net, step)
    if not options.get("forward_only"):
        net.AddGradientOperators({outputs[0]: net.AddExternalInput("seed")})
    return loop_of(net)


def found_in(loop):
    return sigmoids.sigmoid_of(loop, loop.operators, 0)


def plants():
    def another_operator(loop):
        loop.operators[1].type = "Tanh"

    def another_of_aten(loop):
        loop.operators[1].CopyFrom(new_operator("ATen", ["u"], ["s"], BESIDE, operator="tanh"))

    def there_already(loop):
        onednn.on_onednn(loop.operators[1])

    def no_sole_reader(loop):
        loop.net.external_output.append("u")

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("plant", plants(), ids=lambda plant: plant.__name__)
def test_sigmoids_that_must_stay(plant):
    loop = read_loop(gate, True)
    assert found_in(loop) == 1
    plant(loop)
    assert found_in(loop) is None


@pytest.mark.parametrize("taken, shared", [(gate, ["s"]), (in_place, ["u"])], ids=["gone", "still there"])
def test_blobs_that_all_steps_share(taken, shared, way):
    loop = read_loop(taken, False, forward_only=True)
    loop.shared[:] = list(dict.fromkeys(["u", *shared]))
    product = Product("h_prev", "u_w", None, None, "u", 2, D, D)
    product = sigmoids.with_sigmoid(way, loop, loop.operators, 0, product)
    assert product.sigmoid == shared[0] and loop.shared == shared


def test_a_name_that_something_else_is_called_too(way):
    loop = read_loop(gate, False, forward_only=True)
    loop.operators.append(made("Tanh", ["h_t"], ["u"]))
    loop.shared[:] = ["u"]
    product = Product("h_prev", "u_w", None, None, "u", 2, D, D)
    assert sigmoids.with_sigmoid(way, loop, loop.operators, 0, product).sigmoid == "s"
    assert loop.shared == ["u"]


def test_a_batch_size_that_is_not_known(way):
    """Nothing can be tried then."""
    loop = read_loop(gate, False, forward_only=True)
    product = Product("h_prev", "u_w", None, None, "u", None, D, D)
    assert sigmoids.with_sigmoid(way, loop, loop.operators, 0, product) == product
    assert [operator.type for operator in loop.operators] == ["BatchMatMul", "Sigmoid", "Mul"]


def test_rows_that_are_no_numbers(way):
    step = step_net(gate, False, forward_only=True)
    value = step.outer["h_initial"]
    value[1] = np.resize([np.nan, np.inf, -np.inf, 0], D)
    expected, _ = outputs_and_step(step, [])
    found, _ = outputs_and_step(step, [RULE])
    for ours, theirs in zip(found[0], expected[0]):
        assert np.isnan(theirs[:, 1]).any() and np.isfinite(theirs[:, 0]).all()
        assert support.difference(ours[:, [0]], theirs[:, [0]]) < support.TOLERANCE


def test_a_wrong_sigmoid_is_seen(way, monkeypatch):
    """What the tests above compare would not pass over a copy without one."""

    def copy(emitter, there, result):
        onednn.add(emitter, FROM, [there], [result])

    monkeypatch.setattr(onednn, "_emit_sigmoid", copy)
    step = step_net(gate, False, forward_only=True)
    expected, _ = outputs_and_step(step, [])
    found, _ = outputs_and_step(step, [RULE])
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(found, expected)


# The trial.


@pytest.mark.parametrize("kind", ["Sigmoid", "ATen"])
@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("way, parts", [(way, parts) for parts in (1, 3) for way in onednn.ways_of(parts)])
def test_the_trial(way, parts, rows, kind):
    arguments = {"operator": "sigmoid"} if kind == "ATen" else {}
    operator = as_bytes(new_operator(kind, ["a"], ["b"], BESIDE, **arguments), ["y"], ["s"])
    with leaving_no_trace():
        found = sigmoids._tried.__wrapped__(way, operator, rows, 8, parts)
    assert set(found) == {True, False} and all(seconds.step > 0 for seconds in found.values())


def test_the_faster_is_chosen(monkeypatch):
    operator = made("Sigmoid", ["u"], ["s"])
    times = {}
    monkeypatch.setattr(sigmoids, "_tried", lambda *arguments: times)
    for faster in (True, False):
        times.update({faster: Seconds(0.0, 1.0), not faster: Seconds(0.0, 2.0)})
        assert sigmoids._is_faster_there(onednn.CONVOLUTION, operator, 3, 8, 1) == faster


def test_operators_of_a_kind_are_tried_once():
    """Whatever they are called, and whatever blobs they are between."""
    first, second = made("Sigmoid", ["a"], ["b"]), made("Sigmoid", ["c"], ["c"])
    second.name = "second"
    assert as_bytes(first, ["y"], ["s"]) == as_bytes(second, ["y"], ["s"])
    assert list(first.input) == ["a"] and second.name == "second"
