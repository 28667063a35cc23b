"""The rule `gradient_in_place`: products behind the loop read the sequence's gradient where steps have written it."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import describe, optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import LINK
from caffe2_recurrent.rewriting.products import onednn, onednn_over_steps, onednn_tensors, read_in_place
from caffe2_recurrent.rewriting.products.net_products import GRADIENT
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout
from caffe2_recurrent.rewriting.rules import gradient_in_place as rule
from caffe2_recurrent.rewriting.rules import joined_gradients, products_over_steps
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps
from caffe2_recurrent.step_workspaces import steps_of_last_run
from cells import CELLS
from onednn_support import assert_placed, promise_constant_threads
from test_random_step_nets import seeds
from test_rewriting_random import assert_step_net_right, chosen_rules

pytestmark = pytest.mark.usefixtures("backward_loops")

RULE = "gradient_in_place"
ALONE = ["parameter_gradients", "sequence_operators", "products_over_steps", "backward_loop", RULE]
APART = ["parameter_gradients", "lstm_unit", "gradient_buffer", "products_over_steps", "backward_loop", RULE]
JOINED = ["joined_gradients", *APART]
CAN_CONVOLVE = onednn.CONVOLUTION in onednn.ways()
BOTH = pytest.mark.parametrize("rules", [APART, *[JOINED] * CAN_CONVOLVE], ids=["apart", "joined"][: 1 + CAN_CONVOLVE])
KINDS = pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
# But for those in which the copy has zeros beside it.
LAYOUTS = [layout.convolved for layout in onednn_over_steps.layouts(GRADIENT, 64, 64) if layout.parts == 1]


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request, monkeypatch):
    """How all of these gradients are had."""

    def fastest(size):
        return Layout(size.inner, size.outer, convolved=request.param if size.kind == GRADIENT else None)

    def of_both(rows, widths, outer, keeps_plans):
        return Layout(sum(widths), outer, convolved=request.param)

    promise_constant_threads(monkeypatch)
    monkeypatch.setattr(products_over_steps, "fastest", fastest)
    monkeypatch.setattr(joined_gradients, "_fastest", of_both)
    return request.param


def in_place(rules=APART, **options):
    """An LSTM whose gradient is in oneDNN's memory too, and what must stay what it is."""
    model, blobs = support.lstm(**options)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[RULE] == 1, report
    return model, blobs


def insides(net):
    """The operators of oneDNN's in the nets of the outer net's `If`s."""
    for operator in net.Proto().op:
        yield from net_argument(operator, "then_net").op


def copies(net):
    """What is copied to oneDNN of dY."""
    inside = list(insides(net))
    shown = {operator.output[0] for operator in inside if operator.type == "Alias" and "i2h_grad" in operator.input[0]}
    return [operator for operator in inside if operator.type == onednn.TO and operator.input[0] in shown]


def there_in(net):
    """oneDNN's blob in whose memory the gradient is."""
    (there,) = {blob for made in insides(net) for blob in made.output if blob.endswith("i2h_grad_there")}
    return there


# ------------------------------------------------------------------------------------------------ values and gradients


@support.EVERY_LSTM
@BOTH
def test_an_lstm(options, rules, layout):
    net, report = support.kept(options, rules)
    assert report.counts[RULE] == 1 and copies(net) == []
    assert_placed(net)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("rules", [ALONE, None], ids=["alone", "all rules"])
@pytest.mark.parametrize("layout", LAYOUTS[:1], ids=str, indirect=True)
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, rules, layout):
    # A trial may find one with zeros to be faster.
    fired, reasons = support.fired_on(cell, rules, RULE)
    # By itself it is only of those whose products of the step are moved out and whose sequence is made by one.
    assert fired or cell.name.startswith("attention") or rules == ALONE and cell.name == "gru", reasons


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make):
    with support.optimising(ALONE):
        comparing.assert_right(recurrent_net, make(), executor=False)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), chosen_rules)
def test_random_step_nets(seed, sequences, rules):
    assert_step_net_right(seed, sequences, False, {*(rules or ()), *ALONE})


@KINDS
@BOTH
def test_runs_of_other_sizes(kind, rules):
    """Of other numbers of steps, or of sequences, or of neither; without steps, too."""
    sizes = ((9, 3), (2, 1), (2, 4), (2, 4), (4, 2), (0, 2), (4, 2), (0, 3), (3, 7))

    def change(model):
        model.net.Proto().type = kind
        assert optimize(model, rules, even_if_slower=True).counts[RULE] == 1

    def some(found):
        # Without steps there are no last values.
        return [value for index, value in enumerate(found[0]) if sizes[index // (len(found[0]) // len(sizes))][0]], {}

    expected = some(support.runs_of_other_sizes(lambda model: None, sizes))
    support.assert_same(some(support.runs_of_other_sizes(change, sizes)), expected)


def test_a_run_without_steps():
    def change(model):
        assert optimize(model, APART, even_if_slower=True).counts[RULE] == 1

    support.assert_same(support.run_without_steps(change), support.run_without_steps(lambda model: None))


@BOTH
def test_nets_of_one_model_take_turns(rules):
    """Each finds what the other one has made for other numbers of steps."""
    expected = []
    sizes = [(9, 3), (4, 2), (9, 3), (5, 1), (4, 2)]
    for seed, (steps, batch) in enumerate(sizes):
        workspace.ResetWorkspace()
        model, blobs = support.lstm()
        support.feed(steps, batch, seed=seed)
        expected.append(support.run(model, blobs))
    workspace.ResetWorkspace()
    nets = []
    for number in range(2):
        model, blobs = in_place(rules, name="model_{}".format(number))
        workspace.CreateNet(model.net)
        nets.append(model.net)
    for seed, (steps, batch) in enumerate(sizes):
        support.feed(steps, batch, seed=seed)
        workspace.RunNet(nets[seed % 2])
        support.assert_same(support.values(blobs), expected[seed])


def test_products_of_other_memory_are_found(monkeypatch):
    """oneDNN has a copy of the zeros that are there at first."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    add = onednn.add

    def copying(emitter, kind, inputs, outputs, **arguments):
        is_slices = kind == onednn_tensors.COPYING and inputs[0].endswith("like_slices")
        return add(emitter, *((onednn.TO, inputs, outputs) if is_slices else (kind, inputs, outputs)), **arguments)

    monkeypatch.setattr(onednn, "add", copying)
    model, blobs = in_place()
    with pytest.raises(AssertionError, match="output"):
        support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------------ what there is


@BOTH
def test_what_there_is_after_it(rules):
    """The slices are those of a blob, no state has them, and that blob is oneDNN's memory."""
    before, _ = support.lstm()
    optimize(before, [name for name in rules if name != RULE], even_if_slower=True)
    assert copies(before.net)
    workspace.ResetWorkspace()
    model, _ = in_place(rules)
    forward, backward = read_loops(model.net.Proto()).values()
    there = there_in(model.net)
    memory = onednn_tensors.shown(there)
    assert [(link.outer, link.offset) for link in forward.links].count((memory, 0)) == 1
    assert not any("memory" in state.outer_states for state in [*forward.states, *backward.states])
    seen = [(made.input[1], made.arg[0].i) for made in backward.operators if made.type == LINK]
    assert {offset for outer, offset in seen if outer == memory} == {0}
    products = [made for made in insides(model.net) if there in made.input and made.type not in ("Reshape", "Scale")]
    assert products and all(made.device_option.device_type == caffe2_pb2.IDEEP for made in products)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    np.testing.assert_array_equal(workspace.FetchBlob(memory), workspace.FetchBlob("layer/i2h_grad"))
    assert [steps_of_last_run(loop) for loop in (forward, backward)] == [support.T, support.T]


def test_it_is_made_in_the_first_run_and_for_other_sizes():
    model, _ = in_place()
    workspace.CreateNet(model.net)
    memory = onednn_tensors.shown(there_in(model.net))
    *_, making = [operator for operator in model.net.Proto().op if operator.type == "If" and memory in operator.output]
    for steps, batch, is_new in ((9, 3, True), (9, 3, False), (3, 9, True), (3, 9, False), (3, 2, True)):
        support.feed(steps, batch)
        workspace.RunNet(model.net)
        assert workspace.FetchBlob(memory).shape == (steps, batch, 16)
        assert bool(workspace.FetchBlob(making.input[0])) == is_new


def test_loops_can_be_described():
    model, _ = in_place()
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net)
    text, memory = str(describe(model.net)), onednn_tensors.shown(there_in(model.net))
    assert "layer/cell_t_gate_factors_linked [1, 3, 16] is {}[t]".format(memory) in text
    assert "layer/gates_t_grad [1, 3, 16] is {0}[step_of_forward]; {0} [9, 3, 16]".format(memory) in text


def test_without_products_of_onednn_there_is_nothing_to_do():
    report = optimize(support.lstm()[0], [name for name in APART if name != "products_over_steps"], even_if_slower=True)
    assert report.counts["backward_loop"] == 1
    assert RULE not in {found.rule for found in [*report.rewrites, *report.refusals]}


def test_a_copy_with_zeros_beside_it_stays(monkeypatch):
    monkeypatch.setattr(
        products_over_steps, "_safe", lambda kind, inner, outer, _: [Layout(inner, outer + 3 * (kind == GRADIENT))]
    )
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    workspace.ResetWorkspace()
    model, blobs = support.lstm()
    report = optimize(model, APART, even_if_slower=True)
    assert report.counts.get(RULE, 0) == 0 and copies(model.net) == []
    support.assert_same(support.run(model, blobs), expected)


# ----------------------------------------------------------------------------------------------------------- refusals


def reasons(model=None):
    report = optimize(model or support.lstm()[0], APART, even_if_slower=True, dry_run=True)
    return [refusal.reason for refusal in report.refusals if refusal.rule == RULE]


def test_without_what_keeps_results(monkeypatch):
    assert reasons() == []
    monkeypatch.setattr(rule.kept_results, "missing", lambda: ["ATen", "IsMemberOf"])
    assert reasons() == ["this Caffe2 has no ATen and IsMemberOf, to keep its memory from run to run"]


def test_a_net_that_frees():
    model, _ = support.lstm()
    model.net.Proto().type = "simple_refcount"
    assert reasons(model) == ["the net lets go of blobs that nothing reads any more, and its memory is to stay"]


def test_another_slice(monkeypatch):
    found = rule._memory

    def memory(loop):
        made = found(loop)
        if made is not None:
            loop.links.append(loop.links[0]._replace(inner="later", outer=made.state, offset=2))
        return made

    monkeypatch.setattr(rule, "_memory", memory)
    assert reasons() == ["'later' is linked to another slice of it than that of the step"]


# ------------------------------------------------------------------------------------------- operators of the outer net


def test_what_reads_a_copy_reads_what_is_there(monkeypatch):
    """Two gradients that share a copy, which the first makes and the second frees."""
    monkeypatch.setattr(onednn_over_steps, "stays", lambda *_: False)
    monkeypatch.setattr(products_over_steps, "_safe", lambda _, inner, outer, __: [Layout(inner, outer)])
    monkeypatch.setattr(ProductsOverSteps, "loss", lambda *_: None)
    model, _ = support.lstm()
    optimize(model, [name for name in APART if name != RULE], even_if_slower=True)
    operators = list(model.net.Proto().op)
    names = read_in_place.gradients_read(operators)
    (copy,) = read_in_place.copies(operators, names)
    assert copy.width == 16
    mentioning = [made for made in operators if copy.blob in [*made.input, *made.output]]
    assert len(mentioning) == 2
    read_in_place.read(operators, names, {copy.blob}, "there")
    assert read_in_place.copies(operators, names) == []
    for operator in operators:
        assert copy.blob not in [*operator.input, *operator.output]
        assert ("there" in operator.input) == ("there" in operator.output)
        inside = net_argument(operator, "then_net")
        read = [made.type for made in inside.op if "there" in made.input]
        assert onednn.FREE not in read and onednn.TO not in read
        assert ("there" in operator.input) == ("there" in inside.external_input) == (read != [])
        known = {*inside.external_input, *(blob for made in inside.op for blob in made.output)}
        assert all(blob in known for made in inside.op for blob in made.input)
    assert sum("there" in operator.input for operator in operators) == 2
