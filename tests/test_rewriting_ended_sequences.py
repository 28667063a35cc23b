"""`ended_sequences`: an LSTM past the end of its sequences, whose gates are closed by what makes the sequence."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper

import comparing
import rewriting_support as support
from caffe2_recurrent import optimize
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.elementwise.lstm_forms import FORMS, ByKind
from caffe2_recurrent.rewriting.products import onednn
from caffe2_recurrent.rewriting.rules import ended_sequences, lstm_unit
from caffe2_recurrent.rewriting.rules.ended_sequences import CLOSING
from caffe2_recurrent.wiring import Link
from cells import CELLS
from every_pair import every_pair
from onednn_support import assert_cell
from test_rewriting_onednn import feed_parameters
from test_rewriting_rules import EXECUTOR, SHAPES, lstm_loop, made, named, reasons_in, why

RULE = "ended_sequences"
# By itself, with what takes its units apart, and with all others.
RULES = pytest.mark.parametrize("rules", [[RULE], [RULE, "lstm_unit"], None], ids=["alone", "unit", "all rules"])
OPTIONS = {
    "kept": {},
    "zeros past the end": {"drop_states": True},
    "forget bias": {"forget_bias": 1.5},
    "recomputed": support.RECOMPUTED,
    "recomputed zeros": {**support.RECOMPUTED, "drop_states": True},
    "all outputs": {"outputs_with_grads": "auto"},
    "no gradients": {"gradients": False},
    "forward only": {"gradients": False, "forward_only": True},
    "forward only, zeros": {"gradients": False, "forward_only": True, "drop_states": True},
    "Caffe2's": {"builder": rnn_cell.LSTM},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
# A sequence of no steps, one of some, and one that does not end.
LENGTHS = np.array([0, 4, support.T], np.int32)


def lstm(**options):
    model, blobs = support.lstm(lengths=True, **options)
    workspace.FeedBlob("lengths", LENGTHS)
    return model, blobs


def before_and_after(rules, executor=True, change=lambda: None, **options):
    """What a net gives, and what it gives once it is optimised, with the net; `change` changes what is fed."""
    found = []
    for rewrite in (lambda model: None, support.Optimised(rules)):
        workspace.ResetWorkspace()
        model, blobs = lstm(**options)
        change()
        rewrite(model)
        comparing.configure(model.net, executor)
        found.append(support.run(model, blobs))
    assert rewrite.report.counts[RULE] == 1 and reasons_in(rewrite.report, RULE) == [], str(rewrite.report)
    return (*found, model.net)


@every_pair
@EVERY_OPTION
@RULES
@EXECUTOR
def test_values_and_gradients(options, rules, executor):
    expected, found, _ = before_and_after(rules, executor, **options)
    support.assert_same(found, expected)


@pytest.mark.parametrize("options", [{}, {"drop_states": True}], ids=["", "zeros past the end"])
@pytest.mark.parametrize("rules", [["sequence_in_place", RULE], None], ids=["alone", "all rules"])
@EXECUTOR
def test_gates_that_were_kept_in_the_sequence(options, rules, executor):
    expected, found, _ = before_and_after(rules, executor, memory_optimization=True, **options)
    support.assert_same(found, expected)


@every_pair
@pytest.mark.parametrize("form", [*FORMS, ByKind], ids=lambda form: form.__name__)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("drop_states", [True, False])
def test_states_are_held_to_the_last_bit(form, trains, drop_states, monkeypatch):
    """In each form, with the gates far from open or closed: the products that are added are not small."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: form)

    def change():
        for parameter in ("i2h_w", "gates_t_w"):
            workspace.FeedBlob("layer/" + parameter, 30 * workspace.FetchBlob("layer/" + parameter))

    options = {"drop_states": drop_states, "gradients": trains, "forward_only": not trains}
    _, (found, _), _ = before_and_after(None, change=change, **options)
    hidden_all, hidden_last, cell_all, cell_last = found[:4]
    for states, last, initial in ((hidden_all, hidden_last, "h0"), (cell_all, cell_last, "c0")):
        for sequence, length in enumerate(LENGTHS):
            held = states[length - 1, sequence] if length else workspace.FetchBlob(initial)[0, sequence]
            expected = np.zeros_like(held) if drop_states else held
            np.testing.assert_array_equal(states[length:, sequence], np.tile(expected, (support.T - length, 1)))
        np.testing.assert_array_equal(last[0], states[-1])


@pytest.mark.parametrize("form", [*FORMS, ByKind], ids=lambda form: form.__name__)
def test_gates_that_are_closed_have_no_gradient(form, monkeypatch):
    """Not nearly none: what the sequence gets past its end is 0."""
    monkeypatch.setattr(lstm_unit, "_form", lambda *_: form)
    before_and_after(None)
    gradient = workspace.FetchBlob("layer/i2h_grad")
    for sequence, length in enumerate(LENGTHS):
        assert np.abs(gradient[:length, sequence]).max(initial=1) > 0
        np.testing.assert_array_equal(gradient[length:, sequence], 0)


@RULES
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, support.RECOMPUTED, {"drop_states": True}], ids=["", "recomputed", "zeros"])
def test_padding_need_not_hold_numbers(value, options, rules):
    def change():
        x = workspace.FetchBlob("x")
        for sequence, length in enumerate(LENGTHS):
            x[length:, sequence] = value
        workspace.FeedBlob("x", x)

    (expected, _), (found, _), _ = before_and_after(rules, change=change, **options)
    # The gradient of the weights that x is multiplied with is no number either way.
    kept = [index for index, output in enumerate(expected) if np.isfinite(output).all()]
    assert len(kept) == len(expected) - 1
    support.assert_same(([found[index] for index in kept], {}), ([expected[index] for index in kept], {}))


@pytest.mark.parametrize("name", [cell.name for cell in CELLS if "lstm" in cell.name or "attention" in cell.name])
@pytest.mark.parametrize("rules", [[RULE], None], ids=["alone", "all rules"])
def test_cells(name, rules):
    """Against the numpy loop. In a multiplicative LSTM the sequence is not only added."""
    rewrite = support.Optimised(rules)
    assert_cell(name, "kept", rewrite)
    assert rewrite.report.counts[RULE] == (not name.startswith("milstm"))


@RULES
def test_runs_of_other_sizes(rules):
    """In a net that is created once."""
    expected = support.runs_of_other_sizes(lambda model: None, lengths=True)
    rewrite = support.Optimised(rules)
    support.assert_same(support.runs_of_other_sizes(rewrite, lengths=True), expected)
    assert rewrite.report.counts[RULE] == 1


def stacked(rewrite):
    """Two layers in one loop; only the first adds a slice of the sequence."""
    workspace.ResetWorkspace()
    model = ModelHelper("stacked")
    sizes = [support.D, support.D]
    initial = ("h0", "c0", "h0", "c0")
    outputs = rnn_cell.LSTM(model, "x", "lengths", initial, support.DIM_IN, sizes, "layers", forward_only=False)
    model.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
    support.feed()
    workspace.FeedBlob("lengths", LENGTHS)
    workspace.RunNetOnce(model.param_init_net)
    feed_parameters(model, 3)
    rewrite(model)
    return support.run(model, [outputs[0], "x_grad", *map("{}_grad".format, model.params)])


@RULES
def test_a_second_layer_keeps_its_lengths(rules):
    expected = stacked(lambda model: None)
    rewrite = support.Optimised(rules)
    support.assert_same(stacked(rewrite), expected)
    assert rewrite.report.counts[RULE] == 1
    (reason,) = reasons_in(rewrite.report, RULE)
    assert "are not a sum of a product and a slice of the first sequence" in reason


# What it leaves.


@pytest.mark.parametrize("drop_states", [True, False])
def test_the_step(drop_states):
    net = before_and_after([RULE], drop_states=drop_states)[-1]
    (unit,) = [operator for operator in support.step(net).op if operator.type == "LSTMUnit"]
    assert "lengths" not in unit.input and len(unit.input) == 4
    arguments = {given.name: given.i for given in unit.arg}
    assert arguments["sequence_lengths"] == 0 and "drop_states" not in arguments
    kinds = [operator.type for operator in support.step(net).op]
    assert kinds == ["FC", "Sum", "LSTMUnit"] + ([] if drop_states else ["Mul", "Sum"])
    (gradient,) = [operator for operator in support.backward_step(net).op if operator.type == "LSTMUnitGradient"]
    assert "lengths" not in gradient.input and len(gradient.input) == 8
    assert gradient.input[-4] == unit.output[0]


def test_no_mask_is_left_in_a_step():
    """With all rules: nothing is put aside, nothing mixed, but for the hidden state that is held."""
    net = before_and_after(None)[-1]
    kinds = [given.s for operator in support.step(net).op for given in operator.arg if given.name == "operator"]
    assert not {b"where", b"lerp"} & set(kinds)
    masked = [operator for operator in support.step(net).op if "layer/ended_t" in operator.input]
    assert [operator.type for operator in masked] == ["Mul"]
    masked = [operator for operator in support.backward_step(net).op if "layer/ended_t" in operator.input]
    assert [operator.type for operator in masked] == ["Mul"]


def test_shapes_of_what_it_makes_can_be_inferred():
    net = before_and_after([RULE])[-1]
    proto = caffe2_pb2.NetDef(op=[operator for operator in net.Proto().op if operator.type != support.GRADIENT])
    given = {"x": [9, 3, 2], "lengths": [3], "layer/i2h_w": [16, 2], "layer/i2h_b": [16]}
    shapes, _ = workspace.InferShapesAndTypes([core.Net(proto)], given, nets_proto=False)
    # Of Transpose, which makes masks, older Caffe2s say nothing, nor of what is made of them.
    if "layer/mask" in shapes:
        assert shapes["layer/x_and_ended"] == [9, 3, 3] and shapes["layer/i2h_until_end"] == [9, 3, 16]


# What closes a gate.

ACTIVATIONS = {
    "LSTMUnit's": None,
    "Caffe2's sigmoid": made("Sigmoid", ["z"], ["y"]),
    "Caffe2's tanh": made("Tanh", ["z"], ["y"]),
    "ATen's sigmoid": made("ATen", ["z"], ["y"], operator="sigmoid"),
    "ATen's tanh": made("ATen", ["z"], ["y"], operator="tanh"),
}


@pytest.mark.parametrize("sign", [1, -1], ids=["closed", "open"])
@pytest.mark.parametrize("times", [0.5, 1, 2])
@pytest.mark.parametrize("name", [name for name, operator in ACTIVATIONS.items() if operator is not None])
def test_activations_of_what_closes_a_gate_are_exact(name, times, sign):
    """Whatever a product adds; in vectors and behind them."""
    products = np.linspace(-1e6, 1e6, 37).reshape(1, 1, 37)
    workspace.FeedBlob("z", (times * (sign * CLOSING + products)).astype(np.float32))
    workspace.RunOperatorOnce(ACTIVATIONS[name])
    least = 0 if "sigmoid" in name else -1
    np.testing.assert_array_equal(workspace.FetchBlob("y"), np.full((1, 1, 37), least if sign == 1 else 1))


@pytest.mark.parametrize("sign", [1, -1], ids=["closed", "open"])
def test_onednns_sigmoid_is_exact_too(sign):
    if onednn.is_missing():
        return
    workspace.FeedBlob("z", np.full((1, 3, 37), sign * CLOSING, np.float32))
    for kind, source, target in (
        ("CopyCPUToIDEEP", "z", "z there"),
        ("Sigmoid", "z there", "y there"),
        ("CopyIDEEPToCPU", "y there", "y"),
    ):
        operator = onednn.on_onednn(made(kind, [source], [target]))
        assert is_on_onednn(operator)
        workspace.RunOperatorOnce(operator)
    np.testing.assert_array_equal(workspace.FetchBlob("y"), np.full((1, 3, 37), 0 if sign == 1 else 1))


@pytest.mark.parametrize("closing", [-3.0, 0.0])
def test_a_gate_that_is_not_quite_closed_is_seen(closing, monkeypatch):
    monkeypatch.setattr(ended_sequences, "CLOSING", closing)
    expected, found, _ = before_and_after([RULE])
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same(found, expected)


# What it refuses.

SLICE, GATES = "layer/input_t", "layer/gates_t"
ALL_SHAPES = {**SHAPES, "x": (9, 3, 2), "layer/i2h_w": (16, 2), "layer/i2h_b": (16,)}
NO_SUM = "its gates '{}' are not a sum of a product and a slice of the first sequence".format(GATES)
NEEDED = "its gates '{}' are needed elsewhere too".format(GATES)


def summing(loop):
    (found,) = [operator for operator in loop.operators if operator.type == "Sum"]
    return found


def unit_of(loop):
    (found,) = [operator for operator in loop.operators if operator.type == "LSTMUnit"]
    return found


def refusals():
    def another_sum(loop):
        summing(loop).type = "Max"
        return NO_SUM

    def the_slice_twice(loop):
        summing(loop).input.append(SLICE)
        return NO_SUM

    def nothing_but_the_slice(loop):
        summing(loop).input[:] = [SLICE]
        return NO_SUM

    def another_sequence(loop):
        loop.links[:] = [link._replace(outer="y") if link.inner == SLICE else link for link in loop.links]
        return NO_SUM

    def gates_from_outside(loop):
        unit_of(loop).input[2] = "z"
        return NO_SUM.replace(GATES, "z")

    def a_sequence_of_others(loop):
        loop.surroundings.sources.clear()
        return "'layer/i2h' is not made by an FC for this loop alone"

    def a_slice_that_is_read_again(loop):
        loop.operators.append(made("Copy", [SLICE], ["v"]))
        return "'{}' is needed elsewhere in the step too".format(SLICE)

    def a_slice_that_is_written(loop):
        loop.operators.append(made("Copy", ["h0"], [SLICE]))
        return "'{}' is needed elsewhere in the step too".format(SLICE)

    def a_slice_for_others(loop):
        loop.net.external_output.append(SLICE)
        return "'{}' is needed behind the step too".format(SLICE)

    def gates_that_are_read(loop):
        loop.operators.append(made("Copy", [GATES], ["v"]))
        return NEEDED

    def gates_for_others(loop):
        loop.net.external_output.append(GATES)
        return NEEDED

    def gates_over_all_steps(loop):
        loop.links.append(Link(GATES, "all_gates", 0))
        return NEEDED

    def gates_of_the_backward_step(loop):
        loop.gradient.operators.append(made("Copy", [GATES], ["v"]))
        return NEEDED

    def a_product_of_another_sequence(loop):
        loop.links.append(Link("y_t", "y", 0))
        next(operator for operator in loop.operators if operator.type == "FC").input[0] = "y_t"
        return "what is added to '{}' is not a product of states alone".format(SLICE)

    def something_else_of_states(loop):
        next(operator for operator in loop.operators if operator.type == "FC").type = "Cumulated"
        return "what is added to '{}' is not a product of states alone".format(SLICE)

    def lengths_of_each_step(loop):
        loop.links.append(Link("lengths", "all_lengths", 0))
        return "its lengths 'lengths' are not the same in all steps"

    def another_count(loop):
        unit_of(loop).input[-1] = "count"
        return "it counts the steps by 'count', not by the loop's 'layer/timestep'"

    return [plant for plant in locals().values() if callable(plant)]


@named(refusals())
def test_refusals(plant):
    loop = lstm_loop(lengths=True)
    assert why(RULE, loop, ALL_SHAPES) == [None]
    expected = plant(loop)
    assert why(RULE, loop, ALL_SHAPES) == [expected]


@pytest.mark.parametrize("blob, shape", [("x", (9, 3, 2, 1)), ("x", (27, 2)), ("layer/i2h_w", (16, 2, 1))])
def test_other_dimensions(blob, shape):
    expected = "'{}' has {} dimensions".format(blob, len(shape))
    assert why(RULE, lstm_loop(lengths=True), {**ALL_SHAPES, blob: shape}) == [expected]


@pytest.mark.parametrize("blob", ["x", "layer/i2h_w"])
def test_sizes_that_are_not_known(blob):
    shapes = {name: shape for name, shape in ALL_SHAPES.items() if name != blob}
    expected = "the size of '{}' is not known; give shapes".format(blob)
    assert why(RULE, lstm_loop(lengths=True), shapes) == [expected]


def test_without_aten(monkeypatch):
    """A unit that is not taken apart had better know when a sequence ends."""
    support.without_aten(monkeypatch)
    assert why(RULE, lstm_loop(lengths=True), ALL_SHAPES) == ["this Caffe2 has no ATen operator"]


def test_without_lengths_there_is_nothing_to_say():
    assert why(RULE, lstm_loop(), ALL_SHAPES) == []


@pytest.mark.parametrize("width, expected", [(16, None), (17, "'x' is wider than the gates")])
def test_a_wide_x_does_not_pay(width, expected, monkeypatch):
    monkeypatch.setattr(lstm_unit, "FEWEST_ELEMENTS", 1)
    shapes = {**ALL_SHAPES, "x": (9, 3, width), "layer/i2h_w": (16, width)}
    assert why(RULE, lstm_loop(lengths=True), shapes, loss=True) == [expected]


def test_a_small_state_does_not_pay():
    expected = "with 12 elements in a state LSTMUnit is faster"
    assert why(RULE, lstm_loop(lengths=True), ALL_SHAPES, loss=True) == [expected]
    model, _ = support.lstm(lengths=True)
    assert optimize(model, [RULE, "lstm_unit"]).total == 0


@pytest.mark.parametrize("multiplies", [True, False], ids=["ATen's products", "Caffe2's products"])
def test_either_product(multiplies, monkeypatch):
    monkeypatch.setattr(vectorised, "aten_multiplies_faster", lambda elements: multiplies)
    expected, found, _ = before_and_after(None)
    support.assert_same(found, expected)


@RULES
def test_a_net_read_from_a_file(rules):
    expected, _, _ = before_and_after(rules)
    workspace.ResetWorkspace()
    model, blobs = lstm()
    net = support.as_read_from_a_file(model.net)
    assert optimize(net, rules, even_if_slower=True).counts[RULE] == 1
    workspace.RunNetOnce(net)
    support.assert_same(support.values(blobs), expected)
