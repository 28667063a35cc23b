"""`step_values`: what steps computed, beside plain numpy loops; and what is refused, with its reason."""

import numpy as np
import pytest
from caffe2.python import core, recurrent, workspace
from caffe2.python.model_helper import ExtractPredictorNet
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import numpy_loop
import random_step_nets
import step_nets
from caffe2_recurrent import LSTM, optimize, recurrent_net, retrieve_step_blobs, step_values
from cells import CELLS
from errors_support import listed
from numpy_lstm import Case, sigmoid
from workspace_contents import contents

EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain nets"])


def run(step_net, executor=True, builder=recurrent_net, gradients=False, **options):
    """The net of a step net, after a run; with random gradients of its outputs if `gradients`."""
    net, outputs = comparing.build(builder, step_net, **options)
    if gradients:
        seeds = comparing.output_gradients(step_net, options, comparing.reference_outputs(step_net))
        for position, seed in seeds.items():
            workspace.FeedBlob("given_{}".format(position), seed.astype(np.float32))
        net.AddGradientOperators({outputs[n]: net.AddExternalInput("given_{}".format(n)) for n in seeds})
    comparing.configure(net, executor)
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    workspace.RunNetOnce(net)
    return net


def expected_values(step_net):
    """Every blob of the step that is no reference, in float64, `[T, ...]` by name."""
    outer = comparing.doubles(step_net)
    timestep = "timestep" if step_net.timestep is None else str(step_net.timestep)
    sequences = [(str(inner), outer[name]) for inner, name in step_net.inputs]
    states = {}
    for inner, name in step_net.initial:
        value, batch = outer[name], sequences[0][1].shape[1]
        states[str(inner)] = np.broadcast_to(value.reshape(-1, value.shape[-1]), (batch, value.shape[-1]))[np.newaxis]
    own = {timestep, *states, *(inner for inner, _ in sequences)}
    own.update(output for operator in step_net.cell.Proto().op for output in operator.output)
    history = {blob: [] for blob in own}
    for t in range(len(sequences[0][1])):
        blobs = {name: outer[name] for name in step_net.cell.Proto().external_input if name not in own}
        blobs[timestep] = np.array([t], dtype=np.int32)
        blobs.update({inner: value[t : t + 1] for inner, value in sequences})
        blobs.update(states)
        numpy_loop.run_step(step_net.cell.Proto(), blobs)
        for blob in own:
            history[blob].append(blobs[blob])
        states = {str(inner): blobs[str(output)] for inner, output in step_net.links.items()}
    return {blob: np.stack(values) for blob, values in history.items()}


def assert_values(net, step_net, **options):
    """All values are those of the numpy loop, and the workspace has not changed."""
    before = contents()
    found = step_values(net, **options)
    assert contents() == before
    expected = expected_values(step_net)
    assert set(found) == set(expected)
    for blob, value in expected.items():
        assert found[blob].shape == value.shape, blob
        comparing.assert_close(found[blob], value, blob)
    timestep = "timestep" if step_net.timestep is None else str(step_net.timestep)
    assert found[timestep].dtype == np.int32


def refused(kind, *arguments, **named):
    """The text of the error; the workspace is as it was."""
    before = contents()
    with pytest.raises(kind) as caught:
        step_values(*arguments, **named)
    assert type(caught.value) is kind
    assert contents() == before
    return str(caught.value)


# Values


@EXECUTOR
@pytest.mark.parametrize("state_rank", [1, 2, 3])
def test_lstm(executor, state_rank):
    case = Case(steps=5, lengths=[5, 2], state_rank=state_rank)
    _, _, model = case.run(executor=executor)
    values = case.doubles()
    hidden_all, _, cell_all, _ = case.reference()
    found = step_values(model)
    comparing.assert_close(found["lstm/hidden_t"][:, 0], hidden_all, "hidden")
    comparing.assert_close(found["lstm/cell_t"][:, 0], cell_all, "cell")
    for state in ("hidden", "cell"):
        comparing.assert_close(found["lstm/{}_t_prev".format(state)][1:], found["lstm/{}_t".format(state)][:-1], state)
        initial = np.broadcast_to(values[state].reshape(-1, 3), (2, 3))
        comparing.assert_close(found["lstm/{}_t_prev".format(state)][0, 0], initial, state)
    from_input = values["X"] @ values["i2h_w"].T + values["i2h_b"]
    comparing.assert_close(found["lstm/input_t"][:, 0], from_input, "input")
    previous = found["lstm/hidden_t_prev"][:, 0].astype(np.float64)
    gates = from_input + previous @ values["gates_t_w"].T + values["gates_t_b"]
    comparing.assert_close(found["lstm/gates_t"][:, 0], gates, "gates")
    i, f, o, g = np.split(gates, 4, axis=2)
    cell = sigmoid(f) * found["lstm/cell_t_prev"][:, 0] + sigmoid(i) * np.tanh(g)
    comparing.assert_close((sigmoid(o) * np.tanh(cell))[:, 0], found["lstm/hidden_t"][:, 0, 0], "unit")
    np.testing.assert_array_equal(found["lstm/timestep"], np.arange(5).reshape(5, 1))
    assert found["lstm/timestep"].dtype == np.int32


NETS = [
    step_nets.lstm,
    step_nets.multiplicative,
    step_nets.chain_of_states,
    step_nets.in_place,
    step_nets.custom_timestep,
    step_nets.scaled_in_place_before_sum,
    step_nets.several_sequences_auto,
    step_nets.sequence_without_gradient,
    step_nets.exported_blob_that_is_no_state,
]


@EXECUTOR
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_step_nets(make, gradients, executor):
    step_net = make()
    net = run(step_net, executor, gradients=gradients, recompute_blobs_on_backward=None)
    assert_values(net, step_net)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.booleans())
def test_random_step_nets(seed, sequences, executor, gradients):
    workspace.ResetWorkspace()
    step_net = random_step_nets.step_net(seed, sequences)
    assert_values(run(step_net, executor, gradients=gradients, outputs_with_grads="auto"), step_net)


def test_nets_of_caffe2s_builder():
    step_net = step_nets.product()
    net = run(step_net, builder=recurrent.recurrent_net, scope="theirs")
    assert_values(net, step_net)
    assert_values(net.Proto(), step_net)


def test_one_or_several():
    step_net = step_nets.product()
    net = run(step_net)
    expected = expected_values(step_net)
    one = step_values(net, "h_t")
    comparing.assert_close(one, expected["h_t"], "h_t")
    np.testing.assert_array_equal(step_values(net, core.BlobReference("h_t")), one)
    found = step_values(net, ["h_t", core.BlobReference("x_t")])
    assert list(found) == ["h_t", "x_t"]
    np.testing.assert_array_equal(found["h_t"], one)
    assert step_values(net, []) == {}


def test_names_under_the_current_scope():
    case = Case()
    model, _ = case.build()
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    workspace.RunNetOnce(model.net)
    gates = step_values(model, "lstm/gates_t")
    with core.NameScope("lstm"):
        np.testing.assert_array_equal(step_values(model, "gates_t"), gates)
        np.testing.assert_array_equal(step_values(model, "lstm/gates_t"), gates)
        assert list(step_values(model, ["gates_t"])) == ["gates_t"]


def test_a_copy_is_not_changed_by_the_next_run():
    step_net = step_nets.product()
    net = run(step_net)
    found = step_values(net, "h_t")
    before = found.copy()
    workspace.FeedBlob("X", 2 * step_net.outer["X"])
    workspace.RunNetOnce(net)
    np.testing.assert_array_equal(found, before)
    assert not np.array_equal(step_values(net, "h_t"), before)


@EXECUTOR
def test_steps_of_a_longer_run_before_do_not_count(executor):
    step_net = step_nets.product()
    longer = dict(step_net.outer, X=np.ones((12, 2, 3), np.float32))
    net = run(step_nets.StepNet(**dict(vars(step_net), outer=longer)), executor)
    assert step_values(net, "h_t").shape == (12, 1, 2, 3)
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    workspace.RunNetOnce(net)
    # What is fed for the next run says nothing about the last one.
    workspace.FeedBlob("X", np.ones((7, 2, 3), np.float32))
    found, expected = step_values(net, ["h_t", "timestep"]), expected_values(step_net)
    comparing.assert_close(found["h_t"], expected["h_t"], "h_t")
    np.testing.assert_array_equal(found["timestep"], expected["timestep"])


def test_names_that_a_prefix_could_hit_are_left_alone():
    net = run(step_nets.product())
    workspace.FeedBlob("step_values_h_t0", np.ones(1, np.float32))
    workspace.FeedBlob("step_values_1", np.ones(1, np.float32))
    before = contents()
    step_values(net)
    assert contents() == before


# Several loops


def several_loops():
    """Three loops over one step net, the second one over Y."""
    net = core.Net("net")
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_t_prev")
    step.AddExternalOutputs(step.Add([step.Scale(x_t, "z", scale=2.0), h_prev], "h_t"))
    for sequence in ("X", "Y", "X"):
        recurrent_net(net, step, [("x_t", sequence)], [("h_t_prev", "H")], {"h_t_prev": "h_t"})
    for name, seed in (("X", 0), ("Y", 1)):
        workspace.FeedBlob(name, np.random.RandomState(seed).randn(3, 2, 2).astype(np.float32))
    workspace.FeedBlob("H", np.zeros((2, 2), np.float32))
    workspace.RunNetOnce(net)
    return net


def test_a_loop_by_position_or_output():
    net = several_loops()
    for loop, sequence in ((0, "X"), (np.int64(1), "Y"), ("h_t_all_1", "Y"), (core.BlobReference("h_t_last_2"), "X")):
        found = step_values(net, "z", loop=loop)
        np.testing.assert_array_equal(found[:, 0], 2 * workspace.FetchBlob(sequence))


def test_an_output_under_the_current_scope():
    case = Case()
    model, _ = case.build()
    case.build(lambda model, *rest, **options: LSTM(model, "X", *rest[1:], **options), model=model, scope="second")
    workspace.RunNetOnce(model.param_init_net)
    case.feed("lstm")
    case.feed("second")
    workspace.RunNetOnce(model.net)
    with core.NameScope("second"):
        found = step_values(model, "hidden_t", loop="hidden_t_all")
    comparing.assert_close(found[:, 0], case.reference()[0], "hidden")


LOOPS = "0 ('h_t_all'), 1 ('h_t_all_1'), 2 ('h_t_all_2')"


def test_which_loop():
    net = several_loops()
    name = net.Name()
    assert refused(ValueError, net) == "step_values: net '{}' has 3 loops; say which one by loop=: {}".format(
        name, LOOPS
    )
    text = "step_values: net '{}' has no loop {}; it has {}"
    assert refused(ValueError, net, loop=3) == text.format(name, 3, LOOPS)
    assert refused(ValueError, net, loop=-1) == text.format(name, -1, LOOPS)
    assert refused(ValueError, net, loop="z") == text.format(name, "with the output 'z'", LOOPS)
    empty = core.Net("empty")
    text = "step_values: net '{}' has no RecurrentNetwork operator; it has no operators"
    assert refused(ValueError, empty, loop=0) == text.format(empty.Name())


# What cannot be had


def test_recomputed_blobs_lie_in_shared_memory():
    case = Case(options={"memory_optimization": True})
    _, _, model = case.run()
    for blob in ("lstm/gates_t_shared", "lstm/gates_t"):
        assert refused(ValueError, model, blob) == (
            "step_values: '{}' lies in memory that all steps share (recompute_blobs_on_backward, or optimize), where "
            "only the last step's value is left; to be had are {}".format(
                blob, ", ".join(map("'{}'".format, step_values(model)))
            )
        )
    found = step_values(model)
    assert "lstm/gates_t" not in found
    comparing.assert_close(found["lstm/hidden_t"][:, 0], case.reference()[0], "hidden")


def test_a_blob_that_has_another_name_after_optimize():
    """What is linked since can be had by that; what is shared by all steps cannot."""
    cell = next(cell for cell in CELLS if cell.name == "attention_regular")
    _, _, model = cell.run(executor=False)
    before = step_values(model, "layer/attention_weights")
    optimize(model, even_if_slower=True)
    workspace.RunNetOnce(model.net)
    expected = "step_values: 'layer/attention_weights' is called 'layer/attention_weights_linked' here"
    assert refused(ValueError, model, "layer/attention_weights") == expected
    np.testing.assert_allclose(step_values(model, "layer/attention_weights_linked"), before, rtol=1e-4, atol=1e-6)
    shared = "'layer/attention_logits' lies in memory that all steps share"
    assert shared in refused(ValueError, model, "layer/attention_logits")


@EXECUTOR
def test_optimised_nets(executor):
    case = Case(steps=4, batch=3, lengths=[4, 0, 2])
    _, _, model = case.run(executor=executor)
    before = step_values(model)
    assert optimize(model, even_if_slower=True).counts["lstm_unit"] == 1
    comparing.configure(model.net, executor)
    workspace.RunNetOnce(model.net)
    found = step_values(model)
    linked = {"lstm/hidden_t", "lstm/cell_t", "lstm/hidden_t_prev", "lstm/cell_t_prev", "lstm/timestep"}
    assert linked <= set(found)
    # With a bias it has another name.
    assert "lstm/input_t" in before and "lstm/input_t" not in found
    for blob in linked:
        comparing.assert_close(found[blob], before[blob], blob)


def test_what_the_backward_step_overwrites():
    """The gates in the memory of their gradient: what is there after a run is not what the step computed."""
    case = Case(steps=4)
    _, _, model = case.run()
    gates = step_values(model, "lstm/gates_t")
    assert optimize(model, rules=["gradient_buffer"], even_if_slower=True).total == 1
    workspace.RunNetOnce(model.net)
    assert refused(ValueError, model, "lstm/gates_t_linked") == (
        "step_values: the backward step has overwritten 'lstm/gates_t_linked' in each step"
    )
    assert "lstm/gates_t_linked" not in step_values(model)
    assert not np.allclose(workspace.FetchBlob("lstm/i2h_grad")[:, np.newaxis], gates)


def test_blobs_of_the_backward_step():
    _, gradients, model = Case().run()
    text = "'{}' belongs to the backward step, whose blobs all steps share"
    there = "; what all steps have written is in '{}'"
    blobs = ["lstm/gates_t_w_grad", "lstm/gates_t_grad", "lstm/hidden_t_prev_grad"]
    assert refused(ValueError, model, blobs) == listed(
        "step_values",
        text.format("lstm/gates_t_w_grad"),
        text.format("lstm/gates_t_grad") + there.format("lstm/i2h_grad"),
        text.format("lstm/hidden_t_prev_grad") + there.format("lstm/lstm/hidden_t_prev_states_grad"),
    )
    # As it says: the states' gradient after each step, the initial state's first.
    comparing.assert_close(workspace.FetchBlob("lstm/lstm/hidden_t_prev_states_grad")[0], gradients["hidden"], "hidden")


def test_references_are_outside():
    _, _, model = Case().run()
    for blob in ("lstm/gates_t_w", "lstm/i2h"):
        assert refused(ValueError, model, blob) == (
            "step_values: '{0}' is outside of the loop, the same for all steps: FetchBlob('{0}')".format(blob)
        )


def test_unknown_blobs_are_told_what_there_is():
    net = run(step_nets.product())
    text = "the step net has no blob '{}'; to be had are 'timestep', 'h_prev', 'h_t', 'x_t'"
    assert refused(ValueError, net, ["h", "h_t", "x"]) == listed("step_values", text.format("h"), text.format("x"))


def test_names_that_run_into_each_other():
    """`z1` of step 0 and `z` of step 10 have one name between them; the later one keeps it."""
    net = core.Net("net")
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    step.Copy(x_t, "z01")
    step.AddExternalOutputs(step.Add([step.Scale(step.Scale(x_t, "z", scale=2.0), "z1", scale=2.0), h_prev], "h_t"))
    recurrent_net(net, step, [("x_t", "X")], [("h_prev", "H")], {"h_prev": "h_t"})
    workspace.FeedBlob("H", np.zeros((2, 2), np.float32))
    for steps in (10, 12, 5):
        x = np.random.randn(steps, 2, 2).astype(np.float32)
        workspace.FeedBlob("X", x)
        workspace.RunNetOnce(net)
        found = step_values(net)
        np.testing.assert_array_equal(found["z"][:, 0], 2 * x)
        np.testing.assert_array_equal(found["z01"][:, 0], x)
        if steps == 10:
            np.testing.assert_array_equal(found["z1"][:, 0], 4 * x)
            continue
        # Also after the shorter run: the steps of the longer one before are still there.
        assert "z1" not in found
        assert refused(ValueError, net, "z1") == (
            "step_values: 'z1' cannot be told from 'z' at a later step; rename it in the step net"
        )


def test_an_outer_blob_of_the_same_name():
    workspace.FeedBlob("xh", np.zeros(1, np.float32))
    net = run(step_nets.exported_blob_that_is_no_state())
    assert refused(ValueError, net, "xh") == (
        "step_values: no step keeps 'xh' for itself; a blob of that name existed outside when the net was created, and "
        "all steps write to it, or what ran is an optimised copy of the net (install(optimize=True))"
    )
    assert set(step_values(net)) == {"timestep", "h_prev", "h_t", "x_t", "watched"}


def test_braces_in_a_name():
    text = refused(ValueError, run(step_nets.product()), "h_{}")
    assert text == "step_values: the step net has no blob 'h_{}'; to be had are 'timestep', 'h_prev', 'h_t', 'x_t'"


def test_shapes_that_change_from_step_to_step():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    timestep = make.cell.AddExternalInput("timestep")
    make.cell.LengthsRangeFill([timestep], "growing")
    make.link(h, make.cell.Mul([x, h], "h_t"))
    net = run(make.done("timestep"))
    assert refused(ValueError, net, "growing") == (
        "step_values: 'growing' has not the same shape in all steps; retrieve_step_blobs gives them one by one"
    )
    assert "growing" not in step_values(net)


def test_an_output_that_its_operator_does_not_write():
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.cell.Dropout([x], ["dropped", "mask"], ratio=0.5, is_test=1)
    make.link(h, make.cell.Mul(["dropped", h], "h_t"))
    net = run(make.done())
    text = (
        ": the engine cannot copy what the steps of loop 'h_t_all' keep: an operator has an output that it does not "
        "write, as Dropout has its mask with is_test=1"
    )
    before = workspace.Blobs()
    assert refused(ValueError, net, "h_t") == "step_values" + text
    with pytest.raises(ValueError) as caught:
        retrieve_step_blobs(net)
    assert str(caught.value) == "retrieve_step_blobs" + text
    assert workspace.Blobs() == before


@EXECUTOR
@pytest.mark.parametrize("cut", ["built so", "cut out of a training net"])
def test_forward_only(executor, cut):
    if cut == "built so":
        net = run(step_nets.product(), executor, forward_only=True)
    else:
        step_net = step_nets.product()
        net = run(step_net, executor, gradients=True)
        net, _ = ExtractPredictorNet(net.Proto(), ["X", "h_initial"], ["h_t_all"])
        workspace.RunNetOnce(net)
    assert refused(ValueError, net, "x_t") == (
        "step_values: loop 'h_t_all' is forward only: its steps take turns in a few workspaces, and overwrite what the "
        "ones before have computed; to look into its steps, build it without forward_only, or optimize it without the "
        "rule 'backward_loop'"
    )


NOT_RUN = "step_values: loop 'h_t_all' has not run to its end in this workspace"


@pytest.mark.parametrize("created", [True, False], ids=["created", "not created"])
def test_before_the_net_has_run(created):
    step_net = step_nets.product()
    net, _ = comparing.build(recurrent_net, step_net)
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    if created:
        workspace.CreateNet(net)
    assert refused(ValueError, net) == NOT_RUN


@EXECUTOR
def test_after_a_run_that_failed(executor):
    """The engine would crash on the workspaces of the steps that it has not come to."""

    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    make.cell.EnforceFinite([x], [])
    make.link(h, make.cell.Mul([x, h], "h_t"))
    step_net = make.done()
    net, _ = comparing.build(recurrent_net, step_net)
    comparing.configure(net, executor)
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    failing = np.ones((6, 2, 3), np.float32)
    failing[1] = np.nan
    workspace.FeedBlob("X", failing[:3])
    workspace.CreateNet(net)
    with pytest.raises(RuntimeError):
        workspace.RunNet(net)
    assert refused(ValueError, net) == NOT_RUN
    # The same net goes on once its input is right.
    workspace.FeedBlob("X", step_net.outer["X"])
    workspace.RunNet(net)
    np.testing.assert_array_equal(step_values(net, "h_t")[:, 0], workspace.FetchBlob("h_t_all"))
    # Outputs are still those of three steps.
    workspace.FeedBlob("X", failing)
    with pytest.raises(RuntimeError):
        workspace.RunNet(net)
    blobs = workspace.Blobs()
    with pytest.raises(ValueError) as caught:
        step_values(net)
    assert str(caught.value) == NOT_RUN
    assert workspace.Blobs() == blobs


def test_an_output_whose_shape_the_net_changes_afterwards():
    step_net = step_nets.product()
    net, (h_all, _) = comparing.build(recurrent_net, step_net)
    net.Reshape([h_all], [h_all, "old_shape"], shape=[-1])
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    workspace.RunNetOnce(net)
    assert_values(net, step_net)


def test_a_sequence_of_no_steps():
    step_net = step_nets.product()
    step_net.outer["X"] = np.zeros((0, 2, 3), np.float32)
    net = run(step_net)
    assert refused(ValueError, net) == "step_values: loop 'h_t_all' ran over a sequence of no steps"


def test_wrong_types():
    assert refused(TypeError, None, loop=1.5) == listed(
        "step_values",
        "net must be a ModelHelper, a core.Net or a NetDef; got None of type NoneType",
        "loop must be a position, an output of the loop, or None; got 1.5 of type float",
    )
    assert refused(TypeError, "net", 3, 2.5) == listed(
        "step_values",
        "blobs must be a blob of the step net, a list of them, or None for all; got 3 of type int",
        "net must be a ModelHelper, a core.Net or a NetDef; got 'net' of type str",
        "loop must be a position, an output of the loop, or None; got 2.5 of type float",
    )
    net = core.Net("net")
    assert refused(TypeError, net, loop=True) == (
        "step_values: loop must be a position, an output of the loop, or None; got True of type bool"
    )
    assert refused(TypeError, net, 3) == (
        "step_values: blobs must be a blob of the step net, a list of them, or None for all; got 3 of type int"
    )
    assert refused(TypeError, net, ["a", 3, b"c"]) == listed(
        "step_values",
        "blobs takes blobs or their names; got 3 of type int",
        "blobs takes blobs or their names; got b'c' of type bytes",
    )
