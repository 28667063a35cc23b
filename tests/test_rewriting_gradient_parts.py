"""`gradient_parts`: parameter gradients of Add, Sub and Mul behind the loop; and `rows.repeats`, which they go by."""

import pytest
from caffe2.python import core

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.rules import RULES
from caffe2_recurrent.rewriting.steps.rows import repeats
from every_pair import every_pair
from step_nets import D, N, T
from test_rewriting_rules import EVERY_STEP_NET, EXECUTOR, loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net
from test_rewriting_sequence_gradient import assert_kept

RULE = "parameter_gradients"
WITH = pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
KINDS = ("Add", "Sub", "Mul")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
WIDTHS = {"[D]": (D,), "[1, D]": (1, D), "[N, D]": (N, D), "[1, 1, D]": (1, 1, D), "[1, N, D]": (1, N, D)}


def with_parameter(kind, shape, first=False, **arguments):
    """A step h = tanh(x + kind(h, w))"""

    def step(make, x, h):
        operands = [h, make.reference("p", *shape)]
        changed = getattr(make.cell, kind)(operands[::-1] if first else operands, "changed", **arguments)
        return make.cell.Tanh(make.cell.Sum([x, changed], "total"), "h_t")

    return step


def gradients_inside(net):
    return [operator.type for operator in support.backward_step(net).op if "p_grad" in operator.output]


@every_pair
@EXECUTOR
@EVERY_KIND
@pytest.mark.parametrize("first", [False, True], ids=["second", "first"])
@pytest.mark.parametrize("shape", WIDTHS.values(), ids=list(WIDTHS))
def test_values_and_gradients(shape, first, kind, executor):
    net = assert_kept(with_parameter(kind, shape, first), RULE, 1, [RULE], executor, parameters=["p"])
    assert gradients_inside(net) == [] and loop_of(net).gradient.parameters == []


@EVERY_KIND
@WITH
@pytest.mark.parametrize("arguments", [{}, {"axis": 2}, {"axis": 0}], ids=str)
def test_legacy_broadcasting(arguments, kind, rules):
    shape = (1, N, D) if arguments == {"axis": 0} else (D,)
    step = with_parameter(kind, shape, broadcast=1, **arguments)
    assert gradients_inside(assert_kept(step, RULE, 1, rules, executor=False, parameters=["p"])) == []


@EVERY_KIND
@WITH
def test_a_parameter_that_the_step_uses_twice(kind, rules):
    """Both shares move, and their sum."""

    def step(make, x, h):
        p = make.reference("p", D)
        once = getattr(make.cell, kind)([h, p], "once")
        again = make.cell.Mul([x, p], "again")
        return make.cell.Tanh(make.cell.Sum([once, again], "total"), "h_t")

    net = assert_kept(step, RULE, 1, rules, executor=False)
    assert gradients_inside(net) == []


@EVERY_KIND
@WITH
def test_rows_that_a_step_makes(kind, rules):
    """A product behind it is known to have rows too, and its gradient moves."""

    def step(make, x, h):
        changed = getattr(make.cell, kind)([make.cell.Sigmoid(h, "opened"), make.reference("p", D)], "changed")
        return make.cell.Tanh(make.cell.Sum([x, make.fc(changed, "u")], "total"), "h_t")

    assert_kept(step, RULE, 2, rules, executor=False)


def of_what_is_moved(make, x, h):
    """A product of rows to which something is added that is the same in all steps, but made in the step."""
    fixed = make.cell.Mul([make.reference("p", D), make.reference("q", D)], "fixed")
    changed = make.cell.Add([h, fixed], "changed")
    return make.cell.Tanh(make.cell.Sum([x, make.fc(changed, "u")], "total"), "h_t")


def of_a_unit(make, x, h):
    """A product, and one with a parameter, of what Caffe2 does not know the shape of until it has a buffer."""
    gates = make.cell.Concat([x, x, x], ["gates", "widths"], axis=2)[0]
    unit = make.cell.GRUUnit([h, gates, make.cell.AddExternalInput("timestep")], "unit", sequence_lengths=0)
    changed = make.cell.Mul([unit, make.reference("p", D)], "changed")
    return make.cell.Tanh(make.cell.Sum([make.fc(unit, "u"), changed], "total"), "h_t")


@pytest.mark.parametrize("rules", [["invariants", RULE], ["invariants", "packed_products"], [RULE], None], ids=str)
@pytest.mark.parametrize("step", [of_what_is_moved, of_a_unit], ids=lambda step: step.__name__)
def test_a_second_call_knows_no_more_shapes(step, rules):
    expected = Net(step).values()
    net = Net(step)
    support.Optimised(rules)(net.net)
    support.assert_same(net.values(), expected)


def test_in_place():
    def step(make, x, h):
        u = make.cell.Copy(h, "u")
        make.cell.Add([u, make.reference("p", D)], [u])
        return make.cell.Tanh(make.cell.Sum([x, u], "total"), "h_t")

    net = assert_kept(step, RULE, 1, [RULE], executor=False)
    assert gradients_inside(net) == []


@EVERY_STEP_NET
def test_step_nets(make):
    """Against the numpy loop."""
    step_net = make()
    found = comparing.run(recurrent_net, step_net, rewrite=support.Optimised([RULE, "vector_gradients"]))
    comparing.assert_outputs_and_gradients(step_net, *found)


@EVERY_KIND
def test_a_wrong_share_is_seen(kind):
    expected = Net(with_parameter(kind, (D,))).values()
    net = Net(with_parameter(kind, (D,)))
    optimize(net.net, [RULE])
    blob = core.BlobReference(net.gradients["p"])
    operators = [list(operator.output) for operator in net.net.Proto().op]
    (position,) = [index for index, outputs in enumerate(operators) if str(blob) in outputs]
    net.insert(position + 1, "Scale", [blob], [blob], scale=1.001)
    with pytest.raises(AssertionError, match="gradient of p"):
        support.assert_same(net.values(), expected)


# What it refuses.

SHAPES = {"p": (D,), "h_initial": (N, D), "loop/X": (T, N, D)}


def loop(kind="Mul"):
    return loop_of(Net(with_parameter(kind, (D,))).net)


def of_p(loop):
    return next(operator for operator in loop.gradient.operators if "p_grad" in operator.output)


def test_the_places_that_it_is_about():
    assert why(RULE, loop(), SHAPES) == [None]
    changed = loop()
    # Neither operand is the same in all steps; both are.
    of_p(changed).input[2] = "x_t"
    assert why(RULE, changed, SHAPES) == []
    of_p(changed).input[1:] = ["p", "p"]
    assert why(RULE, changed, SHAPES) == []


def test_refuses_shapes_that_are_not_known():
    unknown = "the shape of '{}' is not known; give shapes"
    assert why(RULE, loop(), {"p": (D,)}) == [unknown.format("h_prev")]
    assert why(RULE, loop(), {blob: SHAPES[blob] for blob in ("h_initial", "loop/X")}) == [unknown.format("p")]


@pytest.mark.parametrize("shape", [(1,), (N, 1), (4, N, D), (1, 1, 1, D)])
def test_refuses_what_is_not_repeated_or_not_as_wide(shape):
    reason = "'p' is not as wide as the rows of 'h_prev', or is not repeated: {} and {}"
    assert why(RULE, loop(), {**SHAPES, "p": shape}) == [reason.format(shape, (1, N, D))]


@pytest.mark.parametrize("arguments", [{"axis": 1}, {"axis": 0}, {"axis_str": "C"}], ids=str)
def test_refuses_what_is_repeated_along_another_axis(arguments):
    """Like a number for each sequence, which are as many as there are columns."""
    changed = loop()
    set_argument(of_p(changed), **arguments)
    assert why(RULE, changed, SHAPES) == ["'p' is not repeated along the last axis of 'h_prev'"]


@EVERY_KIND
@pytest.mark.parametrize("batch", [D, 2 * D])
def test_a_number_for_each_sequence(batch, kind):
    """Optimised for as many sequences as there are columns, and run with these and with others."""
    step = with_parameter(kind, (D,), broadcast=1, axis=1)
    net, again = Net(step), Net(step)
    shapes = {"x": (T, D, 4), "h_initial": (D, D), "p": (D,)}
    report = optimize(net.net, [RULE], shapes=shapes)
    assert report.total == 0 and len(reasons_in(report, RULE)) == 1
    for found in (net, again):
        found.feed({"x": (T, batch, 4), "seed": (T, batch, D), "h_initial": (batch, D), "p": (batch,)})
    support.assert_same(net.values(), again.values())


@pytest.mark.parametrize("shape", [(1, D), (1, 1, D), (1, N, D)])
def test_refuses_what_may_be_larger_in_another_run(shape):
    """Unless it is a parameter, like the outputs of an encoder of which there is but one."""
    shapes = {**SHAPES, "p": shape}
    reason = "'p' {} may be larger in another run, as nothing says that it is a parameter"
    assert why(RULE, loop(), shapes) == [reason.format(shape)]
    (rule,) = [rule for rule in RULES if rule.name == RULE]
    changed = loop()
    (site,) = rule.sites(changed)
    assert rule.refusal(changed, site, Sizes(shapes, ["p"])) is None


def test_refuses_what_has_no_rows():
    changed = loop()
    changed.operators.insert(0, made("Transpose", ["h_prev"], ["other"]))
    of_p(changed).input[1] = "other"
    assert why(RULE, changed, SHAPES) == ["'other' is not known to have one row for each sequence"]


def test_refuses_what_writes_over_the_gradient_that_it_reads():
    changed = loop()
    of_p(changed).output[0] = of_p(changed).input[0]
    assert why(RULE, changed, SHAPES) == ["it writes over 'total_grad'"]


def passed_through(make, x, h):
    """Sum gives one gradient to the product and to what is added to it in each step."""
    parts = [make.fc(h, "u"), make.reference("p", 1, N, D)]
    return make.cell.Tanh(make.cell.Mul([make.cell.Sum(parts, "total"), x], "gated"), "h_t")


@WITH
def test_a_gradient_that_is_a_parameters_too_stays(rules):
    """The engine calls it otherwise in the step, so that a link to it leads nowhere."""
    expected = Net(passed_through).values()
    net = Net(passed_through)
    report = optimize(net.net, rules, even_if_slower=True)
    assert "'total_grad' is the gradient of a parameter too" in reasons_in(report, RULE)
    support.assert_same(net.values(), expected)


def test_refuses_what_something_else_needs():
    changed = loop()
    changed.gradient.operators.append(made("Tanh", ["p_grad"], ["more"]))
    reason = "'p_grad' is used for something else than the gradient of a parameter"
    assert why(RULE, changed, SHAPES) == [reason]


@pytest.mark.parametrize("shape", [(1,), (N, 1), (1, N, 1)])
def test_narrow_parameters_keep_their_gradients(shape):
    step = with_parameter("Mul", shape)
    expected = Net(step).values()
    net = Net(step)
    report = optimize(net.net, [RULE], even_if_slower=True)
    assert report.total == 0 and len(reasons_in(report, RULE)) == 1
    support.assert_same(net.values(), expected)


@pytest.mark.parametrize(
    "shape, fits",
    [
        ((4,), True),
        ((3, 4), True),
        ((1, 4), True),
        ((1, 3, 4), True),
        ((1, 1, 4), True),
        ((1,), False),
        ((2, 4), False),
        ((5, 3, 4), False),
        ((1, 1, 3, 4), False),
    ],
)
def test_what_is_repeated(shape, fits):
    assert repeats(shape, (1, 3, 4)) is fits
