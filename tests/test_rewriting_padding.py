"""Padding that is no number: cut off before the loop, where that is enough, or put aside in each step."""

import numpy as np
import pytest
from caffe2.python import core, gru_cell, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper

import rewriting_support as support
from caffe2_recurrent import GRU, MILSTM, optimize, recurrent_net
from caffe2_recurrent.loops.parts import State
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.rules import RULES
from caffe2_recurrent.rewriting.sequences import masks, padding
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import result
from caffe2_recurrent.wiring import Link
from every_pair import every_pair
from onednn_support import leaving_no_trace
from test_rewriting_ended_sequences import ALL_SHAPES, LENGTHS, SLICE
from test_rewriting_onednn import feed_parameters
from test_rewriting_rules import forward, lstm_loop, made, named, set_argument

LAYERS = {
    "milstm": (MILSTM, ("h0", "c0"), support.D),
    "gru": (GRU, ("h0",), support.D),
    "Caffe2's milstm": (rnn_cell.MILSTM, ("h0", "c0"), support.D),
    "Caffe2's gru": (gru_cell.GRU, ("h0",), support.D),
    # Two layers in one loop, of which the second sees no sequence.
    "layers": (rnn_cell.LSTM, ("h0", "c0", "h0", "c0"), [support.D, support.D]),
}
WITHOUT_ENDS = [rule.name for rule in RULES if rule.name != "ended_sequences"]
OPTIONS = {
    "kept": {},
    "zeros past the end": {"drop_states": True},
    "recomputed": {"memory_optimization": True},
    "forward only": {"forward_only": True},
}


def built(name, value=None, **options):
    """A layer whose padding is all `value`; its states, and the gradients that padding leaves alone."""
    builder, initial, size = LAYERS[name]
    model = ModelHelper("padded")
    outputs = builder(model, "x", "lengths", initial, support.DIM_IN, size, "layer", **options)
    found = {}
    if not options.get("forward_only"):
        found = model.net.AddGradientOperators({outputs[0]: model.net.AddExternalInput("dh")})
    support.feed()
    workspace.FeedBlob("lengths", LENGTHS)
    if value is not None:
        x = workspace.FetchBlob("x")
        for sequence, length in enumerate(LENGTHS):
            x[length:, sequence] = value
        workspace.FeedBlob("x", x)
    workspace.RunNetOnce(model.param_init_net)
    feed_parameters(model, 3)
    blobs = [str(outputs[0]), *(str(found[blob]) for blob in ("h0", *map(str, model.params)) if blob in found)]
    return model, blobs


def before_and_after(name, rules=None, value=None, **options):
    found = []
    for rewrite in (lambda model: None, support.Optimised(rules)):
        workspace.ResetWorkspace()
        model, blobs = built(name, value, **options)
        rewrite(model)
        found.append(support.run(model, blobs)[0])
    return (*found, rewrite)


def puts_aside(net):
    return [operator for operator in support.step(net).op if b"where" in [given.s for given in operator.arg]]


@every_pair
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("rules", [None, WITHOUT_ENDS], ids=["all rules", "no ends"])
@pytest.mark.parametrize("value", [None, np.nan, np.inf])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name, value, rules, options):
    """Those that stock Caffe2 has as numbers; of some parameters it has none, for 0 times no number is none."""
    expected, found, rewrite = before_and_after(name, rules, value, **options)
    kept = [index for index, output in enumerate(expected) if np.isfinite(output).all()]
    assert 0 in kept and (value is not None or len(kept) == len(expected))
    support.assert_same(([found[index] for index in kept], {}), ([expected[index] for index in kept], {}))
    assert puts_aside(rewrite.net) == []


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_cut(name):
    """The sequence is made of x with zeros, and has another name."""
    _, _, rewrite = before_and_after(name, WITHOUT_ENDS, np.nan)
    (cut,) = [operator for operator in rewrite.net.Proto().op if operator.type == "Where"]
    assert cut.output[0] == "layer/x_rows_inside"
    x = workspace.FetchBlob("layer/x_inside")
    for sequence, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(x[:length, sequence], workspace.FetchBlob("x")[:length, sequence])
        np.testing.assert_array_equal(x[length:, sequence], 0)
    assert not any(operator.type == "FC" and "x" in operator.input for operator in rewrite.net.Proto().op)


def test_a_wrong_cut_is_seen(monkeypatch):
    monkeypatch.setattr(padding, "cut", lambda loop, x, inside: loop.add_before("Scale", [x], "x_inside", scale=1.01))
    expected, found, _ = before_and_after("gru")
    with pytest.raises(AssertionError, match="output 0"):
        support.assert_same((found, {}), (expected, {}))


@pytest.mark.parametrize("shape", [(4, 3, 2), (1, 1, 1), (0, 3, 2), (4, 3, 7)])
def test_rows_are_cut(shape):
    """By operators of Caffe2's, whose shapes it can infer."""
    steps, batch, _ = shape
    loop = trial.lone_loop(["x", "inside"])
    padding.cut(loop, "x", "inside")
    random = np.random.RandomState(2)
    inside = random.randint(0, 2, (steps, batch, 1)).astype(np.float32)
    x = np.where(inside, random.randn(*shape), np.nan).astype(np.float32)
    with leaving_no_trace():
        found = result(loop.before, {"x": x, "inside": inside}, loop.before[-1].output[0])
    np.testing.assert_array_equal(found, np.where(inside, x, 0))


# Where it is not enough, or not possible, the step puts its gates aside.


def plants():
    def another_sequence(loop):
        loop.links.append(Link("y_t", "y", 0))

    def the_slice_twice(loop):
        loop.links.append(Link("x_again", "layer/i2h", 0))

    def a_quotient(loop):
        loop.operators.insert(0, made("Div", [SLICE, SLICE], ["v"]))

    def a_sequence_of_others(loop):
        loop.surroundings.sources.clear()

    def a_slice_that_is_written(loop):
        loop.operators.insert(0, made("Copy", ["h0"], [SLICE]))

    def a_slice_for_others(loop):
        loop.net.external_output.append(SLICE)

    def another_axis(loop):
        (source,) = loop.surroundings.products[loop.surroundings.sources["layer/i2h"]]
        (axis,) = [given for given in source.arg if given.name == "axis"]
        axis.i = 1

    def a_state_that_sees_the_slice(loop):
        loop.operators.append(made("Tanh", [SLICE], ["v"]))
        loop.states.append(State("v_states", "v0"))
        loop.links.append(Link("v", "v_states", 1))

    def an_output_that_sees_the_gates(loop):
        loop.operators.append(made("Tanh", ["layer/gates_t"], ["v"]))
        loop.net.external_output.append("v")

    def a_unit_with_other_lengths(loop):
        forward(loop, "LSTMUnit").input[3] = "other_lengths"

    def a_unit_without_lengths(loop):
        set_argument(forward(loop, "LSTMUnit"), sequence_lengths=0)

    def a_unit_that_holds_the_slice(loop):
        forward(loop, "LSTMUnit").input[1] = SLICE

    return [plant for plant in locals().values() if callable(plant)]


def cut_in(loop, shapes=ALL_SHAPES):
    """Whether what the sequence is made of is cut, and whether steps put something aside then."""
    padding.cut_if_possible(loop, "lengths", Sizes(shapes))
    emitter = Emitter(loop, loop.forward, "z")
    kept = padding.emit_only_inside(emitter, "lengths", "z") == ["z"]
    assert kept is not any(operator.type == "ATen" for operator in emitter.operators)
    assert kept is any(operator.type == "Where" for operator in loop.before)
    return kept


def test_it_is_cut_once():
    loop = lstm_loop(lengths=True)
    assert cut_in(loop) and cut_in(loop)
    assert [operator.type for operator in loop.before].count("Where") == 1


@named(plants())
def test_it_stays_where_that_is_not_enough(plant):
    loop = lstm_loop(lengths=True)
    plant(loop)
    before = [list(operator.input) for operator in loop.operators], loop.inputs[0]
    assert not cut_in(loop)
    assert ([list(operator.input) for operator in loop.operators], loop.inputs[0]) == before


def test_who_may_see_the_slice():
    """What meets gradients alone, behind the loop, and what is something else in the end."""
    loop = lstm_loop(lengths=True)
    loop.operators += [made("Tanh", [SLICE], [blob]) for blob in "uv"] + [made("Copy", ["h0"], ["v"])]
    loop.links.append(loop.add_buffer("u", "u0"))
    loop.net.external_output.append("v")
    assert cut_in(loop)


@pytest.mark.parametrize("shape", [None, (27, 2), (9, 3, 2, 1)])
def test_it_stays_where_the_dimensions_are_others(shape):
    shapes = {blob: size for blob, size in {**ALL_SHAPES, "x": shape}.items() if size is not None}
    assert not cut_in(lstm_loop(lengths=True), shapes)


def test_masks_of_a_rule_are_no_sequences():
    loop = lstm_loop(lengths=True)
    masks.step_mask(loop, "lengths")
    masks.step_outside(loop, "lengths")
    assert padding.may_be_cut(loop) is not None and cut_in(loop)


def test_other_lengths_are_another_matter():
    loop = lstm_loop(lengths=True)
    assert cut_in(loop)
    emitter = Emitter(loop, loop.forward, "z")
    assert padding.emit_only_inside(emitter, "other_lengths", "z") != ["z"]


def test_a_report_does_not_change():
    """It belongs to the rules that take units apart."""
    model, _ = built("gru")
    report = optimize(model, ["gru_unit"], even_if_slower=True)
    assert report.counts == {"gru_unit": 1} and report.refusals == ()


def with_products_of(sequences):
    """LSTMUnit over h W + sum of y V, y of each sequence, with all padding no numbers, and what it gives."""

    def run(rewrite):
        workspace.ResetWorkspace()
        net, step = core.Net("net"), core.Net("products_step")
        h, c, lengths, t = step.AddExternalInputs("h_prev", "c_prev", "lengths", "t")
        slices = [step.AddExternalInput(name + "_t") for name in sequences]
        products = [step.FC([h, "w_h", "b"], "of_h", axis=2)]
        products += [step.FC([y, "w_{}".format(y), "b"], "of_{}".format(y), axis=2) for y in slices[1:]]
        hidden, cell = step.LSTMUnit([h, c, step.Sum([*products, slices[0]], "gates"), lengths, t], ["h_t", "c_t"])
        net.FC(["x", "w_x", "b"], "loop/X", axis=2)
        inputs = list(zip(slices, ["loop/X", *sequences[1:]]))
        outputs = recurrent_net(
            net,
            step,
            inputs,
            [(h, "h0"), (c, "c0")],
            {h: hidden, c: cell},
            timestep="t",
            scope="loop",
            forward_only=True,
        )
        random = np.random.RandomState(4)
        support.feed()
        for name in ("w_h", "w_x", *("w_{}".format(y) for y in slices[1:])):
            columns = support.DIM_IN if name == "w_x" else support.D
            workspace.FeedBlob(name, random.uniform(-1, 1, (4 * support.D, columns)).astype(np.float32))
        workspace.FeedBlob("b", np.zeros(4 * support.D, np.float32))
        workspace.FeedBlob("lengths", LENGTHS)
        for name in ("x", *sequences[1:]):
            columns = support.DIM_IN if name == "x" else support.D
            value = random.uniform(-1, 1, (support.T, support.N, columns)).astype(np.float32)
            for sequence, length in enumerate(LENGTHS):
                value[length:, sequence] = np.nan
            workspace.FeedBlob(name, value)
        rewrite(net)
        workspace.RunNetOnce(net)
        return workspace.FetchBlob(str(outputs[0]))

    return run


@pytest.mark.parametrize("sequences", [["x"], ["x", "y"]], ids=["one", "two"])
def test_what_rules_make_of_another_sequence_is_not_cut_with_the_first(sequences):
    """Its products are made before the loop, of padding that is no number."""
    run = with_products_of(sequences)
    expected = run(lambda net: None)
    assert np.isfinite(expected).all()
    rewrite = support.Optimised(WITHOUT_ENDS)
    found = run(rewrite)
    assert rewrite.report.counts["sequence_operators"] == len(sequences) - 1
    assert rewrite.report.counts["lstm_unit"] == 1
    assert bool(puts_aside(rewrite.net)) == (len(sequences) > 1)
    assert support.difference(found, expected) < support.TOLERANCE


UNITS = {"LSTMUnit": 4, "GRUUnit": 3}


def with_unit(kind, sees_padding, rewrite, **options):
    """A unit whose gates are the slice itself; or a sum with it, where a state without lengths sees the slice too."""
    workspace.ResetWorkspace()
    net, step = core.Net("net"), core.Net("unit_step")
    x, *states, lengths, t = step.AddExternalInputs("x_t", *["h_prev", "c_prev"][: UNITS[kind] - 2], "lengths", "t")
    gates = step.Sum([step.FC([states[0], "w_h", "b"], "of_h", axis=2), x], "gates") if sees_padding else x
    made_by_unit = [blob + "_t" for blob in "hc"[: len(states)]]
    getattr(step, kind)([*states, gates, lengths, t], made_by_unit, sequence_lengths=1, drop_states=0)
    links = {state: core.BlobReference(blob, step) for state, blob in zip(states, made_by_unit)}
    if sees_padding:
        other = step.AddExternalInput("s_prev")
        links[other] = step.Tanh(step.Sum([step.FC([x, "w_s", "b_s"], "of_x", axis=2), other], "total"), "s_t")
    net.FC(["x", "w_x", "b"], "loop/X", axis=2)
    initial = [(state, str(state)[0] + "0") for state in links]
    options["outputs_with_grads"] = seen = sorted({0, 2 * sees_padding * (len(links) - 1)})
    outputs = recurrent_net(net, step, [(x, "loop/X")], initial, links, timestep="t", scope="loop", **options)
    random, columns = np.random.RandomState(5), UNITS[kind] * support.D
    support.feed()
    shapes = {"w_h": (columns, support.D), "w_x": (columns, support.DIM_IN), "b": (columns,)}
    shapes.update({"w_s": (support.D, columns), "b_s": (support.D,), "s0": (1, support.N, support.D)})
    for blob, shape in shapes.items():
        workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
    workspace.FeedBlob("lengths", LENGTHS)
    gradients = []
    if not options.get("forward_only"):
        found = net.AddGradientOperators(dict.fromkeys((outputs[index] for index in seen), net.AddExternalInput("dh")))
        gradients = [str(found[blob]) for blob in ("x", "w_x", "h0") if blob in found]
    rewrite(net)
    workspace.RunNetOnce(net)
    return [workspace.FetchBlob(str(blob)) for blob in [*outputs[: 2 * len(links)], *gradients]]


@every_pair
@pytest.mark.parametrize("options", [{}, {"forward_only": True}], ids=["training", "forward only"])
@pytest.mark.parametrize("rules", [["lstm_unit", "gru_unit"], None], ids=["alone", "all rules"])
@pytest.mark.parametrize("sees_padding", [False, True], ids=["the slice itself", "another state sees it"])
@pytest.mark.parametrize("kind", UNITS)
def test_what_else_sees_the_slice(kind, sees_padding, rules, options):
    expected = with_unit(kind, sees_padding, lambda net: None, **options)
    rewrite = support.Optimised(rules)
    found = with_unit(kind, sees_padding, rewrite, **options)
    assert rewrite.report.counts[kind.lower().replace("unit", "_unit")] == 1
    is_cut = any(operator.type == "Where" for operator in rewrite.net.Proto().op)
    assert is_cut is not sees_padding
    support.assert_same((found, {}), (expected, {}))


@pytest.mark.parametrize("width, expected", [(16, True), (17, False)])
def test_a_wide_x_is_not_cut(width, expected):
    shapes = {**ALL_SHAPES, "x": (9, 3, width), "layer/i2h_w": (16, width)}
    assert cut_in(lstm_loop(lengths=True), shapes) == expected
