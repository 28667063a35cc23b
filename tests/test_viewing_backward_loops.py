"""`describe` and `draw` where `optimize` has made the backward pass a loop of its own."""

import numpy as np
import pytest
from caffe2.python import workspace

import viewing_support as support
from caffe2_recurrent import GRU, LSTM, describe, optimize
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.graph import Kind, Role
from caffe2_recurrent.viewing.kept import Place
from caffe2_recurrent.viewing.loop_graph import loop_graph
from caffe2_recurrent.viewing.source import read_source

pytestmark = pytest.mark.usefixtures("backward_loops")
RULES = ["parameter_gradients", "lstm_unit", "gru_unit", "gradient_buffer", "forward_links", "backward_loop"]
BUILDERS = pytest.mark.parametrize(
    "builder, shapes",
    [(LSTM, support.LSTM_SHAPES), (GRU, {name: support.LSTM_SHAPES[name] for name in ("x", "h0")})],
    ids=["LSTM", "GRU"],
)


def optimised(builder, shapes):
    model = (support.lstm if builder is LSTM else gru)()
    assert optimize(model, RULES, shapes=shapes, even_if_slower=True).counts["backward_loop"] == 1
    return model


def gru():
    return support.lstm(
        builder=lambda model, x, lengths, states, *sizes, **options: GRU(
            model, x, lengths, states[:1], *sizes, **options
        )
    )


@BUILDERS
def test_all_sizes_follow_from_the_input(builder, shapes):
    model = optimised(builder, shapes)
    text = describe(model, shapes)
    assert "?" not in str(text)
    forward, backward = text.loops
    assert (forward.backward_pass, backward.backward_pass) == (backward.structure.name, None)
    assert backward.structure.backward_pass_of == forward.structure.outer_outputs[-1]
    assert "it has no backward step: its backward pass is the loop '{}'".format(backward.structure.name) in str(text)
    assert "it is the backward pass of the loop with the step workspaces 'lstm/step_workspaces'" in str(text)
    assert "forward only" not in str(text)


@BUILDERS
def test_without_shapes(builder, shapes):
    """What the sizes would follow from is named, and only that."""
    text = describe(optimised(builder, shapes))
    forward, backward = text.loops
    assert backward.sizes.outer == {} or "x" not in backward.sizes.outer
    assert backward.memory.bytes_per_step is None or backward.memory.bytes_per_step == 8
    missing = "sizes shown as ? follow from shapes of "
    lines = [line.strip() for line in str(text).splitlines() if missing in line]
    assert len(lines) == 2
    assert all("x" in line[len(missing) :].split(", ") for line in lines)


@BUILDERS
def test_sizes_and_places_are_those_of_a_run(builder, shapes):
    model = optimised(builder, shapes)
    text = describe(model, shapes)
    workspace.RunNetOnce(model.param_init_net)
    support.feed(shapes)
    workspace.RunNetOnce(model.net)
    for loop in text.loops:
        known = {view.outer: loop.sizes.outer[view.outer] for view in (*loop.structure.views, *loop.structure.shown)}
        assert known
        for blob, tensor in known.items():
            assert workspace.FetchBlob(blob).shape == tensor.shape, blob
    (forward, backward) = text.loops
    places = {blob.inner: blob.place for blob in backward.memory.blobs}
    assert backward.structure.shown
    assert all(places[view.inner] is Place.VIEW for view in backward.structure.shown)
    # Two numbers: how many steps there are back, and how many there were.
    assert backward.memory.bytes_per_step == 8
    assert [blob.tensor.kind for blob in backward.memory.kept] == [np.dtype(np.int32)]


def test_slices_and_outputs_that_steps_write():
    text = describe(optimised(LSTM, support.LSTM_SHAPES), support.LSTM_SHAPES)
    slices = support.section(text, "slices of blobs of the net", loop=1)
    assert slices[0] == (
        "lstm/gates_t_grad [1, 3, 16] is lstm/i2h_grad_memory[step_of_forward + 1]; lstm/i2h_grad_memory [5, 3, 16]"
    )
    outputs = support.section(text, "outputs", loop=1)
    assert outputs[0] == "lstm/i2h_grad [4, 3, 16] is written in slices by the steps"


@BUILDERS
def test_the_two_loops_are_joined_in_the_picture(builder, shapes):
    source = read_source(optimised(builder, shapes), shapes, Problems("test"), Problems("test"))
    graph = loop_graph(source, source.loops)
    assert [cluster.label.split("\n")[1].split(",")[0] for cluster in graph.clusters[1:]] == [
        "step",
        "step of the backward pass",
    ]
    assert all(cluster.label.startswith("RecurrentNetwork lstm\n") for cluster in graph.clusters[1:])
    nodes = {node.key: node for node in graph.nodes}
    assert not any("rnn_internal_apply_link" in line.text for node in graph.nodes for line in node.lines)
    outer = {blob: node for node in graph.nodes if node.cluster == "outer" for blob in node.blobs}
    assert len(outer) == sum(len(node.blobs) for node in graph.nodes if node.cluster == "outer")
    joined = set()
    for view in source.loops[1].structure.shown:
        buffer = outer[view.outer]
        # The states of the forward pass are read as such.
        assert buffer.role in (Role.KEPT, Role.GRADIENT, Role.STATE)
        around = {nodes[edge.tail].cluster for edge in graph.edges if edge.head == buffer.key}
        around |= {nodes[edge.head].cluster for edge in graph.edges if edge.tail == buffer.key}
        joined.add(frozenset(around & {"step 0", "step 1"}))
        assert "step 1" in around
    assert frozenset(["step 0", "step 1"]) in joined
    assert Kind.TIME in graph.kinds
