"""The rules `carried_states` and `slices_in_place`: backward passes, loops of their own, with fewer links."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import caffe2_recurrent
import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import LSTM, optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import LINK
from caffe2_recurrent.rewriting import backward_pass
from caffe2_recurrent.rewriting.products import kept_filters, nnpack, onednn
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from caffe2_recurrent.rewriting.steps import in_place, step_counts
from caffe2_recurrent.step_workspaces import steps_of_last_run
from cells import CELLS
from onednn_support import force, promise_constant_threads
from test_random_step_nets import seeds
from test_rewriting_backward_loop import feed_parameters, kept_in_steps
from test_rewriting_random import assert_step_net_right, chosen_rules

pytestmark = pytest.mark.usefixtures("backward_loops")

STATES, SLICES = "carried_states", "slices_in_place"
# What has to be out of the loop before.
ALONE = ["parameter_gradients", "backward_loop", STATES, SLICES]
OF_LSTM = ["parameter_gradients", "lstm_unit", "zero_gradients", "gradient_buffer", "backward_loop", STATES, SLICES]
# Where this Caffe2's oneDNN does not do as it should there are none; most tests take it so.
FILTERS_STAY = kept_filters.are_right(4, 16)
LENGTHS = pytest.mark.parametrize("lengths", [False, True], ids=["no lengths", "lengths"])


def carrying(rules=OF_LSTM, **options):
    model, blobs = support.lstm(**options)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[STATES] == 2 and report.counts[SLICES] == 1, report
    return model, blobs


def backward(net):
    _, loop = read_loops(net.Proto()).values()
    return loop


# ------------------------------------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("rules", [ALONE, OF_LSTM], ids=["alone", "of an LSTM"])
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, rules):
    fired, reasons = support.fired_on(cell, rules, STATES)
    of_lstm = "lstm" in cell.name and not cell.name.startswith("attention")
    # LSTMUnitGradient reads the gradients that it is given while it writes others.
    assert bool(fired) == (of_lstm and rules is OF_LSTM), reasons


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_step_nets_have_the_values_and_gradients_of_a_numpy_loop(make):
    with support.optimising(ALONE):
        comparing.assert_right(recurrent_net, make(), executor=False)


@settings(max_examples=80)
@given(seeds, st.integers(1, 3), chosen_rules)
def test_random_step_nets(seed, sequences, rules):
    assert_step_net_right(seed, sequences, False, {*(rules or ()), *ALONE})


@LENGTHS
@pytest.mark.parametrize("kind", ["simple", "dag", "async_scheduling"])
def test_runs_of_other_sizes(kind, lengths):
    def change(model):
        model.net.Proto().type = kind
        assert optimize(model, OF_LSTM, even_if_slower=True).counts[STATES]

    expected = support.runs_of_other_sizes(lambda model: None, lengths=lengths)
    support.assert_same(support.runs_of_other_sizes(change, lengths=lengths), expected)


def test_a_run_without_steps():
    def change(model):
        assert optimize(model, OF_LSTM, even_if_slower=True).counts[STATES] == 2

    support.assert_same(support.run_without_steps(change), support.run_without_steps(lambda model: None))


@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_of_the_last_values(rank):
    """They are what is carried at first."""

    def build():
        workspace.ResetWorkspace()
        model = ModelHelper("model")
        outputs = LSTM(model, "x", None, ("h", "c"), support.DIM_IN, support.D, "layer", outputs_with_grads="auto")
        last = model.net.Sum([model.net.Sqr(outputs[1]), model.net.Sin(outputs[3])])
        found = model.AddGradientOperators([model.net.SumElements(last, "loss")])
        support.feed()
        workspace.RunNetOnce(model.param_init_net)
        feed_parameters(model, 5)
        for name in "hc":
            shape = (support.N, support.D)[-rank:]
            workspace.FeedBlob(name, np.random.RandomState(3).randn(*shape).astype(np.float32))
        return model, [str(found[name]) for name in ("x", "h", "c", *map(str, model.params))]

    expected = support.run(*build())
    model, blobs = build()
    assert optimize(model, OF_LSTM, even_if_slower=True).counts[STATES] == 2
    workspace.CreateNet(model.net)
    for _ in range(2):
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), expected)


def test_an_error_in_what_is_carried_at_first_is_found(monkeypatch):
    """What the run before has left."""
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    start = backward_pass._start
    monkeypatch.setattr(backward_pass, "_start", lambda *given: start(*given)[1:])
    model, blobs = carrying()
    for operator in model.net.Proto().op:
        for blob in [blob for blob in operator.input if blob.endswith("_carried")]:
            workspace.FeedBlob(blob, np.ones((1, support.N, support.D), np.float32))
            model.net.AddExternalInput(core.BlobReference(blob)) if not model.net.BlobIsDefined(blob) else None
    with pytest.raises(AssertionError, match="gradient|output"):
        support.assert_same(support.run(model, blobs), expected)


# ------------------------------------------------------------------------------------------------------------ the loops


@LENGTHS
def test_what_there_is_after_them(lengths):
    options = {"lengths": lengths}
    model, _ = support.lstm(**options)
    optimize(model, [name for name in OF_LSTM if name not in (STATES, SLICES)], even_if_slower=True)
    before = backward(model.net)
    model, _ = carrying(**options)
    after = backward(model.net)
    assert (len(before.states), len(after.states)) == (2, 0)
    assert (len(before.links), len(after.links)) == (4, 0)
    shown = [[operator for operator in loop.operators if operator.type == LINK] for loop in (before, after)]
    assert len(shown[1]) == len(shown[0]) - 1
    carried = [blob for blob in after.inputs if blob.endswith("_carried")]
    assert len(carried) == 2 and set(carried).isdisjoint(after.outputs + after.shared)
    # Who reads it waits for the loop, which has it among its inputs alone.
    reading = [operator for operator in model.net.Proto().op if operator.type == "SumReduceLike"]
    assert [list(operator.control_input) for operator in reading] == 2 * [[after.outputs[0]]]
    support.assert_done(model.net)
    assert optimize(model, even_if_slower=True).total == 0


def test_what_a_hand_made_step_net_declares():
    """The engine takes no step net that declares as its output what none of its operators writes."""
    step_net = kept_in_steps()
    net, outputs = comparing.build(recurrent_net, step_net)
    comparing.feed(step_net)
    net.AddGradientOperators([outputs[0]])
    (gradient,) = [operator for operator in net.Proto().op if operator.type == support.GRADIENT]
    inner = support.backward_step(net)
    inner.external_output.extend(["h_prev_grad", "h_t_grad"])
    inner.external_input.append("h_t_grad")
    support.argument(gradient, "backward_step_net").n.CopyFrom(inner)
    (forward,) = [operator for operator in net.Proto().op if operator.type == support.LOOP]
    support.argument(forward, "backward_step_net").n.CopyFrom(inner)
    assert optimize(net, ALONE, even_if_slower=True).counts[STATES] == 1
    declared = backward(net).net
    assert {"h_prev_grad", "h_t_grad"}.isdisjoint([*declared.external_output, *declared.external_input])
    workspace.CreateNet(net)


# -------------------------------------------------------------------------------------------------------- what they say


def turned():
    """A loop whose backward pass is to be a loop of its own, with one state."""
    step_net = kept_in_steps()
    net, outputs = comparing.build(recurrent_net, step_net)
    net.AddGradientOperators([outputs[0]])
    (loop,) = read_loops(net.Proto()).values()
    sizes = Sizes({name: value.shape for name, value in step_net.outer.items()})
    rule = support.rule("backward_loop")
    (site,) = rule.sites(loop)
    rule.rewrite(loop, site, sizes)
    return loop, sizes


def refusal(loop, sizes, name=STATES):
    (site,) = support.rule(name).sites(loop)
    return support.rule(name).refusal(loop, site, sizes)


def test_there_are_no_sites_in_a_gradient_operator():
    model, _ = support.lstm()
    (loop,) = read_loops(model.net.Proto()).values()
    for name in (STATES, SLICES):
        assert list(support.rule(name).sites(loop)) == []


def writing(loop, blob):
    return [index for index, operator in enumerate(loop.gradient.operators) if blob in operator.output]


def test_what_is_known_is_not_refused():
    assert refusal(*turned()) is None


def test_a_state_that_nothing_is_written_to():
    loop, sizes = turned()
    for index in reversed(writing(loop, "h_prev_grad")):
        del loop.gradient.operators[index]
    assert refusal(loop, sizes) == "no operator writes 'h_prev_grad'"


def test_a_state_that_is_read_before_it_is_written():
    loop, sizes = turned()
    loop.gradient.operators.insert(0, core.CreateOperator("Copy", ["h_prev_grad"], ["a"]))
    assert refusal(loop, sizes) == "'h_prev_grad' is read before it is written"


@pytest.mark.parametrize("operator", [("Copy", ["h_t_grad"], ["a"]), ("Copy", ["h_prev_grad"], ["h_t_grad"])])
def test_a_state_that_is_needed_when_the_next_is_there(operator):
    loop, sizes = turned()
    loop.gradient.operators.append(core.CreateOperator(*operator))
    assert refusal(loop, sizes) == "'h_t_grad' is still needed when 'h_prev_grad' is there"


def test_an_operator_that_cannot_write_in_place():
    loop, sizes = turned()
    (index, *_) = writing(loop, "h_prev_grad")
    loop.gradient.operators[index:] = [core.CreateOperator("TanhGradient", ["h_t", "h_t_grad"], ["h_prev_grad"])]
    assert refusal(loop, sizes) == "TanhGradient does not write 'h_prev_grad' in the place of 'h_t_grad'"
    loop.gradient.operators[index:] = [core.CreateOperator("Sub", ["x_t", "h_t_grad"], ["h_prev_grad"])]
    assert refusal(loop, sizes) is None


def test_a_state_of_unknown_shape():
    loop, sizes = turned()
    loop.gradient.operators.append(core.CreateOperator("Unknown", ["h_prev_grad"], ["h_prev_grad"]))
    assert refusal(loop, sizes) == "'h_prev_grad' is not known to be a row for each sequence"


def test_a_state_of_one_row_for_one_sequence():
    """With one sequence now, what is `[1, 1, D]` need not have a row for each."""
    loop, sizes = turned()
    given = {"X": sizes.shape("X"), "h_initial": sizes.shape("h_initial")}
    one = Sizes({blob: (*shape[:-2], 1, shape[-1]) for blob, shape in given.items()})
    assert refusal(loop, one) is None
    (index, *_) = writing(loop, "h_prev_grad")
    loop.gradient.operators[index:] = [core.CreateOperator("Transpose", ["h_t_grad"], ["h_prev_grad"], axes=[1, 0, 2])]
    loop.gradient.operators.insert(index, core.CreateOperator("Copy", ["h_t_grad"], ["a"]))
    loop.gradient.operators[-1].input[0] = "a"
    assert refusal(loop, one) == "'h_prev_grad' is not known to be a row for each sequence"


def in_one_slice(*operators):
    """A backward step that sees a slice by two names, 'read' and 'written'."""
    loop, sizes = turned()
    link = next(link for link in loop.gradient.backward_links if link.inner == "x_t_grad")
    loop.gradient.links.append(link._replace(inner="read"))
    loop.gradient.operators[:] = [core.CreateOperator(*operator) for operator in operators]
    loop.gradient.operators.append(core.CreateOperator("Mul", ["read", "x_t"], ["x_t_grad"]))
    return loop, sizes


def test_a_slice_by_two_names():
    loop, sizes = in_one_slice()
    assert refusal(loop, sizes, SLICES) is None
    (site,) = support.rule(SLICES).sites(loop)
    loop.gradient.net.external_output.append("x_t_grad")
    loop.gradient.net.external_input.append("x_t_grad")
    support.rule(SLICES).rewrite(loop, site, sizes)
    assert list(loop.gradient.operators[-1].output) == ["read"]
    assert "x_t_grad" not in [link.inner for link in loop.all_links]
    declared = loop.gradient.net
    assert "x_t_grad" not in [*declared.external_output, *declared.external_input]
    assert list(support.rule(SLICES).sites(loop)) == []


def test_slices_that_are_refused():
    loop, sizes = in_one_slice(("Copy", ["x_t_grad"], ["a"]))
    assert refusal(loop, sizes, SLICES) == "'x_t_grad' is read before it is written"
    loop, sizes = in_one_slice()
    loop.gradient.operators.append(core.CreateOperator("Copy", ["read"], ["a"]))
    assert refusal(loop, sizes, SLICES) == "'read' is still needed when 'x_t_grad' is there"
    loop, sizes = in_one_slice()
    loop.gradient.operators[-1].input[:] = ["x_t", "read"]
    assert refusal(loop, sizes, SLICES) is None
    loop.gradient.operators[-1].type = "Sum"
    assert refusal(loop, sizes, SLICES) == "Sum does not write 'x_t_grad' in the place of 'read'"


@pytest.mark.parametrize("kind", in_place.POSITIONS)
def test_the_engine_runs_in_place_what_is_said_to_run_so(kind):
    for position in (0, 1):
        given = {blob: np.random.RandomState(position).randn(1, 2, 3).astype(np.float32) for blob in "ab"}
        for blob, value in given.items():
            workspace.FeedBlob(blob, value)
        apart, together = (core.CreateOperator(kind, ["a", "b"], [to]) for to in ("c", "ab"[position]))
        workspace.RunOperatorOnce(apart)
        if in_place.may_be(apart, "ab"[position], "c"):
            workspace.RunOperatorOnce(together)
            np.testing.assert_array_equal(workspace.FetchBlob("ab"[position]), workspace.FetchBlob("c"))
        else:
            with pytest.raises(RuntimeError):
                workspace.RunOperatorOnce(together)


# ---------------------------------------------------------------------------------------------------- results of oneDNN


@pytest.mark.parametrize("way", [onednn.INNER_PRODUCT, onednn.CONVOLUTION, NNPACK, kept_filters.KEPT_FILTERS])
def test_states_behind_products_that_another_library_makes(way, monkeypatch):
    """Of the shape of these Caffe2 says nothing."""
    is_there = not nnpack.is_missing() if way == NNPACK else not onednn.is_missing()
    if way == kept_filters.KEPT_FILTERS:
        monkeypatch.setattr(step_counts, "few", lambda *_: 0)
        is_there = FILTERS_STAY
    promise_constant_threads(monkeypatch)
    if is_there:
        force(monkeypatch, way)
    rules = [*OF_LSTM[:-3], "packed_products", *OF_LSTM[-3:]]
    model, blobs = support.lstm()
    expected = support.run(model, blobs)
    report = optimize(model, rules, even_if_slower=True)
    assert report.counts[STATES] == 2 and (report.counts["packed_products"] or not is_there), report
    workspace.CreateNet(model.net)
    for _ in range(2):
        workspace.RunNet(model.net)
        support.assert_same(support.values(blobs), expected)
    copies = [operator for operator in backward(model.net).operators if operator.type == "Copy"]
    # Rows to the product, and no result from there.
    assert len(copies) == 1 or way != kept_filters.KEPT_FILTERS or not is_there


def step(*operators):
    """A step whose product is by oneDNN, with `operators` before and behind `None`."""
    made = []
    for operator in operators:
        if operator is not None:
            made.append(core.CreateOperator(*operator))
            continue
        made.append(core.CreateOperator("Copy", ["gates"], ["rows_cpu"]))
        on_it = core.DeviceOption(caffe2_pb2.IDEEP)
        made.append(
            core.CreateOperator("Conv", ["rows", "filters"], ["there"], kernel=1, training_mode=0, device_option=on_it)
        )
        made.append(core.CreateOperator(onednn.FROM, ["there"], ["state"], device_option=on_it))
    return made


def test_the_result_of_a_product_is_what_is_carried():
    operators = step(("Sum", ["state", "seen"], ["state"]), None, ("Sum", ["state", "more"], ["state"]))
    there = kept_filters.result_itself(operators, "state")
    assert there == kept_filters.shown("there")
    adding, copying, convolving, again = operators
    assert list(adding.input) == [there, "seen"] and list(adding.output) == [there]
    assert (copying.type, convolving.type) == ("Copy", "Conv")
    assert list(convolving.control_input) == [there]
    assert list(again.input) == [there, "more"] and list(again.control_input) == ["there"]


def test_results_that_stay_by_themselves():
    read, add = ("Copy", ["state"], ["a"]), ("Sum", ["state", "seen"], ["state"])
    for refused in (
        # It is something else, or nothing.
        step(read),
        [*step(read), core.CreateOperator(onednn.FROM, ["b"], ["state"])],
        # It is made of another blob, too.
        step(add, None, ("Mul", ["state", "seen"], ["state"])),
        # Something else reads it.
        [*step(add, None), core.CreateOperator(onednn.FROM, ["there"], ["b"])],
        # What was there is still read when the result has taken its place.
        step(None)[:2] + step(read) + step(None)[2:],
        # The filters are laid out in each run.
        [*step(add), core.CreateOperator("Conv", ["rows", "filters"], ["there"], training_mode=1), *step(None)[2:]],
    ):
        before = [operator.SerializeToString() for operator in refused]
        assert kept_filters.result_itself(refused, "state") is None
        assert [operator.SerializeToString() for operator in refused] == before


# --------------------------------------------------------------------------------------------------- what looks at them


@pytest.mark.parametrize("links", [True, False], ids=["with links", "without"])
def test_how_many_steps_there_were(links):
    """By what the loop has made: the sequence may have been fed anew. Without states or links nothing else tells."""
    model, blobs = carrying()
    support.run(model, blobs)
    loop = backward(model.net)
    if links:
        support.feed(steps=2)
    else:
        loop.operators[:] = [operator for operator in loop.operators if operator.type != LINK]
    assert steps_of_last_run(loop) == support.T
    assert len(caffe2_recurrent.retrieve_step_blobs(model.net, "kept"))
    assert len(caffe2_recurrent.describe(model).loops) == 2
