"""What every cell must do, over the registry of cells."""

import numpy as np
import pytest
from caffe2.python import core, optimizer, workspace
from caffe2.python.cnn import CNNModelHelper
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import caffe2_checker
import cells
import comparing
import step_memory
from caffe2_recurrent.loops.reading import read_loops
from cells import CELLS, T

EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
EVERY_CELL = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
STEP_NUMBER_BYTES = 4


@EVERY_CELL
@EXECUTOR
def test_values_and_gradients_are_those_of_a_numpy_loop(cell, executor):
    cell.assert_right(executor)


@EVERY_CELL
def test_every_choice_of_outputs_with_grads(cell):
    for choice in cells.choices(cell):
        workspace.ResetWorkspace()
        cell.but(options={"outputs_with_grads": choice}).assert_right()


@EVERY_CELL
@pytest.mark.parametrize("lengths", [[0, 0], [3, 0], [3, 3], [1, 2]], ids=str)
def test_lengths(cell, lengths):
    cell.but(lengths=lengths, options={"outputs_with_grads": "auto"}).assert_right()


@EVERY_CELL
@pytest.mark.parametrize("rank", [1, 3], ids=["1-D", "3-D"])
def test_initial_states_of_each_rank(cell, rank):
    cell.but(rank=rank).assert_right()


@EVERY_CELL
def test_one_step(cell):
    cell.but(steps=1).assert_right()


@EVERY_CELL
@EXECUTOR
def test_recomputing_changes_no_gradient_and_keeps_the_step_number_alone(cell, executor):
    cell = cell.but(lengths=[3, 1], options={"outputs_with_grads": "auto"})
    _, gradients, model = cell.run(executor)
    assert min(step_memory.owned_bytes(model.net)) > STEP_NUMBER_BYTES
    workspace.ResetWorkspace()
    _, again, model = cell.remembering_nothing().run(executor)
    assert step_memory.owned_bytes(model.net) == [STEP_NUMBER_BYTES] * T
    assert set(again) == set(gradients)
    for name in gradients:
        np.testing.assert_array_equal(gradients[name], again[name], err_msg=name)


@EVERY_CELL
def test_forward_only(cell):
    cell = cell.but(steps=6, options={"forward_only": True})
    cell.assert_right()
    model, _ = cell.build()
    arguments = {argument.name for argument in model.net.Proto().op[-1].arg}
    assert not any("backward" in name for name in arguments)


@settings(max_examples=60)
@given(st.data())
def test_random_sizes_lengths_and_options(data):
    workspace.ResetWorkspace()
    changed = cells.drawn(data, CELLS)
    changed.assert_right(data.draw(st.booleans()))


def checked(cell, model, outputs, name):
    """Caffe2's checker on one blob; it wants outputs of one shape, so it gets those of all steps."""
    values = {cell.full_name(key): value for key, value in cell.values().items() if value.dtype == np.float32}
    caffe2_checker.check(model.net, [outputs[0]], values, cell.full_name(name))


@EVERY_CELL
def test_caffe2s_gradient_checker_accepts_every_input_state_and_parameter(cell):
    model, outputs = cell.but(options={"outputs_with_grads": (0,)}).build()
    workspace.RunNetOnce(model.param_init_net)
    cell.feed()
    for name, value in cell.values().items():
        if value.dtype == np.float32:
            checked(cell, model, outputs, name)


@EVERY_CELL
def test_caffe2s_gradient_checker_rejects_a_slope_five_percent_off(cell):
    model, outputs = cell.but(options={"outputs_with_grads": (0,)}).build()
    workspace.RunNetOnce(model.param_init_net)
    cell.feed()
    operator = next(operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork")
    backward = next(argument.n for argument in operator.arg if argument.name == "backward_step_net")
    name = next(blob for blob in reversed(list(operator.input)) if blob.startswith("layer/") and blob.endswith("_t_w"))
    gradient = core.BlobReference(name + "_grad")
    assert any(str(gradient) in step.output for step in backward.op)
    backward.op.extend([core.CreateOperator("Scale", [gradient], [gradient], scale=1.05)])
    with pytest.raises(AssertionError, match="Error in gradient check"):
        checked(cell, model, outputs, name[len("layer/") :])


@EVERY_CELL
@pytest.mark.parametrize("Helper", [ModelHelper, CNNModelHelper])
def test_parameters_have_their_names_and_shapes_and_train(cell, Helper):
    with core.NameScope("outer"):
        model, outputs = cell.but(options={"outputs_with_grads": "auto"}).build(model=Helper(name="model"))
    names = {"outer/layer/" + name for name in cell.parameters}
    assert {str(blob) for blob in model.params} == names and len(model.params) == len(names)
    workspace.RunNetOnce(model.param_init_net)
    for name, shape in cell.parameters.items():
        assert workspace.FetchBlob("outer/layer/" + name).shape == shape
    # Random data, so that every parameter moves; those drawn at the start stay.
    for name, value in cell.values().items():
        if name not in cell.parameters:
            workspace.FeedBlob("outer/" + name, value)
    sums = [
        model.net.SumElements(model.net.Mul([blob, blob], "squared_{}".format(n)), "sum_{}".format(n))
        for n, blob in enumerate(outputs[::2])
    ]
    loss = model.net.Sum(sums, "loss") if len(sums) > 1 else sums[0]
    model.AddGradientOperators([loss])
    before = {str(blob): workspace.FetchBlob(str(blob)) for blob in model.params}
    optimizer.build_sgd(model, base_learning_rate=1.0)
    workspace.RunNetOnce(model.param_init_net)
    for name, value in before.items():
        workspace.FeedBlob(name, value)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 3)
    for name, value in before.items():
        assert not np.array_equal(workspace.FetchBlob(name), value), name


@EVERY_CELL
def test_forward_only_has_the_blobs_that_it_has_without_memory_optimization(cell):
    def blobs_of_step(cell):
        model, _ = cell.but(options={"forward_only": True}).build()
        (loop,) = read_loops(model.net.Proto()).values()
        return [list(operator.output) for operator in loop.operators]

    assert blobs_of_step(cell.remembering_nothing()) == blobs_of_step(cell)


@EVERY_CELL
def test_two_layers_of_one_scope_share_parameters_and_nothing_else(cell):
    cell = cell.but(options={"outputs_with_grads": (0,)})
    model, first = cell.build()
    _, second = cell.build(model)
    assert len(model.params) == len(cell.parameters)
    gradients = model.AddGradientOperators([first[0], second[0]])
    workspace.RunNetOnce(model.param_init_net)
    cell.feed("layer")
    workspace.RunNetOnce(model.net)
    twice = {name: workspace.FetchBlob(str(gradients["layer/" + name])) for name in cell.parameters}
    for ours, others in zip(first, second):
        assert str(ours) != str(others)
        np.testing.assert_array_equal(workspace.FetchBlob(ours), workspace.FetchBlob(others))
    workspace.ResetWorkspace()
    model, outputs = cell.build()
    gradients = model.AddGradientOperators([outputs[0]])
    workspace.RunNetOnce(model.param_init_net)
    cell.feed("layer")
    workspace.RunNetOnce(model.net)
    for name, found in twice.items():
        once = workspace.FetchBlob(str(gradients["layer/" + name]))
        comparing.assert_close(found, 2 * once, name, tolerance=1e-5)


# In one workspace


def forms_of(cell):
    yield cell
    yield cell.but(lengths=[T, 1])
    yield cell.but(options={"outputs_with_grads": "auto"})
    for chosen in ([name] for name in cell.memory):
        yield cell.but(options=dict.fromkeys(chosen, True))
    yield cell.remembering_nothing()


def names_in_steps(cell):
    """What steps of both directions are linked to, and what they write to else."""
    model, outputs = cell.build()
    given = {outputs[position]: model.net.AddExternalInput("d{}".format(position)) for position in cell.positions}
    model.net.AddGradientOperators(given)
    (loop,) = read_loops(model.net.Proto()).values()
    linked = {link.inner for link in loop.all_links}
    return linked, {blob for step in loop.steps for operator in step for blob in operator.output} - linked


def test_no_cell_has_for_itself_what_another_one_links():
    """Loops of one scope find each other's blobs in the workspaces of steps, and a link stays what it was made to."""
    found = [(form.name, *names_in_steps(form)) for cell in CELLS for form in forms_of(cell)]
    for first, linked, _ in found:
        for second, _, own in found:
            assert not linked & own, "{} after {}".format(second, first)


@pytest.mark.parametrize("second", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("first", CELLS, ids=lambda cell: cell.name)
def test_one_cell_after_another_of_the_same_scope(first, second):
    model, outputs = first.build()
    workspace.RunNetOnce(model.param_init_net)
    first.feed()
    given = {}
    for position in first.positions:
        gradient = np.ones_like(first.reference()[position], dtype=np.float32)
        workspace.FeedBlob("given{}".format(position), gradient)
        given[outputs[position]] = model.net.AddExternalInput("given{}".format(position))
    model.net.AddGradientOperators(given)
    workspace.RunNetOnce(model.net)
    second.assert_right()
