"""`describe`: what it says is what the operators have, and what the steps' workspaces hold."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, recurrent, rnn_cell, workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import caffe2_recurrent
import cells
import comparing
import rewritten_loops
import step_memory
import step_nets
import viewing_support as support
from caffe2_recurrent import LSTM, describe, recurrent_net, set_rnn_executor_config
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.viewing.kept import Place
from caffe2_recurrent.viewing.loop_sizes import find_outer_tensors
from caffe2_recurrent.viewing.tensors import Tensor, infer
from errors_support import listed
from every_pair import every_pair

# The text

ELMAN = """\
net '{net}': 1 loop

loop 'h_t_all'
  T = 5 steps, N = 2 sequences
  sequences
    x_t is x[t]; x [5, 2, 3], gradient {net}/recurrent/x_grad
  states
    h_prev [1, 2, 3] -> h_t
      are [t] and [t + 1] of {net}/recurrent/h_prev_states [6, 2, 3], 144 bytes
      initial value h0 [2, 3], gradient h0_grad
  references with a gradient
    w [3, 3]; gradient w_grad
    b [3]; gradient b_grad
  references without a gradient
    none
  outputs
    h_t_all [5, 2, 3] is {net}/recurrent/h_prev_states[1:]; no gradient goes back from it
    h_t_last [1, 2, 3] is {net}/recurrent/h_prev_states[-1:]; its gradient h_t_last_autogen_grad goes back
  each step keeps, in a workspace of its own
    u [1, 2, 3] float32, 24 bytes; the backward step does not read it
    z [1, 2, 3] float32, 24 bytes; the backward step does not read it
    the step's number, 4 bytes
    together 52 bytes a step, 260 bytes in 5 steps
  computed again by the backward step
    none
  how it runs
    on CPU
    step number in timestep
    RNN executor: on, 4 threads by default
  step net '{step}'
    0  FC    h_prev, w, b -> u  (axis=2)
    1  Sum   u, x_t -> z
    2  Tanh  z -> h_t
  backward step net '{step}_backward'
    0  TanhGradient  h_t, h_t_grad -> z_grad
    1  FCGradient    h_prev, w, z_grad -> w_grad, b_grad, h_prev_grad  (axis=2)"""


def test_the_whole_text():
    net = support.elman()
    description = describe(net, support.ELMAN_SHAPES)
    # Caffe2 numbers names of nets that it has seen before.
    assert str(description) == ELMAN.format(net=net.Name(), step=description.loops[0].structure.step_name)
    # What a notebook and the interactive prompt show.
    assert repr(description) == str(description)


def test_every_loop_is_described():
    model = ModelHelper("model")
    LSTM(model, "x", "lengths", None, 2, [3, 3], "two", bidirectional=True)
    description = describe(model, {"x": (4, 2, 2)})
    text = str(description)
    assert text.startswith("net '{}': 4 loops\n".format(model.net.Name()))
    found = [operator.output[0] for operator in support.operators(model.net)]
    assert [loop.structure.name for loop in description.loops] == found
    assert all("\nloop '{}'\n".format(name) in text for name in found)
    assert [loop.sizes.steps for loop in description.loops] == [4] * 4
    assert [loop.memory.bytes_per_step for loop in description.loops] == [4 * 2 * 12 + 4] * 4


def test_describing_changes_nothing():
    model = support.lstm()
    support.feed({"x": (4, 3, 2), "h0": (3, 4), "c0": (3, 4)})
    net, blobs = model.net.Proto().SerializeToString(), workspace.Blobs()
    describe(model)
    assert model.net.Proto().SerializeToString() == net
    assert workspace.Blobs() == blobs


def test_what_the_roles_are():
    text = describe(support.lstm(), support.LSTM_SHAPES)
    assert support.section(text, "sequences") == [
        "lstm/input_t is lstm/i2h[t]; lstm/i2h [4, 3, 16], gradient lstm/i2h_grad"
    ]
    assert support.section(text, "states")[3:] == [
        "lstm/cell_t_prev [1, 3, 4] -> lstm/cell_t",
        "  are [t] and [t + 1] of lstm/lstm/cell_t_prev_states [5, 3, 4], 240 bytes",
        "  initial value c0 [3, 4], gradient c0_grad",
    ]
    assert support.section(text, "references with a gradient") == [
        "lstm/gates_t_w [16, 4]; gradient lstm/gates_t_w_grad",
        "lstm/gates_t_b [16]; gradient lstm/gates_t_b_grad",
    ]
    assert [line.split(";")[1] for line in support.section(text, "outputs")] == [
        " its gradient lstm/hidden_t_all_grad goes back",
        *[" no gradient goes back from it"] * 3,
    ]
    assert support.section(text, "how it runs") == [
        "on CPU",
        "step number in lstm/timestep",
        "RNN executor: on, 4 threads by default",
    ]


def test_references_without_a_gradient():
    net, _, _ = rewritten_loops.build(step_nets.undifferentiated_reference())
    assert support.section(describe(net), "references without") == ["mask [?]"]
    assert support.section(describe(net), "references with a gradient") == ["none"]


def test_a_sequence_without_a_gradient():
    net, _, _ = rewritten_loops.build(step_nets.sequence_without_gradient())
    assert support.section(describe(net), "sequences") == ["index_t is INDEX[t]; INDEX [?], no gradient"]
    assert support.section(describe(net), "references with a gradient") == ["table [?]; gradient table_grad"]


def test_several_sequences():
    net, _, gradients = rewritten_loops.build(step_nets.several_sequences_auto())
    (loop,) = describe(net).loops
    assert [sequence.view.inner for sequence in loop.structure.sequences] == ["x_t", "y_t", "z_t"]
    written = {blob for operator in net.Proto().op for blob in operator.output}
    assert all(sequence.outer_gradient in written for sequence in loop.structure.sequences)


@pytest.mark.parametrize("wanted", ["auto", (1, 0), ()], ids=str)
def test_outputs_before_the_gradient_operator_is_there(wanted):
    text = describe(support.elman(gradient=False, outputs_with_grads=wanted))
    assert "it has a backward step; its gradient operator is not here" in str(text)
    says = {"auto": "any gradient that reaches it goes back", (1, 0): "its gradient goes back"}
    expected = says.get(wanted, "no gradient goes back from it")
    assert [line.split("; ")[1] for line in support.section(text, "outputs")] == [expected] * 2
    assert support.section(text, "references with a gradient") == ["w [?]; gradient w_grad", "b [?]; gradient b_grad"]
    assert support.section(text, "states")[2] == "  initial value h0 [?], gradient h0_grad"


def test_forward_only():
    text = describe(support.lstm(gradient=False, forward_only=True), support.LSTM_SHAPES)
    assert "  forward only: it has no backward step\n" in str(text)
    assert "computed again" not in str(text) and "backward step net" not in str(text)
    assert support.section(text, "the steps take turns in 4 workspaces; each holds")[0].startswith("lstm/gates_t ")
    assert support.section(text, "references with a gradient") == ["none"]
    assert support.section(text, "sequences")[0].endswith("no gradient")
    assert support.section(text, "states")[2].endswith("no gradient")


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, ["RNN executor: on, 4 threads by default"]),
        ({"num_threads": 2}, ["RNN executor: on, 2 threads"]),
    ],
    ids=["engine's", "set"],
)
def test_executor(settings, expected):
    model = support.lstm(gradient=False)
    set_rnn_executor_config(support.operators(model.net)[0], **settings)
    assert support.section(describe(model), "how it runs")[2:] == expected


def test_executors_that_differ():
    model = support.lstm()
    support.argument(support.operators(model.net, support.GRADIENT)[0], "enable_rnn_executor").i = 0
    assert support.section(describe(model), "how it runs")[2:] == [
        "RNN executor, forward: on, 4 threads by default",
        "RNN executor, backward: off, one operator after the other",
    ]


def test_on_a_gpu():
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 1)):
        model = support.lstm(gradient=False)
    assert support.section(describe(model), "how it runs") == [
        "on CUDA 1",
        "step number in lstm/timestep",
        "RNN executor: on, 2 streams by default",
    ]


def test_arguments_of_operators():
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    inner = core.Net("inner")
    inner.Copy("a", "b")
    step.Copy([x_t], ["y"], text="t" * 50, numbers=list(range(9)), scales=[0.5, 2.0], names=["p", "q"])
    step.Proto().op[-1].arg.add(name="net").n.CopyFrom(inner.Proto())
    step.Proto().op[-1].arg.add(name="nets").nets.extend([inner.Proto()] * 3)
    step.Proto().op[-1].arg.add(name="nothing")
    step.AddExternalOutput(step.Mul(["y", h_prev], "h_t"))
    net = core.Net("net")
    recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"}, forward_only=True)
    first, second = support.section(describe(net), "step net '")
    assert second == "1  Mul   y, h_prev -> h_t"
    assert first.startswith("0  Copy  x_t -> y  (") and first.endswith(")")
    for argument in (
        "text='{}...'".format("t" * 37),
        "numbers=[0, 1, 2, 3, ... 9 in all]",
        "scales=[0.5, 2]",
        "names=['p', 'q']",
        "net=<net of 1 operators>",
        "nets=<3 nets>",
        "nothing=[]",
    ):
        assert argument in first


def test_windows_and_longer_initial_values():
    net = support.of_two_slices()
    shapes = {"x": (4, 2, 4), "h0": (2, 2, 4)}
    text = describe(net, shapes)
    assert support.section(text, "states") == [
        "h_prev [2, 2, 4] -> h_t",
        "  are [t:t + 2] and [t + 2] of {}/recurrent/h_prev_states [6, 2, 4], 192 bytes".format(net.Name()),
        "  initial value h0 [2, 2, 4], no gradient",
    ]
    support.feed(shapes)
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("{}/recurrent/h_prev_states".format(net.Name())).shape == (6, 2, 4)
    assert support.step_tensors(net, 2)["h_prev"].shape == (2, 2, 4)


@pytest.mark.parametrize("slices", [1, 3])
def test_outputs_have_a_slice_more_for_each_of_an_initial_value(slices):
    net, step = core.Net("net"), core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    h_t = step.Tanh(step.Sum([x_t, h_prev], "z"), "h_t")
    outputs = recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: h_t}, forward_only=True)
    shapes = {"x": (5, 2, 3), "h0": (slices, 2, 3)}
    text = str(describe(net, shapes))
    support.feed(shapes)
    workspace.RunNetOnce(net)
    for blob in outputs:
        assert "{} {} is".format(blob, list(workspace.FetchBlob(blob).shape)) in text


# What a step keeps, beside what its workspace holds

VARIANTS = {
    "plain": lambda cell: cell,
    "memory optimised": lambda cell: cell.remembering_nothing(),
    "forward only": lambda cell: cell.but(options={"forward_only": True}, steps=6),
}


@every_pair
@pytest.mark.parametrize("optimised", [False, True], ids=["as built", "optimised"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_a_layer_keeps_what_is_said(cell, variant, optimised):
    cell = variant(cell)
    model = support.built_layer(cell, optimised, gradient="forward_only" not in cell.options)
    (loop,) = describe(model).loops
    workspace.RunNetOnce(model.net)
    assert_keeps(loop, model.net)


def assert_keeps(loop, net):
    """Bytes, and name, shape and type of all that lies in a step's workspace."""
    memory = loop.memory
    owned = step_memory.owned_bytes(net)
    assert min(owned) == memory.bytes_per_step
    assert sum(owned) == memory.total_bytes
    assert len(owned) == memory.workspaces
    assert_holds(loop, net)


def assert_holds(loop, net):
    """All blobs that lie in a step's workspace, with their shapes and types."""
    found = support.step_tensors(net, 0)
    linked = {view.inner for view in loop.structure.views}
    kept = {blob: (value.shape, value.dtype) for blob, value in found.items() if blob not in linked}
    assert {blob.inner: tuple(blob.tensor) for blob in loop.memory.kept} == kept


@pytest.mark.parametrize("gradient", [True, False], ids=["trained", "forward only"])
def test_without_the_executor(gradient):
    cell = cells.CELLS[0].but(steps=5, options={} if gradient else {"forward_only": True})
    model = support.built_layer(cell, executor=False, gradient=gradient)
    (loop,) = describe(model).loops
    workspace.RunNetOnce(model.net)
    assert loop.memory.workspaces == (5 if gradient else 2)
    assert_keeps(loop, model.net)


def assert_step_net(check, step_net, **options):
    workspace.ResetWorkspace()
    net, _, _ = rewritten_loops.build(step_net, **options)
    # With it, three steps leave one of its four workspaces out, and looking at what is not there ends the process.
    comparing.configure(net, executor=not step_net.options.get("forward_only"))
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)
    for position, value in comparing.output_gradients(step_net, options, comparing.reference_outputs(step_net)).items():
        workspace.FeedBlob("given_gradient_{}".format(position), value.astype(np.float32))
    (loop,) = describe(net).loops
    workspace.RunNetOnce(net)
    check(loop, net)


@pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
def test_a_step_net_keeps_what_is_said(make):
    assert_step_net(assert_keeps, make())


@given(st.integers(0, 2**20), st.integers(1, 3), st.booleans())
@settings(max_examples=25)
def test_a_random_step_net_keeps_what_is_said(seed, sequences, recompute):
    step_net, options = rewritten_loops.random_case(seed, sequences, recompute)
    # Its names end in digits, which `owned_bytes` takes for the number of the step.
    assert_step_net(assert_holds, step_net, **options)


GATES = "lstm/gates_t [1, 3, 16] float32, 192 bytes"


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_a_step_keeps_and_what_is_computed_again(recomputed):
    options = {"builder": rnn_cell.LSTM, "memory_optimization": True} if recomputed else {}
    text = describe(support.lstm(**options), support.LSTM_SHAPES)
    (loop,) = text.loops
    assert loop.memory.bytes_of_kept == (0 if recomputed else 4 * 3 * 16)
    number = "the step's number, 4 bytes"
    kept = support.section(text, "each step keeps, in a workspace of its own")[:-1]
    assert kept == ([number] if recomputed else [GATES, number])
    assert support.section(text, "computed again by the backward step") == [GATES if recomputed else "none"]


def test_gates_in_the_memory_of_the_sequence():
    text = describe(support.lstm(memory_optimization=True), support.LSTM_SHAPES)
    assert support.section(text, "sequences") == [
        "lstm/input_t is lstm/i2h[t], overwritten by the step; lstm/i2h [4, 3, 16], gradient lstm/i2h_grad"
    ]
    (loop,) = text.loops
    assert loop.memory.bytes_of_kept == 0
    assert support.section(text, "computed again by the backward step") == ["none"]
    assert support.section(text, "in memory that all steps share") == [GATES.replace("gates_t", "gates_t_shared")]


def test_blobs_in_memory_that_the_steps_share():
    model = support.built_layer(cells.CELLS[0], optimised=True)
    text = describe(model)
    (loop,) = text.loops
    shared = [blob.inner for blob in loop.memory.blobs if blob.place is Place.SHARED]
    assert shared and not any(blob.read_back for blob in loop.memory.blobs if blob.place is Place.SHARED)
    assert [line.split()[0] for line in support.section(text, "in memory that all steps share")] == shared
    workspace.RunNetOnce(model.net)
    assert not set(shared) & set(support.step_tensors(model.net, 0))


def test_what_is_kept_in_a_blob_of_the_net():
    model = support.built_layer(cells.CELLS[0], optimised=True)
    text = describe(model)
    (buffer,) = text.loops[0].structure.buffers
    assert support.section(text, "kept in blobs of the net") == [
        "{} [1, 2, 12] is {}[t]".format(buffer.inner, buffer.outer)
    ]
    assert buffer.outer == "layer/i2h_grad"


STALE = "; the backward step reads it, and finds what the last step left there"


def test_what_is_shared_by_mistake():
    """A blob that the backward step reads and does not compute again must not be shared by the steps."""
    model = support.lstm()
    for operator in [*support.operators(model.net), *support.operators(model.net, support.GRADIENT)]:
        support.argument(operator, "recompute_blobs_on_backward").strings[:] = [b"lstm/gates_t"]
    text = describe(model, support.LSTM_SHAPES)
    shared = support.section(text, "in memory that all steps share")
    assert shared == ["lstm/gates_t [1, 3, 16] float32, 192 bytes" + STALE]


def test_a_name_that_the_net_has_as_well():
    """Such a blob lies in the net's workspace, once for all steps."""
    model = support.lstm()
    for net in (model.net, model.param_init_net):
        net.ConstantFill([], ["lstm/gates_t"], shape=[1], value=0.0)
    support.feed(support.LSTM_SHAPES)
    text = describe(model)
    of_net = support.section(text, "in blobs that the net has by the same name, for all steps")
    assert of_net == ["lstm/gates_t [1, 3, 16] float32, 192 bytes" + STALE]
    assert text.loops[0].memory.bytes_per_step == 4
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    assert step_memory.owned_bytes(model.net) == [4] * 4


# Sizes


def test_sizes_that_are_not_known():
    text = describe(support.elman())
    assert str(text).split("\n")[3:5] == [
        "  T = ? steps, N = ? sequences",
        "  sizes shown as ? follow from shapes of x, h0, w, b",
    ]
    assert support.section(text, "each step keeps") == [
        "u [?], ? bytes; the backward step does not read it",
        "z [?], ? bytes; the backward step does not read it",
        "the step's number, 4 bytes",
        "together ? bytes a step, ? bytes in ? steps",
    ]
    assert text.loops[0].memory.total_bytes is None


def test_what_is_missing_is_what_others_follow_from():
    model = support.lstm()
    assert describe(model).loops[0].sizes.missing == ("x", "h0", "c0")
    assert describe(model, {"x": (4, 3, 2)}).loops[0].sizes.missing == ("h0", "c0")
    assert describe(model, support.LSTM_SHAPES).loops[0].sizes.missing == ()
    assert describe(model.net, support.LSTM_SHAPES).loops[0].sizes.missing == (
        "lstm/i2h_w",
        "lstm/i2h_b",
        "lstm/gates_t_w",
        "lstm/gates_t_b",
    )


def test_states_are_known_before_the_number_of_steps():
    (loop,) = describe(support.elman(), {"h0": (2, 3), "w": (3, 3), "b": (3,)}).loops
    assert (loop.sizes.steps, loop.sizes.batch) == (None, 2)
    assert loop.sizes.inner["h_prev"].shape == loop.sizes.inner["u"].shape == (1, 2, 3)
    assert loop.memory.blobs[0].bytes == 24 and loop.memory.total_bytes is None


def test_sizes_from_the_workspace_and_from_the_parameters():
    model = support.lstm()
    support.feed(support.LSTM_SHAPES)
    assert describe(model).loops[0].memory == describe(support.lstm(), support.LSTM_SHAPES).loops[0].memory
    workspace.RunNetOnce(model.param_init_net)
    assert describe(model.net).loops[0].memory.bytes_per_step == 4 * 3 * 16 + 4


def test_given_shapes_count_more_than_the_workspace():
    model = support.lstm()
    support.feed(support.LSTM_SHAPES)
    assert describe(model, {"x": (7, 3, 2)}).loops[0].sizes.steps == 7


def with_operator(kind, inputs, **arguments):
    """A loop whose step runs one operator beside its state, on the slice x_t and references."""
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    if inputs != ["x_t"]:
        step.AddExternalInputs(*inputs)
    getattr(step, kind)(inputs, ["y"], **arguments)
    step.AddExternalOutput(step.Tanh(h_prev, "h_t"))
    net = core.Net("net")
    recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"}, forward_only=True)
    return net


def test_an_operator_of_which_caffe2_knows_no_size():
    net, shapes = with_operator("NormalizeL1", ["x_t"]), {"x": (5, 2, 3), "h0": (2, 3)}
    assert support.section(describe(net, shapes), "the steps take turns")[0] == "y [?], ? bytes"
    told = describe(net, {"y": (1, 2, 3), **shapes})
    assert support.section(told, "the steps take turns")[0] == "y [1, 2, 3] float32, 24 bytes"


def test_an_in_place_operator_of_which_caffe2_knows_no_size():
    """What was known of the blob before says nothing about it now."""
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    y = step.Copy(x_t, "y")
    step.NormalizeL1(y, y)
    step.AddExternalOutput(step.Tanh(h_prev, "h_t"))
    net = core.Net("net")
    recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"}, forward_only=True)
    assert describe(net, {"x": (5, 2, 3), "h0": (2, 3)}).loops[0].sizes.inner.get("y") is None


def test_elements_that_are_not_float32():
    net = with_operator("Gather", ["table", "rows"])
    support.feed({"x": (5, 2, 3), "h0": (2, 3)})
    workspace.FeedBlob("table", np.zeros((4, 2), dtype=np.float64))
    workspace.FeedBlob("rows", np.array([1, 3, 0], dtype=np.int64))
    assert support.section(describe(net), "the steps take turns")[0] == "y [3, 2] float64, 48 bytes"
    workspace.RunNetOnce(net)
    assert_keeps(describe(net).loops[0], net)


def test_strings_have_no_size():
    net = with_operator("Copy", ["words"])
    support.feed({"x": (5, 2, 3), "h0": (2, 3)})
    workspace.FeedBlob("words", np.array(["a", "bc"], dtype=object))
    text = describe(net)
    assert "y [" in support.section(text, "the steps take turns")[0]


def test_no_warning_of_caffe2_about_unknown_sizes(capfd):
    describe(support.lstm())
    assert "inference failed" not in capfd.readouterr().err


# Inference, operator by operator, beside a run

X, Y, V = (1, 3, 4), (1, 3, 4), (4,)
INFERRED = [
    ("ATen", [X], {"operator": "tanh"}),
    ("ATen", [X, V], {"operator": "max"}),
    ("ATen", [X, Y, V], {"operator": "addcmul"}),
    ("ATen", [V, X, Y], {"operator": "lerp"}),
    ("Ceil", [X], {}),
    ("ElementwiseLinear", [X, V, V], {"axis": 2}),
    ("Floor", [X], {}),
    ("FC", [X, (5, 4), (5,)], {"axis": 2}),
    ("GT", [X, Y], {}),
    ("Shape", [X], {}),
    ("Transpose", [X], {"axes": [1, 0, 2]}),
    ("BatchMatMul", [X, (4, 5)], {"broadcast": 1}),
    ("BatchMatMul", [X, (2, 4, 5)], {"broadcast": 1}),
    ("BatchMatMul", [X, (2, 5, 4)], {"broadcast": 1, "trans_b": 1}),
    ("BatchMatMul", [(2, 4, 3), (2, 4, 5)], {"trans_a": 1}),
    ("ATen", [(5, 3, 4)], {"operator": "split_with_sizes", "split_sizes": [5], "dim": 0}),
]


@pytest.mark.parametrize("kind, shapes, arguments", INFERRED, ids=["{}-{}".format(i[0], len(i[1])) for i in INFERRED])
def test_inferred_sizes_are_those_of_a_run(kind, shapes, arguments):
    names = ["input{}".format(number) for number in range(len(shapes))]
    support.feed(dict(zip(names, shapes)))
    operator = core.CreateOperator(kind, [core.BlobReference(name) for name in names], ["output"], **arguments)
    found = infer(operator, [Tensor(shape, np.dtype(np.float32)) for shape in shapes])
    workspace.RunOperatorOnce(operator)
    value = workspace.FetchBlob("output")
    assert found == {0: Tensor(value.shape, value.dtype)}


UNKNOWN = [
    ("ATen", [X], {"operator": "max"}),
    ("ATen", [X, (1, 3, 5)], {"operator": "add"}),
    ("FC", [X, None, (5,)], {"axis": 2}),
    ("LSTMUnit", [None, X, X], {}),
    ("BatchMatMul", [X, None], {}),
    ("BatchMatMul", [X, V], {}),
    ("BatchMatMul", [(2, 3, 4), (3, 4, 5)], {}),
    ("ATen", [None], {"operator": "split_with_sizes", "split_sizes": [1], "dim": 0}),
    ("ATen", [X], {"operator": "split_with_sizes", "split_sizes": [1], "dim": 3}),
    ("ATen", [X], {"operator": "split_with_sizes", "split_sizes": [2, 1], "dim": 1}),
]


@pytest.mark.parametrize("kind, shapes, arguments", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_cannot_be_inferred(kind, shapes, arguments):
    """The largest element, shapes that do not fit, unknown inputs."""
    names = ["input{}".format(number) for number in range(len(shapes))]
    operator = core.CreateOperator(kind, names, ["output"], **arguments)
    known = [None if shape is None else Tensor(shape, np.dtype(np.float32)) for shape in shapes]
    assert infer(operator, known) == {}


def test_parts_that_are_views():
    arguments = {"operator": "split_with_sizes", "split_sizes": [1, 3], "dim": 0}
    operator = core.CreateOperator("ATen", ["whole"], ["one", "three"], **arguments)
    workspace.FeedBlob("whole", np.zeros((4, 2, 5), dtype=np.float32))
    found = infer(operator, [Tensor((4, 2, 5), np.dtype(np.float32))])
    workspace.RunOperatorOnce(operator)
    assert [found[0].shape, found[1].shape] == [workspace.FetchBlob(blob).shape for blob in ("one", "three")]


def test_inference_that_fails(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("of the engine")

    monkeypatch.setattr(workspace, "InferShapesAndTypes", fail)
    operator = core.CreateOperator("Tanh", ["x"], ["y"])
    assert infer(operator, [Tensor((2,), np.dtype(np.float32))]) == {}


# Other ways to come by a loop


def test_a_net_read_from_a_file():
    model = support.lstm()
    proto = caffe2_pb2.NetDef.FromString(model.net.Proto().SerializeToString())
    shapes = {**support.LSTM_SHAPES, "lstm/i2h_w": (16, 2), "lstm/i2h_b": (16,)}
    shapes.update({"lstm/gates_t_w": (16, 4), "lstm/gates_t_b": (16,)})
    assert str(describe(proto, shapes)) == str(describe(model, support.LSTM_SHAPES))


def test_step_nets_as_text():
    """As nets made before 2018 have them."""
    net = support.elman()
    expected = str(describe(net, support.ELMAN_SHAPES))
    for operator in net.Proto().op:
        for given_argument in operator.arg:
            if given_argument.name in ("step_net", "backward_step_net"):
                given_argument.s = str(given_argument.n).encode()
                given_argument.ClearField("n")
    assert str(describe(net, support.ELMAN_SHAPES)) == expected


def test_the_forward_operator_alone():
    net = support.elman()
    text = describe(support.operators(net)[0], support.ELMAN_SHAPES)
    assert str(text).startswith("operator RecurrentNetwork: 1 loop\n")
    whole = str(describe(net, support.ELMAN_SHAPES)).split("\n")
    alone = str(text).split("\n")
    # Names of gradients that the step does not need are made with the gradient operator.
    differing = {line for line in whole if line not in alone}
    assert differing == {
        line.format(net.Name())
        for line in (
            "net '{}': 1 loop",
            "    x_t is x[t]; x [5, 2, 3], gradient {}/recurrent/x_grad",
            "    h_t_all [5, 2, 3] is {}/recurrent/h_prev_states[1:]; no gradient goes back from it",
            "    h_t_last [1, 2, 3] is {}/recurrent/h_prev_states[-1:]; its gradient h_t_last_autogen_grad goes back",
        )
    }


def test_the_gradient_operator_alone():
    model = support.built_layer(cells.CELLS[0])
    whole, alone = describe(model), describe(support.operators(model.net, support.GRADIENT)[0])
    assert str(alone).startswith("operator RecurrentNetworkGradient: 1 loop\n")
    ours, theirs = alone.loops[0].structure, whole.loops[0].structure
    assert ours.sequences == theirs.sequences and ours.states == theirs.states
    assert ours.references == theirs.references and ours.outputs == theirs.outputs
    assert ours.backward == theirs.backward and ours.operators == theirs.operators


def test_the_gradient_operator_of_an_optimised_loop_alone():
    """It does not have to know what the forward operator links and shares."""
    model = support.built_layer(cells.CELLS[0], optimised=True)
    whole, alone = describe(model), describe(support.operators(model.net, support.GRADIENT)[0])
    ours, theirs = alone.loops[0].structure, whole.loops[0].structure
    assert ours.backward == theirs.backward and ours.operators == theirs.operators
    assert ours.outputs == theirs.outputs
    assert theirs.sequences and not ours.sequences
    assert theirs.shared and not ours.shared
    says = "its forward operator is not here; if that was optimised, it links and shares more than is shown"
    assert says in str(alone) and says not in str(whole)


def test_a_net_with_gradient_operators_only():
    model = support.lstm()
    backward = core.Net("backward")
    backward.Proto().op.extend(model.net.Proto().op[-2:])
    shapes = {**support.LSTM_SHAPES, "lstm/i2h": (4, 3, 16), "lstm/gates_t_w": (16, 4), "lstm/gates_t_b": (16,)}
    before = backward.Proto().SerializeToString()
    (loop,) = describe(backward, shapes).loops
    assert loop.memory.bytes_per_step == 4 * 3 * 16 + 4
    assert backward.Proto().SerializeToString() == before


def test_loops_of_caffe2():
    """Its own LSTM, with its own builder of loops and gradients from C++."""
    model = ModelHelper("theirs")
    hidden_all, *_ = rnn_cell.LSTM(model, "x", "lengths", ("h0", "c0"), 2, 4, "lstm", forget_bias=0.5)
    model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    support.feed({"x": (4, 3, 2), "h0": (1, 3, 4), "c0": (1, 3, 4)})
    workspace.FeedBlob("lengths", np.array([4, 2, 0], dtype=np.int32))
    workspace.RunNetOnce(model.param_init_net)
    text = describe(model)
    (loop,) = text.loops
    assert [state.outer_initial for state in loop.structure.states] == ["h0", "c0"]
    assert [reference.outer_gradient for reference in loop.structure.references] == [
        "lstm/gates_t_w_grad",
        "lstm/gates_t_b_grad",
        None,
    ]
    assert loop.structure.references[2].outer == "lengths"
    workspace.RunNetOnce(model.net)
    assert_keeps(loop, model.net)


def test_a_loop_of_caffe2s_recurrent_net():
    step_net = step_nets.two_states()
    net, _ = comparing.build(recurrent.recurrent_net, step_net)
    ours, _ = comparing.build(recurrent_net, step_net)
    found, expected = (describe(one).loops[0].structure for one in (net, ours))
    assert found.operators == expected.operators
    for theirs, mine in zip(found.states, expected.states):
        assert [view[2:] for view in theirs.before + theirs.after] == [view[2:] for view in mine.before + mine.after]


# What is wrong with a call


def test_wrong_types():
    with pytest.raises(TypeError) as caught:
        describe("net", {"x": "shape"})
    assert str(caught.value) == listed(
        "describe",
        "net_or_op must be a ModelHelper, a core.Net, a NetDef or an OperatorDef; got 'net' of type str",
        "shapes['x'] must be whole numbers from 1 on, like (20, 128, 40); got 'shape' of type str",
    )


def test_a_net_without_a_loop():
    model = ModelHelper("plain")
    brew.fc(model, "x", "y", dim_in=2, dim_out=3)
    model.net.Tanh("y", "z")
    with pytest.raises(ValueError) as caught:
        describe(model)
    assert str(caught.value) == (
        "describe: net '{}' has no RecurrentNetwork operator; its operators are 'FC', 'Tanh'".format(model.net.Name())
    )


def in_branches(inner):
    """A net that runs `inner` in an If of an If."""
    branch = caffe2_pb2.NetDef(name="branch", op=[core.CreateOperator("If", ["c"], ["y"], then_net=inner)])
    operators = [core.CreateOperator("Copy", ["x"], ["z"]), core.CreateOperator("If", ["c"], ["y"], then_net=branch)]
    return caffe2_pb2.NetDef(name="outer", op=operators)


@pytest.mark.parametrize(
    "called",
    [
        describe,
        caffe2_recurrent.check_inputs,
        caffe2_recurrent.step_values,
        caffe2_recurrent.step_times,
        lambda net: caffe2_recurrent.draw(net, "nowhere.dot"),
        lambda net: caffe2_recurrent.lstm_to_torch(net, "lstm"),
        lambda net: caffe2_recurrent.export_onnx("nowhere.onnx", net, "lstm"),
    ],
)
def test_a_loop_in_a_net_that_an_operator_is_given(called):
    inner = support.lstm(gradient=False).net.Proto()
    with pytest.raises(ValueError) as caught:
        called(in_branches(inner))
    assert str(caught.value).split(": ", 1)[1] == (
        "net 'outer' has no RecurrentNetwork operator; its operators are 'Copy', 'If', and one is in a net that these "
        "are given; pass that net: '{}' of If".format(inner.name)
    )
    assert str(describe(inner)).startswith("net 'model': 1 loop")


def test_nets_without_a_loop_that_an_operator_is_given():
    with pytest.raises(ValueError) as caught:
        describe(in_branches(core.Net("empty").Proto()))
    assert str(caught.value) == (
        "describe: net 'outer' has no RecurrentNetwork operator; its operators are 'Copy', 'If'"
    )


def test_an_operator_that_is_no_loop():
    with pytest.raises(ValueError) as caught:
        describe(core.CreateOperator("FC", ["x", "w", "b"], ["y"]))
    assert str(caught.value) == "describe: operator FC has no RecurrentNetwork operator; its operators are 'FC'"


def test_an_empty_net():
    with pytest.raises(ValueError) as caught:
        describe(core.Net("empty"))
    assert str(caught.value).endswith("has no RecurrentNetwork operator; it has no operators")


def test_shapes_that_do_not_fit_are_not_shown_to_the_engine(capfd):
    model = ModelHelper("model")
    LSTM(model, "x", None, None, 3, 4, "lstm")
    with pytest.raises(ValueError) as caught:
        describe(model, {"x": (5, 2)})
    assert str(caught.value) == (
        "describe: shapes['x'] must have 3 dimensions or more, as FC makes 'lstm/i2h' of it; got (5, 2)"
    )
    assert capfd.readouterr().err == ""


def test_shapes_of_blobs_that_are_not_there():
    with pytest.raises(ValueError) as caught:
        describe(support.elman(), {"x": (5, 2, 3), "H0": (2, 3)})
    assert str(caught.value) == (
        "describe: shapes has 'H0', which no operator reads or writes; the net reads 'x', 'h0', 'w', 'b'"
    )


def test_a_backward_step_that_was_emptied_is_none():
    """As Caffe2 leaves it in a net that it has cut out of a training net; the engine then runs forward only."""
    step = core.Net("step")
    x_t, h_prev = step.AddExternalInputs("x_t", "h_prev")
    step.AddExternalOutput(step.Tanh(step.Sum([x_t, h_prev], "z"), "h_t"))
    net = core.Net("net")
    recurrent_net(net, step, [(x_t, "x")], [(h_prev, "h0")], {h_prev: "h_t"})
    (operator,) = support.operators(net)
    support.argument(operator, "backward_step_net").ClearField("n")
    (loop,) = describe(net, {"x": (9, 2, 4), "h0": (2, 4)}).loops
    assert loop.structure.backward is None
    assert loop.memory.workspaces == 4


@pytest.mark.parametrize("between, expected", [([], (3, 4)), ([core.CreateOperator("Copy", ["t"], ["sizes"])], None)])
def test_sizes_that_are_written_anew_are_not_known(between, expected):
    operators = [
        core.CreateOperator("GivenTensorInt64Fill", [], ["sizes"], shape=[2], values=[3, 4]),
        *between,
        core.CreateOperator("ConstantFill", ["sizes"], ["filled"], input_as_shape=1),
    ]
    found = find_outer_tensors(caffe2_pb2.NetDef(op=operators), Sizes({}))
    assert (found["filled"].shape if "filled" in found else None) == expected
