"""The rule `gru_unit`: GRUUnit and its gradient in vectorised operators."""

import numpy as np
import pytest
from caffe2.python import core, gru_cell, workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import cells
import comparing
import numpy_loop
import step_memory
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.rules import RULES, gru_unit
from caffe2_recurrent.rewriting.rules.parameter_gradients import ParameterGradients
from cells import CELLS, D, N, T
from every_pair import every_pair
from rewriting_support import Optimised
from step_nets import Maker, scoped

STEP_NUMBER_BYTES = 4
STOCK = cells.Cell("gru_stock", cells.plain(gru_cell.GRU), cells.gru_loop, cells.GRU_SHAPES, {"hidden": D})
GRUS = [cell for cell in CELLS if cell.name.startswith("gru")]
EVERY_GRU = pytest.mark.parametrize("cell", [*GRUS, STOCK], ids=lambda cell: cell.name)
EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])


def run(cell, executor=True, rules=None):
    """Outputs, gradients by name, report and model of a cell run optimised."""
    rewrite = Optimised(rules)
    outputs, gradients, model = cell.run(executor, rewrite)
    return outputs, gradients, rewrite.report, model


def assert_same(cell, executor=True, rules=None):
    """Optimised, the cell gives what it gives as it is, and what the numpy loop gives; returns report and model."""
    outputs, gradients, report, model = run(cell, executor, rules)
    for index, (found, expected) in enumerate(zip(outputs, cell.reference())):
        comparing.assert_close(found, expected, "output {}".format(index))
    if not cell.options.get("forward_only"):
        for name, expected in cell.reference_gradients().items():
            comparing.assert_close(gradients[name], expected, "gradient of " + name)
    workspace.ResetWorkspace()
    plain_outputs, plain_gradients, _ = cell.run(executor)
    assert set(gradients) == set(plain_gradients)
    for found, expected in zip(outputs, plain_outputs):
        comparing.assert_close(found, expected, "output as it is", tolerance=1e-6)
    for name, expected in plain_gradients.items():
        comparing.assert_close(gradients[name], expected, "gradient as it is: " + name, tolerance=1e-5)
    return report, model


def types(net, step="step_net"):
    """The operators' types of the step of the one loop in `net`; ATen's with the kernel's name."""
    (loop,) = [operator for operator in net.Proto().op if operator.type == "RecurrentNetwork"]
    (operators,) = [argument.n.op for argument in loop.arg if argument.name == step]
    return [
        ":".join([operator.type] + [argument.s.decode() for argument in operator.arg if argument.name == "operator"])
        for operator in operators
    ]


@every_pair
@EVERY_GRU
@EXECUTOR
@pytest.mark.parametrize("lengths", [None, [0, 0], [T, 0], [1, T]], ids=str)
@pytest.mark.parametrize("drop_states", [False, True], ids=["keep", "drop"])
def test_values_and_gradients_stay(cell, executor, lengths, drop_states):
    cell = cell.but(lengths=lengths, options={"drop_states": drop_states})
    report, model = assert_same(cell, executor)
    assert report.counts["gru_unit"] == 1
    both = types(model.net) + types(model.net, "backward_step_net")
    assert not {"GRUUnit", "GRUUnitGradient"} & set(both)


@EVERY_GRU
def test_alone(cell):
    report, model = assert_same(cell.but(lengths=[T, 1]), rules=["gru_unit"])
    assert (report.counts, report.refusals) == ({"gru_unit": 1}, ())
    # The parts of the gates are used as they are: what is left joins the gradient of the input's parts.
    assert types(model.net).count("Concat") == 0 and types(model.net).count("Split") == 1
    backward = types(model.net, "backward_step_net")
    assert backward.count("Split") == 0 and backward.count("Concat") == 1


@EVERY_GRU
@pytest.mark.parametrize("choice", [(1,), (0, 1)], ids=str)
def test_other_outputs_with_gradients(cell, choice):
    assert_same(cell.but(lengths=[2, T], options={"outputs_with_grads": choice}))


@EVERY_GRU
def test_initial_states_of_one_dimension(cell):
    assert_same(cell.but(rank=1))


@EVERY_GRU
@pytest.mark.parametrize("drop_states", [False, True], ids=["keep", "drop"])
def test_forward_only(cell, drop_states):
    options = {"forward_only": True, "drop_states": drop_states}
    report, _ = assert_same(cell.but(steps=6, lengths=[4, 0], options=options))
    assert report.counts["gru_unit"] == 1


@every_pair
@pytest.mark.parametrize("cell", GRUS, ids=lambda cell: cell.name)
@EXECUTOR
@pytest.mark.parametrize("drop_states", [False, True], ids=["keep", "drop"])
def test_recomputing_keeps_the_step_number_alone(cell, executor, drop_states):
    cell = cell.but(lengths=[T, 1], options={"drop_states": drop_states})
    _, gradients, _, model = run(cell, executor)
    assert min(step_memory.owned_bytes(model.net)) > STEP_NUMBER_BYTES
    workspace.ResetWorkspace()
    cell = cell.remembering_nothing()
    _, again, report, model = run(cell, executor)
    assert report.counts["gru_unit"] == 1
    assert step_memory.owned_bytes(model.net) == [STEP_NUMBER_BYTES] * T
    assert "Concat" not in types(model.net)
    for name in gradients:
        comparing.assert_close(gradients[name], again[name], name, tolerance=1e-6)
    assert_same(cell, executor)


def test_no_more_is_kept_than_before():
    cell = GRUS[0]
    _, _, model = cell.run()
    before = step_memory.owned_bytes(model.net)
    workspace.ResetWorkspace()
    _, _, _, model = run(cell, rules=["gru_unit"])
    assert max(step_memory.owned_bytes(model.net)) < min(before)


def test_a_state_stays_to_the_last_bit_past_the_end():
    cell = GRUS[0].but(steps=7, lengths=[2, 5])
    (hidden, last), _, _, _ = run(cell)
    for sequence, length in enumerate(cell.lengths):
        for t in range(length, 7):
            np.testing.assert_array_equal(hidden[t, sequence], hidden[length - 1, sequence])
    np.testing.assert_array_equal(last[0], hidden[-1])


@settings(max_examples=20)
@given(st.data())
def test_random_sizes_lengths_and_options(data):
    workspace.ResetWorkspace()
    changed = cells.drawn(data, GRUS, ["memory_optimization", "drop_states"])
    rules = data.draw(st.sets(st.sampled_from([rule.name for rule in RULES])))
    report, _ = assert_same(changed, data.draw(st.booleans()), {*rules, "gru_unit"})
    assert report.counts["gru_unit"] == 1


# Step nets made by hand, in which something is not as in a GRU cell.


def numpy_gru_unit(operator, hidden_prev, gates, *rest):
    _, update, output = np.split(gates, 3, axis=-1)
    update = cells.sigmoid(update)
    hidden = update * hidden_prev + (1 - update) * np.tanh(output)
    if len(rest) == 1:
        return hidden
    lengths, timestep = rest
    kept = 0.0 if any(argument.name == "drop_states" and argument.i for argument in operator.arg) else 1.0
    return np.where((timestep.reshape(()) < lengths)[np.newaxis, :, np.newaxis], hidden, kept * hidden_prev)


@pytest.fixture(autouse=True)
def numpy_knows_the_unit(monkeypatch):
    monkeypatch.setitem(numpy_loop.OPERATORS, "GRUUnit", numpy_gru_unit)


def start():
    make = Maker()
    return make, make.cell.AddScopedExternalInputs("timestep")[0], make.state()


def finish(make, timestep, h, gates, **options):
    make.link(h, make.cell.GRUUnit([h, gates, timestep], "h_t", sequence_lengths=0))
    return make.done(timestep, **options)


def joined(make, h, widths=(D, D, D)):
    x = make.sequence()
    reset, update, output = [make.fc(h, name, D, width) for name, width in zip(("reset", "update", "output"), widths)]
    output = make.cell.Sum([output, x], "summed")
    gates, _ = make.cell.Concat([reset, update, output], ["gates", "gates_sizes"], axis=2)
    return gates, update


def three_parts(**options):
    make, timestep, h = start()
    return finish(make, timestep, h, joined(make, h)[0], **options)


def three_parts_recomputed():
    return three_parts(recompute_blobs_on_backward=scoped("gates", "gates_sizes"))


def uneven_parts():
    make, timestep, h = start()
    return finish(make, timestep, h, joined(make, h, (D - 1, D + 1, D))[0])


def two_parts():
    make, timestep, h = start()
    x = make.sequence()
    first, second = make.fc(h, "first", D, 2 * D), make.cell.Sum([make.fc(h, "second"), x], "summed")
    gates, _ = make.cell.Concat([first, second], ["gates", "gates_sizes"], axis=2)
    return finish(make, timestep, h, gates)


def one_piece(**options):
    make, timestep, h = start()
    x = make.sequence(size=3 * D)
    return finish(make, timestep, h, make.cell.Sum([make.fc(h, "u", D, 3 * D), x], "gates"), **options)


def one_piece_recomputed():
    return one_piece(recompute_blobs_on_backward=scoped("gates"))


def gates_from_outside():
    make, timestep, h = start()
    return finish(make, timestep, h, make.sequence(size=3 * D))


def another_reader():
    make, timestep, h = start()
    other = make.state("other", size=3 * D)
    gates, _ = joined(make, h)
    make.link(other, make.cell.Tanh(gates, "other_t"))
    return finish(make, timestep, h, gates, outputs_with_grads=(0, 2))


def reader_of_a_part():
    make, timestep, h = start()
    other = make.state("other")
    gates, update = joined(make, h)
    make.link(other, make.cell.Tanh(update, "other_t"))
    return finish(make, timestep, h, gates, outputs_with_grads=(0, 2))


def linked_gates():
    make, timestep, h = start()
    state = make.state("last_gates", size=3 * D)
    gates, _ = joined(make, h)
    make.link(state, gates)
    return finish(make, timestep, h, gates, outputs_with_grads=(0,))


def changed_part():
    make, timestep, h = start()
    gates, update = joined(make, h)
    make.cell.Scale([update], [update], scale=3.0)
    return finish(make, timestep, h, gates, forward_only=True)


def no_gradient():
    make, timestep, h = start()
    gates, _ = joined(make, h)
    hidden = make.cell.GRUUnit([h, gates, timestep], "unit", sequence_lengths=0)
    stopped = make.cell.StopGradient(hidden, "stopped")
    make.link(h, make.cell.Sum([stopped, make.fc(h, "more")], "h_t"))
    return make.done(timestep)


# Each with whether the parts of the gates can be used as they are.
HAND_MADE = {
    three_parts: True,
    three_parts_recomputed: True,
    uneven_parts: False,
    two_parts: False,
    one_piece: False,
    one_piece_recomputed: False,
    gates_from_outside: False,
    another_reader: True,
    reader_of_a_part: True,
    linked_gates: True,
    changed_part: False,
}


def run_step_net(step_net, executor=True, rules=None, known=True, planted=()):
    """Outputs, gradients, report and net of a step net run optimised; its shapes are known or not.

    `planted` are operators that the backward step has in addition.
    """
    optimised = Optimised(rules)

    def rewrite(net):
        for operator in net.Proto().op:
            for argument in operator.arg:
                if argument.name == "backward_step_net":
                    argument.n.op.extend(planted)
        values = {blob: workspace.FetchBlob(blob) for blob in workspace.Blobs()}
        if not known:
            workspace.ResetWorkspace()
        optimised(net)
        for blob, value in values.items():
            workspace.FeedBlob(blob, value)

    outputs, gradients = comparing.run(recurrent_net, step_net, executor, rewrite)
    return outputs, gradients, optimised.report, optimised.net


def assert_step_net_is_right(step_net, **how):
    outputs, gradients, report, net = run_step_net(step_net, **how)
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)
    return report, net


@every_pair
@pytest.mark.parametrize("make", HAND_MADE, ids=lambda make: make.__name__)
@EXECUTOR
@pytest.mark.parametrize("rules", [None, ["gru_unit"]], ids=["all", "alone"])
def test_step_nets_made_by_hand(make, executor, rules):
    report, net = assert_step_net_is_right(make(), executor=executor, rules=rules)
    assert report.counts["gru_unit"] == 1
    assert ("Split" not in types(net)) == HAND_MADE[make]


@pytest.mark.parametrize("make", [three_parts, three_parts_recomputed, one_piece], ids=lambda make: make.__name__)
def test_without_shapes_the_gates_are_split_in_the_step(make):
    report, net = assert_step_net_is_right(make(), known=False)
    assert report.counts["gru_unit"] == 1
    assert "Split" in types(net) and "Concat" in types(net, "backward_step_net")


def test_what_something_else_reads_is_still_joined():
    for make in (another_reader, linked_gates):
        _, net = assert_step_net_is_right(make(), rules=["gru_unit"])
        assert types(net).count("Concat") == 1
        workspace.ResetWorkspace()


def test_another_reader_of_the_gradient_of_the_gates():
    planted = [core.CreateOperator("Copy", ["gates_grad"], ["spare"])]
    report, net = assert_step_net_is_right(three_parts(), planted=planted)
    assert report.counts["gru_unit"] == 1
    assert types(net, "backward_step_net").count("Concat") == 1


@EXECUTOR
@pytest.mark.parametrize("drop_states", [False, True], ids=["keep", "drop"])
def test_two_units_in_a_step(executor, drop_states):
    """The second one's gates are made of the first one's state; both have the same lengths."""
    make, timestep, h = start()
    lengths, upper = make.cell.AddScopedExternalInputs("lengths")[0], make.state("upper")
    make.outer["lengths"] = np.array([T, 1], np.int32)
    gates, _ = joined(make, h)
    hidden = make.cell.GRUUnit([h, gates, lengths, timestep], "h_t", drop_states=drop_states)
    gates = make.fc(hidden, "upper_gates", D, 3 * D)
    make.link(h, hidden)
    make.link(upper, make.cell.GRUUnit([upper, gates, lengths, timestep], "upper_t", drop_states=drop_states))
    step_net = make.done(timestep, outputs_with_grads=(0, 2))
    report, _ = assert_step_net_is_right(step_net, executor=executor)
    assert report.counts["gru_unit"] == 2


def test_gates_in_one_piece_take_the_memory_of_their_gradient():
    report, net = assert_step_net_is_right(one_piece_recomputed())
    assert report.counts["gradient_buffer"] == 1
    assert report.counts["gru_unit"] == 1


def no_gradient_of_the_gates():
    make, timestep, h = start()
    x = make.sequence()
    parts = [make.cell.StopGradient(make.fc(h, name), name + "_stopped") for name in ("reset", "update", "output")]
    gates, _ = make.cell.Concat(parts, ["gates", "gates_sizes"], axis=2)
    hidden = make.cell.GRUUnit([h, gates, timestep], "unit", sequence_lengths=0)
    make.link(h, make.cell.Sum([hidden, x], "h_t"))
    return make.done(timestep)


@pytest.mark.parametrize("make", [no_gradient, no_gradient_of_the_gates], ids=lambda make: make.__name__)
def test_where_gradients_stop(make):
    """The numpy loop's numerical gradients would see one."""
    step_net = make()
    expected, plain_gradients = comparing.run(recurrent_net, step_net)
    workspace.ResetWorkspace()
    outputs, gradients, report, _ = run_step_net(step_net)
    assert report.counts["gru_unit"] == 1
    for index, value in enumerate(expected):
        comparing.assert_close(outputs[index], value, "output {}".format(index), tolerance=1e-6)
    assert set(gradients) == set(plain_gradients)
    for name, value in plain_gradients.items():
        comparing.assert_close(gradients[name], value, name, tolerance=1e-5)


# Refusals.


def reasons(report):
    return [refusal.reason for refusal in report.refusals if refusal.rule == "gru_unit"]


def built(shapes=None, feeding=True, **how):
    step_net = three_parts()
    net, _ = comparing.build(recurrent_net, step_net)
    if feeding:
        comparing.feed(step_net)
    return optimize(net, ["gru_unit"], shapes, **how)


def test_small_states_are_left_alone():
    report = built()
    assert report.total == 0
    assert reasons(report) == ["with {} elements in a state GRUUnit is faster".format(N * D)]
    assert [refusal.what for refusal in report.refusals] == ["GRUUnit -> 'h_t'"]


def test_states_of_unknown_size_are_left_alone():
    unknown = ["the size of a state is not known, and GRUUnit is faster for a small one; give shapes"]
    for shapes in (None, {"X": (T, 900, D)}, {"h_initial": (400,)}):
        report = built(shapes, feeding=False)
        assert (report.total, reasons(report)) == (0, unknown)


def test_given_shapes_decide():
    assert built({"X": (T, 150, D), "h_initial": (150, D)}, feeding=False, dry_run=True).total == 1
    assert built({"X": (T, 149, D), "h_initial": (149, D)}, feeding=False, dry_run=True).total == 0


def test_without_aten(monkeypatch):
    monkeypatch.setattr(gru_unit, "aten_is_missing", lambda: True)
    report = built(even_if_slower=True)
    assert (report.total, reasons(report)) == (0, ["this Caffe2 has no ATen operator"])


def test_lengths_that_no_mask_can_show():
    """Made by the step; or counted by something else than the loop's steps."""
    make, timestep, h = start()
    counted = make.cell.AddScopedExternalInputs("counted")[0]
    lengths = make.cell.AddScopedExternalInputs("lengths")[0]
    make.outer.update({"counted": np.array([0], np.int32), "lengths": np.array([T, 1], np.int32)})
    gates, _ = joined(make, h)
    own_lengths = make.cell.Copy(lengths, "own_lengths")
    first = make.cell.GRUUnit([h, gates, own_lengths, timestep], "first")
    make.link(h, make.cell.GRUUnit([first, gates, lengths, counted], "h_t"))
    step_net = make.done(timestep, forward_only=True)
    expected, _ = comparing.run(recurrent_net, step_net)
    outputs, _, report, _ = run_step_net(step_net, rules=["gru_unit"])
    assert reasons(report) == [
        "its lengths 'own_lengths' are not the same in all steps",
        "it counts the steps by 'counted', not by the loop's 'timestep'",
    ]
    for found, value in zip(outputs, expected):
        np.testing.assert_array_equal(found, value)


def test_a_unit_that_is_computed_again():
    make, timestep, h = start()
    gates, _ = joined(make, h)
    hidden = make.cell.GRUUnit([h, gates, timestep], "unit", sequence_lengths=0)
    make.link(h, make.cell.Tanh(hidden, "h_t"))
    step_net = make.done(timestep, recompute_blobs_on_backward=scoped("unit"))
    report, net = assert_step_net_is_right(step_net, rules=["gru_unit"])
    assert reasons(report) == ["the backward step computes 'unit' again"]
    assert "GRUUnit" in types(net)


def test_it_follows_the_rule_that_needs_the_operators_names():
    """ATen's outputs cannot be kept for the product over all steps, so those are asked for before."""
    order = [type(rule) for rule in RULES]
    assert order.index(ParameterGradients) < order.index(gru_unit.GRUUnits)


@pytest.mark.parametrize("lengths", [None, [T, 1]], ids=["no lengths", "lengths"])
def test_how_many_elements_are_enough(lengths):
    """With lengths more: the operators that mix old and new states have to be gained, too."""
    model, _ = GRUS[0].but(lengths=lengths).build()
    (loop,) = read_loops(model.net.Proto()).values()
    (state,) = loop.states
    fewest = gru_unit.FEWEST_ELEMENTS if lengths is None else gru_unit.FEWEST_WITH_LENGTHS
    assert gru_unit.FEWEST_ELEMENTS < gru_unit.FEWEST_WITH_LENGTHS
    rule = gru_unit.GRUUnits()
    (site,) = rule.sites(loop)
    for size, expected in (
        (fewest - 1, "with {} elements in a state GRUUnit is faster".format(fewest - 1)),
        (fewest, None),
    ):
        sizes = Sizes({loop.inputs[0]: (T, 1, 3 * size), state.outer_initial: (1, size)})
        assert rule.loss(loop, site, sizes) == expected
