"""`merged_gates`: two products of one blob, to which parts of a sequence are added, as one."""

import pytest
from caffe2.python import core

import rewriting_support as support
from caffe2_recurrent import optimize, set_rnn_executor_config
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.products import onednn
from caffe2_recurrent.rewriting.rules import RULES, merged_gates
from caffe2_recurrent.rewriting.trials.timing import Seconds
from every_pair import every_pair
from onednn_support import assert_cell, force, leaving_no_trace
from step_nets import D, N, T
from test_rewriting_rules import EXECUTOR, forward, loop_of, made, reasons_in, set_argument, why
from test_rewriting_sequence_bias import Net

RULE, PACKED = "merged_gates", "packed_products"
TRANSPOSED = ["transposed_weights", RULE]
WITH = pytest.mark.parametrize("rules", [[RULE], TRANSPOSED, None], ids=["rows", "columns", "all rules"])


def gate(make, x, h, name, width, in_place=True):
    """sigmoid(FC(h) + x)"""
    product = make.fc(h, name, D, width)
    return make.cell.Sigmoid(make.cell.Sum([product, x], product if in_place else name + "_sum"), name + "_opened")


def last(make, gates, x, h):
    """tanh of the gates side by side, x and h."""
    joined, _ = make.cell.Concat(gates, ["joined", "joined_sizes"], axis=2)
    return make.cell.Tanh(make.cell.Sum([make.cell.Mul([joined, h], "gated"), x], "total"), "h_t")


def as_in_a_gru(make, x, h):
    x_r, x_u, x_o = make.cell.Split(x, ["x_r", "x_u", "x_o"], axis=2)
    gates = [gate(make, x_r, h, "r", 1), gate(make, x_u, h, "u", 1)]
    return last(make, [*gates, make.cell.Tanh(x_o, "o")], x, h)


def second_first(make, x, h):
    """In the order of their operators, and with sums of their own."""
    x_o, x_r, x_u = make.cell.Split(x, ["x_o", "x_r", "x_u"], axis=2)
    u = gate(make, x_u, h, "u", 1, in_place=False)
    return last(make, [gate(make, x_r, h, "r", 1, in_place=False), u, make.cell.Tanh(x_o, "o")], x, h)


def of_two_widths(make, x, h):
    """Nothing is left to split."""
    x_r, x_u = make.cell.Split(x, ["x_r", "x_u"], axis=2, split=[1, 2])
    return last(make, [gate(make, x_r, h, "r", 1), gate(make, x_u, h, "u", 2)], x, h)


def three(make, x, h):
    """Two of them are merged, and what comes of it with the third."""
    parts = make.cell.Split(x, ["x_r", "x_u", "x_o"], axis=2)
    return last(make, [gate(make, part, h, name, 1) for part, name in zip(parts, "ruo")], x, h)


def of_what_the_step_makes(make, x, h):
    """What is split is kept for the backward step."""
    made_of_both = make.cell.Tanh(make.cell.Sum([x, h], "both"), "made_of_both")
    return of_two_widths(make, made_of_both, h)


def three_of_what_the_step_makes(make, x, h):
    return three(make, make.cell.Tanh(make.cell.Sum([x, h], "both"), "made_of_both"), h)


def sigmoids_in_place(make, x, h):
    parts = make.cell.Split(x, ["x_r", "x_u", "x_o"], axis=2)
    gates = [make.cell.Sum([make.fc(h, name, D, 1), part], name + "_sum") for part, name in zip(parts, "ru")]
    for opened in gates:
        make.cell.Sigmoid(opened, opened)
    return last(make, [*gates, make.cell.Tanh(parts[2], "o")], x, h)


STEPS = pytest.mark.parametrize(
    "step",
    [
        as_in_a_gru,
        second_first,
        of_two_widths,
        three,
        sigmoids_in_place,
        of_what_the_step_makes,
        three_of_what_the_step_makes,
    ],
    ids=lambda step: step.__name__,
)


def products(net):
    return [operator for operator in support.step(net).op if operator.type in ("FC", "FCTransposed", "BatchMatMul")]


def make_up(monkeypatch, as_it_is, merged):
    """Seconds of a step; the sizes that were asked about."""
    asked = []

    def tried(size):
        asked.append(size)
        return {False: Seconds(0.0, as_it_is), True: merged}

    monkeypatch.setattr(merged_gates, "_tried", tried)
    return asked


# Values.


@every_pair
@EXECUTOR
@WITH
@STEPS
def test_values_and_gradients(step, rules, executor):
    count = 2 if step in (three, three_of_what_the_step_makes) else 1
    expected = Net(step).values()
    net = Net(step)
    before = len(products(net.net))
    rewrite = support.Optimised(rules)
    rewrite(net.net)
    assert rewrite.report.counts[RULE] == count
    assert rules is None or len(products(net.net)) == before - count
    support.assert_same(net.values(executor), expected)


@pytest.mark.parametrize("name", ["gru", "gru_linear"])
@pytest.mark.parametrize("variant", ["kept", "recomputed"])
@pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
def test_a_gru(name, variant, rules):
    """Against the numpy loop. Alone, the update gate has no sigmoid of its own: it is in the GRUUnit."""
    rewrite = support.Optimised(rules)
    assert_cell(name, variant, rewrite)
    assert rewrite.report.counts[RULE] == (rules is None and variant == "kept")


@STEPS
def test_it_runs_with_other_sizes(step):
    found = []
    for rewrite in (lambda net: None, lambda net: optimize(net, [RULE], even_if_slower=True)):
        net = Net(step)
        rewrite(net.net)
        net.feed({"x": (2, 4, 4), "seed": (2, 4, D), "h_initial": (4, D)})
        found.append(net.values())
    support.assert_same(*found)


def test_forward_only():
    expected = Net(as_in_a_gru, forward_only=True).values()
    net = Net(as_in_a_gru, forward_only=True)
    assert optimize(net.net, [RULE], even_if_slower=True).counts[RULE] == 1
    support.assert_same(net.values(), expected)


def test_the_second_time_there_is_nothing_to_do():
    net = Net(as_in_a_gru)
    assert optimize(net.net, [RULE], even_if_slower=True).total == 1
    again = optimize(net.net, [RULE], even_if_slower=True)
    assert again.total == 0 and not again.refusals


@pytest.mark.parametrize("blob", ["r_w_merged", "r_b_merged"])
def test_wrong_weights_are_seen(blob):
    expected = Net(as_in_a_gru).values()
    net = Net(as_in_a_gru)
    optimize(net.net, [RULE], even_if_slower=True)
    operators = list(net.net.Proto().op)
    (position,) = [at for at, found in enumerate(operators) if found.output[0].split("/")[-1] == blob]
    merged = operators[position].output[0]
    net.insert(position + 1, "Scale", [merged], [merged], scale=1.001)
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(net.values(), expected)


# Whether it pays.


@pytest.mark.parametrize("merged, fires", [(Seconds(0.0, 1.0), True), (Seconds(T * 0.05, 1.0), False)])
def test_the_faster_one_is_taken(merged, fires, monkeypatch):
    """With its share of what is done once."""
    asked = make_up(monkeypatch, 1.101, merged)
    report = optimize(Net(as_in_a_gru).net, [RULE])
    assert report.counts[RULE] == fires
    (size,) = set(asked)
    assert size[1:6] == (N, D, (1, 1), (1, 1, 1), 0)
    slower = "for [{0}, {1}] x [{1}, 1 + 1] it is not faster".format(N, D)
    assert reasons_in(report, RULE) == ([] if fires else [slower])


@pytest.mark.parametrize("rules", [[RULE], TRANSPOSED], ids=["rows", "columns"])
def test_both_are_tried(rules, monkeypatch):
    asked = make_up(monkeypatch, 1.0, Seconds(0.0, 1.0))
    net = Net(of_two_widths)
    optimize(net.net, rules[:-1], even_if_slower=True)
    optimize(net.net, [RULE])
    with leaving_no_trace():
        found = merged_gates._subject(asked[0], True), merged_gates._subject(asked[0], False)
        monkeypatch.undo()
        times = merged_gates._tried.__wrapped__(asked[0])
    assert [len(subject.step) for subject in found] == [4, 7]
    assert set(times) == {False, True} and all(seconds.step > 0 for seconds in times.values())
    assert (times[False].once, times[True].once > 0) == (0.0, True)


def first_asked(monkeypatch, rules, change=lambda net: None):
    asked = make_up(monkeypatch, 1.0, Seconds(0.0, 1.0))
    net = Net(as_in_a_gru)
    change(net.net)
    optimize(net.net, rules)
    monkeypatch.undo()
    return asked[0]


@pytest.mark.parametrize("way", onednn.WAYS)
def test_both_are_tried_as_they_will_be(way, monkeypatch):
    """By oneDNN, where the rule that has products there may follow."""
    size = first_asked(monkeypatch, [RULE, PACKED])
    assert size.may_be_packed and size.steps == T
    force(monkeypatch, way)
    monkeypatch.setattr(merged_gates.PackedProducts, "loss", lambda *_: None)
    with leaving_no_trace():
        found = [merged_gates._subject(size, is_merged) for is_merged in (False, True)]
        times = merged_gates._tried.__wrapped__(size)
    for subject, products in zip(found, (2, 1)):
        kinds = [operator.type for operator in subject.step if is_on_onednn(operator)]
        assert kinds.count("FC" if way == onednn.INNER_PRODUCT else "Conv") == products, kinds
    assert all(seconds.step > 0 and seconds.once > 0 for seconds in times.values())


def with_threads(net):
    for operator in net.Proto().op:
        if operator.type in (support.LOOP, support.GRADIENT):
            set_rnn_executor_config(operator, num_threads=2)


@pytest.mark.parametrize(
    "rules, change", [([RULE], lambda net: None), ([RULE, PACKED], with_threads)], ids=["not chosen", "threads"]
)
def test_they_are_tried_by_mkl_if_no_rule_will_have_them_by_onednn(rules, change, monkeypatch):
    assert not first_asked(monkeypatch, rules, change).may_be_packed


# What it refuses.

SHAPES = {
    "loop/X": (T, N, D),
    "h_initial": (N, D),
    "r_w": (1, D),
    "u_w": (1, D),
    "r_b": (1,),
    "u_b": (1,),
    "o_w": (1, D),
}


def loop(step=as_in_a_gru):
    return loop_of(Net(step).net)


def of(loop, blob):
    """The first operator of the step that makes the blob."""
    return next(operator for operator in loop.operators if blob in operator.output)


def reasons(loop, shapes=SHAPES, **options):
    return why(RULE, loop, shapes, **options)


def insert(blob, before):
    """Something that writes the blob, in front of what makes another."""

    def change(changed):
        changed.operators.insert(changed.operators.index(of(changed, before)), made("Tanh", ["r_w"], [blob]))

    return change


def read(blob):
    return lambda changed: changed.operators.append(made("Tanh", [blob], ["more"]))


def read_backward(blob):
    return lambda changed: changed.gradient.operators.append(made("Tanh", [blob], ["more"]))


def replace(blob, position, by):
    def change(changed):
        of(changed, blob).input[position] = by

    return change


NO_PLACES = {
    "another input": replace("u", 0, "x_o"),
    "an input that changes": insert("h_prev", "u"),
    "a bias of the step": lambda changed: (insert("bias", "r")(changed), replace("u", 2, "bias")(changed)),
    "along another axis": lambda changed: set_argument(of(changed, "u"), axis=1),
    "another kind of product": lambda changed: set_argument(of(changed, "u"), transpose=1),
    "parts that something reads": read("x_r"),
    "parts that the backward step reads": read_backward("x_u"),
    "sums that something reads": read("r"),
    "sums that the backward step reads": read_backward("u"),
    "sums of three": lambda changed: (
        of(changed, "u").input.append("x_o") or forward(changed, "Sum").input.append("x_o")
    ),
    "a split along another axis": lambda changed: set_argument(forward(changed, "Split"), axis=1),
    "a split of given widths": lambda changed: forward(changed, "Split").input.append("widths"),
    "another nonlinearity": lambda changed: setattr(of(changed, "u_opened"), "type", "Tanh"),
    "two kinds of sigmoid": lambda changed: (
        setattr(of(changed, "u_opened"), "type", "ATen"),
        of(changed, "u_opened").arg.append(core.utils.MakeArgument("operator", "sigmoid")),
    ),
    "a gate that is used before it is there": insert("u_opened", "u_opened"),
    "parts that are not neighbours": lambda changed: forward(changed, "Split").output.__setitem__(
        slice(0, 3), ["x_r", "x_o", "x_u"]
    ),
}


def test_the_places_that_it_is_about():
    assert reasons(loop()) == reasons(loop(second_first)) == [None]
    assert reasons(loop(three)) == [None, None]


@pytest.mark.parametrize("change", NO_PLACES.values(), ids=list(NO_PLACES))
def test_what_is_no_pair_of_gates(change):
    changed = loop()
    change(changed)
    assert reasons(changed) == []


def test_refuses_weights_of_unknown_size():
    unknown = "the size of the weights '{}' is not known; give shapes"
    for blob in ("r_w", "u_w"):
        assert reasons(loop(), {name: shape for name, shape in SHAPES.items() if name != blob}) == [
            unknown.format(blob)
        ]


def test_refuses_weights_of_three_dimensions():
    assert reasons(loop(), {**SHAPES, "u_w": (1, 1, D)}) == ["the weights 'u_w' have 3 dimensions"]


def test_refuses_parts_that_do_not_fit():
    expected = "parts of one width are added to products that are 1 and 2 wide"
    assert reasons(loop(), {**SHAPES, "u_w": (2, D)}) == [expected]


def read_before(changed):
    """Of the step before, in front of the product for it."""
    changed.operators.insert(changed.operators.index(of(changed, "u")), made("Tanh", ["u_opened"], ["more"]))


@pytest.mark.parametrize(
    "blob, change",
    [("u_opened", insert("u_opened", "u")), ("u_opened", read_before), ("x_t", insert("x_t", "r"))],
    ids=["written", "read", "what is split"],
)
def test_refuses_what_is_used_in_between(blob, change):
    changed = loop()
    change(changed)
    assert reasons(changed) == ["'{}' is used in between".format(blob)]


def test_sizes_that_are_not_known():
    (rule,) = [rule for rule in RULES if rule.name == RULE]
    changed = loop()
    (site,) = rule.sites(changed)
    known = {name: shape for name, shape in SHAPES.items() if name not in ("loop/X", "h_initial")}
    reason = rule.loss(changed, site, Sizes(known))
    assert reason == "the numbers of steps and sequences are not known; give shapes"
