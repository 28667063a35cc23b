"""`draw`: the graph as a value, its text, and the pictures that graphviz makes of it."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, rnn_cell
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

import cells
import rewritten_loops
import viewing_support as support
from caffe2_recurrent import LSTM, draw, optimize
from caffe2_recurrent.operators import is_gradient_name
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.dot import FILL, LANDSCAPE, PORTRAIT, SIZE, dot_text, likely_page
from caffe2_recurrent.viewing.graph import Cluster, Edge, Graph, Kind, Line, Node, Role
from caffe2_recurrent.viewing.loop_graph import loop_graph
from caffe2_recurrent.viewing.short_names import common_scope, short_names
from caffe2_recurrent.viewing.source import read_source
from documents import ROOT
from errors_support import listed

# The graph


def graph_of(net, shapes=None, backward=True):
    source = read_source(net, shapes, Problems("test"), Problems("test"))
    return loop_graph(source, source.loops, backward)


def names(graph):
    """What tests call the nodes: `cluster: first line`."""
    return {node.key: "{}: {}".format(node.cluster.split()[0], node.lines[0].text) for node in graph.nodes}


def edges(graph, *kinds):
    called = names(graph)
    return {(called[edge.tail], called[edge.head]) for edge in graph.edges if edge.kind in kinds}


def blobs(graph, role, cluster):
    """The short names of the blobs in this role in a cluster."""
    nodes = [node for node in graph.nodes if node.role is role and node.cluster.split()[0] == cluster]
    return {line.text for node in nodes for line in node.lines}


def test_a_known_step():
    net = support.elman(gradient=False)
    graph = graph_of(net, backward=False)
    assert [(cluster.key, cluster.parent) for cluster in graph.clusters] == [("outer", None), ("step 0", "outer")]
    assert graph.clusters[0].label == "net '{0}', names without {0}/recurrent/".format(net.Name())
    assert graph.clusters[1].label == "RecurrentNetwork {}/recurrent\nstep, t = 0, 1, ..., T - 1".format(net.Name())
    assert {(name, node.role) for name, node in zip(names(graph).values(), graph.nodes)} == {
        ("step: FC", Role.OPERATOR),
        ("step: Sum", Role.OPERATOR),
        ("step: Tanh", Role.OPERATOR),
        ("step: h_prev", Role.STATE),
        ("step: u", Role.VALUE),
        ("step: x_t", Role.SEQUENCE),
        ("step: z", Role.VALUE),
        ("step: h_t", Role.STATE),
        ("outer: w", Role.REFERENCE),
        ("outer: x", Role.SEQUENCE),
        ("outer: h_prev_states", Role.STATE),
        ("outer: h0", Role.STATE),
        ("outer: h_t_all", Role.STATE),
    }
    assert edges(graph, Kind.FLOW) == {
        ("outer: x", "step: x_t"),
        ("step: h_prev", "step: FC"),
        ("outer: w", "step: FC"),
        ("step: FC", "step: u"),
        ("step: u", "step: Sum"),
        ("step: x_t", "step: Sum"),
        ("step: Sum", "step: z"),
        ("step: z", "step: Tanh"),
        ("step: Tanh", "step: h_t"),
        ("outer: h0", "outer: h_prev_states"),
        ("outer: h_prev_states", "outer: h_t_all"),
    }
    assert edges(graph, Kind.TIME) == {
        ("step: h_t", "outer: h_prev_states"),
        ("outer: h_prev_states", "step: h_prev"),
    }
    assert graph.kinds == [Kind.FLOW, Kind.TIME]
    assert graph.roles == [Role.OPERATOR, Role.SEQUENCE, Role.STATE, Role.REFERENCE, Role.VALUE]


def test_a_known_backward_step():
    graph = graph_of(support.elman())
    assert [cluster.key for cluster in graph.clusters] == ["outer", "step 0", "backward 0"]
    assert edges(graph, Kind.BACK) == {
        ("outer: h_t_last_autogen_grad", "outer: h_prev_states_grad"),
        ("outer: ConstantFill", "outer: h_t_last_autogen_grad"),
        ("backward: h_t_grad", "backward: TanhGradient"),
        ("backward: h_t", "backward: TanhGradient"),
        ("backward: TanhGradient", "backward: z_grad"),
        ("backward: z_grad", "backward: FCGradient"),
        ("backward: h_prev", "backward: FCGradient"),
        ("backward: w", "backward: FCGradient"),
        ("backward: FCGradient", "backward: h_prev_grad"),
        ("backward: FCGradient", "outer: w_grad"),
        ("backward: z_grad", "outer: {}/recurrent/x_grad".format(graph.title.split("'")[1])),
        ("outer: Alias", "outer: x_grad"),
        ("outer: {}/recurrent/x_grad".format(graph.title.split("'")[1]), "outer: Alias"),
        ("outer: h_prev_states_grad", "outer: h0_grad"),
    }
    assert edges(graph, Kind.TIME_BACK) == {
        ("outer: h_prev_states_grad", "backward: h_t_grad"),
        ("backward: h_prev_grad", "outer: h_prev_states_grad"),
    }
    assert blobs(graph, Role.GRADIENT, "outer") >= {"w_grad", "b_grad", "h0_grad"}


def small_print(graph):
    """What is said of the blobs in small print, by `cluster: blob`."""
    nodes = [(node.cluster.split()[0], line) for node in graph.nodes for line in node.lines]
    return {"{}: {}".format(cluster, line.text): line.small for cluster, line in nodes if line.small}


def test_small_print():
    assert small_print(graph_of(support.elman(), support.ELMAN_SHAPES)) == {
        "outer: x": "5 x 2 x 3",
        "outer: h0": "[0], 2 x 3",
        "outer: w": "3 x 3",
        "outer: b": "3",
        "outer: h_prev_states": "6 x 2 x 3",
        "outer: h_t_all": "[1:], 5 x 2 x 3",
        "outer: h_t_last": "[-1:], 1 x 2 x 3",
        "outer: h_t_last_autogen_grad": "[-1:]",
        "outer: w_grad": "sum over t",
        "outer: b_grad": "sum over t",
        "outer: h0_grad": "[0]",
        "step: x_t": "[t]",
        "step: h_prev": "[t]",
        "step: h_t": "[t + 1]",
        "backward: h_t_grad": "[t + 1]",
        "backward: h_t": "[t + 1]",
        "backward: h_prev": "[t]",
        "backward: z_grad": "[t]",
        "backward: h_prev_grad": "[t]",
    }
    assert small_print(graph_of(support.lstm()))["step: timestep"] == "t"


def test_blobs_that_the_same_operators_use_are_one_node():
    graph = graph_of(support.elman(), support.ELMAN_SHAPES)
    (node,) = [node for node in graph.nodes if node.role is Role.REFERENCE and node.cluster == "outer"]
    assert node.blobs == ("w", "b")
    assert node.lines == (Line("w", "3 x 3"), Line("b", "3"))


@pytest.mark.parametrize(
    "steps, expected",
    [
        (1, ("t = 0", "t = 0")),
        (2, ("t = 0, 1", "t = 1, 0")),
        (3, ("t = 0, 1, 2", "t = 2, 1, 0")),
        (4, ("t = 0, 1, 2, 3", "t = 3, 2, 1, 0")),
        (9, ("t = 0, 1, ..., 8", "t = 8, ..., 1, 0")),
    ],
)
def test_steps_are_counted(steps, expected):
    graph = graph_of(support.elman(), {"x": (steps, 2, 3)})
    assert tuple(cluster.label.split("step, ")[1] for cluster in graph.clusters[1:]) == expected


def test_a_backward_step_without_its_operator():
    graph = graph_of(support.elman(gradient=False))
    assert graph.clusters[2].label.startswith("RecurrentNetwork ")
    assert graph_of(support.elman()).clusters[2].label.startswith("RecurrentNetworkGradient ")


RECOMPUTED = {"builder": rnn_cell.LSTM, "memory_optimization": True}


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_kept_and_what_is_computed_again(recomputed):
    graph = graph_of(support.lstm(**(RECOMPUTED if recomputed else {})), support.LSTM_SHAPES)
    role, other = (Role.COMPUTED_AGAIN, Role.KEPT) if recomputed else (Role.KEPT, Role.COMPUTED_AGAIN)
    assert blobs(graph, role, "step") == blobs(graph, role, "backward") == {"gates_t"}
    assert blobs(graph, other, "step") == blobs(graph, other, "backward") == set()
    kept = set() if recomputed else {("step: gates_t", "backward: gates_t")}
    assert edges(graph, Kind.KEPT) == kept
    assert small_print(graph).get("step: gates_t") == (None if recomputed else "192 bytes")
    again = [node for node in graph.nodes if node.cluster == "backward 0" and node.lines[0].text == "FC"]
    assert len(again) == int(recomputed)


def test_what_is_kept_in_the_place_of_the_sequence():
    """A step shows the slice twice: as it finds it, and as it leaves it."""
    graph = graph_of(support.lstm(memory_optimization=True), support.LSTM_SHAPES)
    assert blobs(graph, Role.SEQUENCE, "step") == blobs(graph, Role.KEPT, "step") == {"input_t"}
    assert blobs(graph, Role.KEPT, "backward") == {"input_t"}
    assert edges(graph, Kind.KEPT) == {("step: input_t", "backward: input_t")}
    assert ("step: input_t", "step: Sum") in edges(graph, Kind.FLOW)


def test_what_is_kept_in_a_blob_of_the_net():
    model = support.built_layer(cells.CELLS[0], optimised=True)
    graph = graph_of(model)
    assert ("step: cell_t_gate_factors_linked", "outer: i2h_grad") in edges(graph, Kind.FLOW)
    assert ("step: cell_t_gate_factors_linked", "backward: cell_t_gate_factors_linked") in edges(graph, Kind.KEPT)
    assert small_print(graph)["step: cell_t_gate_factors_linked"] == "[t], 96 bytes"
    assert "ATen tanh" in [node.lines[0].text for node in graph.nodes]


def test_operators_beside_the_loop():
    graph = graph_of(support.lstm())
    assert {
        ("outer: x", "outer: FC"),
        ("outer: FC", "outer: i2h"),
        ("outer: hidden_t_all", "outer: AveragedLoss"),
        ("outer: AveragedLoss", "outer: loss"),
    } <= edges(graph, Kind.FLOW)
    assert {
        ("outer: AveragedLossGradient", "outer: hidden_t_all_grad"),
        ("outer: i2h_grad", "outer: FCGradient"),
        ("outer: FCGradient", "outer: i2h_w_grad"),
    } <= edges(graph, Kind.BACK)


def test_forward_operators_that_look_like_those_of_gradients():
    """One without outputs has none that is called otherwise, and a scope may be called after gradients."""
    model = ModelHelper("model")
    model.net.Print("x", [])
    hidden_all, *_ = LSTM(model, "x", None, None, 2, 3, "my_grading")
    model.net.Print(hidden_all, [])
    model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    found = edges(graph_of(model), Kind.FLOW)
    assert {("outer: x", "outer: FC"), ("outer: FC", "outer: i2h"), ("outer: AveragedLoss", "outer: loss")} <= found
    assert ("outer: hidden_t_all", "outer: Print") in found


@pytest.mark.parametrize(
    "blob, expected",
    [
        ("x_grad", True),
        ("lstm/h_t_last_autogen_grad", True),
        ("_lstm/x_grad_autosplit_0", True),
        ("x_grad_1", True),
        ("my_grading/x", False),
        ("my_grad/x", False),
        ("x_grading", False),
        ("x", False),
    ],
)
def test_names_of_gradients(blob, expected):
    assert is_gradient_name(blob) == expected


@pytest.mark.parametrize("sizes", [3, [3, 3]], ids=["one layer", "two"])
def test_neighbours_of_neighbours_that_are_drawn(sizes):
    """What turns a direction round is brought in by its loop, and read by what joins it with the other one."""
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", "lengths", None, 2, sizes, "lstm", bidirectional=True)
    model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    graph = graph_of(model)
    drawn = {blob: node.key for node in graph.nodes if node.cluster == "outer" for blob in node.blobs}
    found = {(edge.tail, edge.head) for edge in graph.edges}
    joining = [
        operator for operator in model.net.Proto().op if operator.type in ("Concat", "Split", "ReversePackedSegs")
    ]
    assert joining
    keys = {node.key for node in graph.nodes}
    for operator in joining:
        key = "outer operator {}".format(list(model.net.Proto().op).index(operator))
        if key not in keys:
            continue
        # Sizes and lengths are of the forward pass, and not drawn as read by its gradients.
        read = [blob for blob in operator.input if blob in drawn and (not operator.is_gradient_op or "_grad" in blob)]
        assert {(drawn[blob], key) for blob in read} <= found
        assert {(key, drawn[blob]) for blob in operator.output if blob in drawn} <= found
    flow = edges(graph_of(model), Kind.FLOW)
    layer = "" if sizes == 3 else "layer_1/"
    assert ("outer: {}turned_hidden_t_all".format(layer), "outer: Concat") in flow
    assert ("outer: Split", "outer: {}turned_hidden_t_all_grad".format(layer)) in edges(graph, Kind.BACK)


def test_what_trains_is_left_out():
    model = support.lstm()
    before = graph_of(model)
    model.net.WeightedSum(["lstm/gates_t_w", "one", "lstm/gates_t_w_grad", "rate"], ["lstm/gates_t_w"])
    assert graph_of(model) == before


def test_layers():
    model = ModelHelper("model")
    hidden_all, *_ = LSTM(model, "x", None, None, 2, [3, 3], "lstm")
    model.AddGradientOperators([model.net.AveragedLoss(hidden_all, "loss")])
    graph = graph_of(model)
    assert [cluster.key for cluster in graph.clusters[1:]] == ["step 0", "backward 0", "step 1", "backward 1"]
    assert graph.clusters[0].label.endswith(", names without lstm/")
    assert {
        ("outer: layer_0/hidden_t_all", "outer: FC"),
        ("outer: FC", "outer: layer_1/i2h"),
        ("outer: layer_1/i2h", "step: input_t"),
    } <= edges(graph, Kind.FLOW)
    assert ("outer: FCGradient", "outer: layer_0/hidden_t_all_grad") in edges(graph, Kind.BACK)
    assert ("outer: layer_1/hidden_t_prev_states", "step: hidden_t_prev") in edges(graph, Kind.TIME)


def test_a_longer_initial_value():
    net = support.of_two_slices()
    graph = graph_of(net, {"x": (4, 2, 4), "h0": (2, 2, 4)})
    assert small_print(graph)["outer: h0"] == "[:2], 2 x 2 x 4"
    assert small_print(graph)["step: h_prev"] == "[t:t + 2]"


def test_states_that_the_gradient_operator_does_not_have():
    """The engine takes such an operator, too: the initial values then get no gradient."""
    model = support.lstm()
    (operator,) = support.operators(model.net, support.GRADIENT)
    for name in ("recurrent_states", "initial_recurrent_state_ids"):
        operator.arg.remove(support.argument(operator, name))
    del operator.output[-2:]
    graph = graph_of(model)
    assert "h0_grad" not in blobs(graph, Role.GRADIENT, "outer")
    assert set(graph.kinds) == set(Kind) - {Kind.TIME_BACK}


def check_graph(graph, net):
    """All operators and blobs of the loop's steps are there, joined as the operators say, and nothing is loose."""
    nodes = {node.key: node for node in graph.nodes}
    assert len(nodes) == len(graph.nodes)
    assert {node.cluster for node in graph.nodes} <= {cluster.key for cluster in graph.clusters}
    assert all(edge.tail in nodes and edge.head in nodes for edge in graph.edges)
    assert all(len(node.lines) == max(1, len(node.blobs)) for node in graph.nodes)
    source = read_source(net, None, Problems("test"), Problems("test"))
    for number, loop in enumerate(source.loops):
        structure = loop.structure
        assert_step_drawn(graph, "step {}".format(number), structure.operators)
        assert_step_drawn(graph, "backward {}".format(number), structure.backward.operators)
        outer = {blob for node in graph.nodes if node.cluster == "outer" for blob in node.blobs}
        assert outer.issuperset(view.outer for view in (*structure.views, *structure.backward.views))
        assert outer.issuperset(state.outer_initial for state in structure.states)
        assert outer.issuperset(output.outer for output in structure.outputs)
        gradients = [*structure.states, *structure.sequences, *structure.references]
        assert outer.issuperset(filter(None, (one.outer_gradient for one in gradients)))
        shown = {blob for node in graph.nodes for blob in node.blobs if node.role is Role.REFERENCE}
        initial = {state.outer_initial for state in structure.states}
        assert {reference.outer for reference in structure.references} <= shown | initial


def assert_step_drawn(graph, cluster, operators):
    nodes = {node.key: node for node in graph.nodes}
    drawn = [node for node in graph.nodes if node.cluster == cluster and node.role is Role.OPERATOR]
    assert [node.lines[0].text.split()[0] for node in drawn] == [operator.type for operator in operators]
    version = {}
    for node, operator in zip(drawn, operators):
        inputs = [nodes[edge.tail] for edge in graph.edges if edge.head == node.key]
        outputs = [nodes[edge.head] for edge in graph.edges if edge.tail == node.key]
        assert {blob for found in inputs for blob in found.blobs} >= set(operator.input)
        assert {blob for found in outputs for blob in found.blobs} >= set(operator.output)
        # A blob that is written anew is another node: nothing reads what is not there yet.
        for blob in operator.input:
            (found,) = [found.key for found in inputs if blob in found.blobs]
            assert version.setdefault(blob, found) == found
        version.update((blob, found.key) for found in outputs for blob in found.blobs)


@given(st.integers(0, 2**20), st.integers(1, 3), st.booleans())
@settings(max_examples=40)
def test_random_step_nets(seed, sequences, recompute):
    step_net, options = rewritten_loops.random_case(seed, sequences, recompute)
    net, _, _ = rewritten_loops.build(step_net, **options)
    check_graph(graph_of(net), net)


@pytest.mark.parametrize("optimised", [False, True], ids=["as built", "optimised"])
@pytest.mark.parametrize("cell", cells.CELLS, ids=lambda cell: cell.name)
def test_layers_of_the_registry(cell, optimised):
    model = support.built_layer(cell, optimised)
    check_graph(graph_of(model), model)


def test_the_check_finds_what_is_missing():
    model = support.lstm()
    graph = graph_of(model)
    check_graph(graph, model)
    of_steps = [edge for edge in graph.edges if re.search("(step|backward) 0 operator", edge.tail + edge.head)]
    for edge in of_steps:
        left = tuple(other for other in graph.edges if other != edge)
        with pytest.raises(AssertionError):
            check_graph(Graph(graph.title, graph.clusters, graph.nodes, left), model)
    for node in graph.nodes:
        left_nodes = tuple(other for other in graph.nodes if other != node)
        with pytest.raises(AssertionError):
            check_graph(Graph(graph.title, graph.clusters, left_nodes, graph.edges), model)


# Names


def test_short_names():
    blobs = ["a/x", "_a/x_grad_autosplit_0", "a/a/h_states", "a/", "y", "a/y", "b/z"]
    assert short_names(blobs, ["a/"], ["a/", ""]) == {
        "a/x": "x",
        "_a/x_grad_autosplit_0": "_x_grad_autosplit_0",
        "a/a/h_states": "h_states",
        "a/": "a/",
        "y": "y",
        "a/y": "a/y",
        "b/z": "b/z",
    }
    assert short_names(["a/x", "a/a/x"], ["a/"], ["a/"]) == {"a/x": "a/x", "a/a/x": "a/a/x"}


@given(st.lists(st.text("ab/_", min_size=1, max_size=8)), st.lists(st.sampled_from(["a/", "b/", "a/b/", ""])))
def test_short_names_are_different(blobs, scopes):
    found = short_names(blobs, scopes, scopes)
    assert set(found) == set(blobs)
    assert len(set(found.values())) == len(found)
    assert all(blob.endswith(name.lstrip("_")) for blob, name in found.items())


@pytest.mark.parametrize(
    "blobs, expected",
    [([], ""), (["x"], ""), (["a/x", "a/y"], "a/"), (["a/b/x", "a/c"], "a/"), (["ab/x", "ac/x"], ""), (["/x"], "")],
)
def test_common_scope(blobs, expected):
    assert common_scope(blobs) == expected


# The text

ODD = ['quo"te', "back\\slash", "\\n", "\\", "<b>", "a&b", "&amp;", "\u00fc", "a;b", "{x}", "-> y", "a, b"]


def odd_graph(name):
    nodes = (
        Node(name, "outer " + name, Role.VALUE, (Line(name, name),), (name,)),
        Node("operator", "outer " + name, Role.OPERATOR, (Line(name, ""),), ()),
    )
    edge = Edge(name, "operator", Kind.FLOW)
    return Graph(name, (Cluster("outer " + name, None, name),), nodes, (edge,))


def in_svg(graph):
    """Texts and tooltips of the picture."""
    result = subprocess.run(["dot", "-Tsvg"], input=dot_text(graph).encode(), capture_output=True)
    assert result.returncode == 0 and not result.stderr, result.stderr.decode()
    tree = xml.etree.ElementTree.fromstring(result.stdout.decode())
    texts = ["".join(element.itertext()).replace("\xa0", " ") for element in tree.iter(SVG + "text")]
    tips = [element.attrib.get(XLINK + "title") for element in tree.iter(SVG + "a")]
    return texts, tips


SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"


@pytest.mark.parametrize("name", ODD, ids=range(len(ODD)))
def test_odd_names(name):
    texts, tips = in_svg(odd_graph(name))
    # Node, small print, operator; cluster.
    assert texts.count(name) == 4
    assert tips.count(name) == 2


def test_names_of_several_lines():
    texts, _ = in_svg(odd_graph("new\nline"))
    assert texts.count("new line") == 3
    assert texts.count("new") == texts.count("line") == 1


def test_names_that_xml_cannot_hold():
    texts, _ = in_svg(odd_graph("a\x00b\x1b\ud800c"))
    assert texts.count("a\ufffdb\ufffd\ufffdc") == 4


def test_long_names_are_wrapped():
    line = "attention_weighted_encoder_context_t/previous"
    texts, tips = in_svg(odd_graph(line))
    assert "attention_weighted_|encoder_context_t/|previous" in "|".join(texts)
    assert tips.count(line) == 2
    texts, _ = in_svg(odd_graph("x" * 60))
    assert "x" * 60 in texts


def test_the_legend_says_what_there_is():
    texts, _ = in_svg(graph_of(support.lstm(**RECOMPUTED)))
    for role in Role:
        assert (role.value in texts) == (role is not Role.KEPT)
    for kind in Kind:
        assert (kind.value in texts) == (kind is not Kind.KEPT)


def test_the_two_passes_are_beside_each_other():
    graph = graph_of(support.lstm())
    plain = subprocess.run(["dot", "-Tplain"], input=dot_text(graph).encode(), capture_output=True, check=True).stdout
    places = [line.split()[1:4] for line in plain.decode().splitlines() if line.startswith("node")]
    place = {name: (float(x), float(y)) for name, x, y in places}
    at = {name: place["n{}".format(number)] for number, name in enumerate(names(graph).values())}
    across = [[x for name, (x, _) in at.items() if name.startswith(side)] for side in ("step", "backward")]
    left, right = sorted(across)
    assert max(left) < min(right)
    # Down the page and up again; what is kept at one height.
    assert at["step: FC"][1] > at["step: LSTMUnit"][1]
    assert at["backward: FCGradient"][1] > at["backward: LSTMUnitGradient"][1]
    kept = [place["n{}".format(number)][1] for number, node in enumerate(graph.nodes) if node.role is Role.KEPT]
    assert len(kept) == 2 and len(set(kept)) == 1


@given(st.integers(0, 2**20), st.integers(1, 3), st.booleans())
@settings(max_examples=10)
def test_graphviz_takes_random_step_nets(seed, sequences, recompute):
    step_net, options = rewritten_loops.random_case(seed, sequences, recompute)
    net, _, _ = rewritten_loops.build(step_net, **options)
    graph = graph_of(net)
    texts, _ = in_svg(graph)
    for node in graph.nodes:
        for line in node.lines:
            assert line.text in "".join(texts)


# Files


def scale(content):
    """Width and height of a picture on paper, in points, and how much it was made smaller."""
    tree = xml.etree.ElementTree.fromstring(content)
    width, height = (float(tree.attrib[name].replace("pt", "")) for name in ("width", "height"))
    transform = tree.find(SVG + "g").attrib["transform"]
    return width, height, float(re.search(r"scale\(([\d.]+)", transform).group(1))


A4 = (595, 842)


@pytest.mark.parametrize("gradient", [True, False], ids=["both passes", "forward only"])
def test_an_lstm_fits_a_page_and_can_be_read(tmp_path, gradient):
    model = support.lstm(gradient, dim=800, forward_only=not gradient)
    path = draw(model, str(tmp_path / "lstm.svg"), shapes={"x": (20, 32, 2), "h0": (800,), "c0": (800,)})
    width, height, smaller = scale(open(path).read())
    assert min(width, height) <= A4[0] and max(width, height) <= A4[1]
    assert SIZE * smaller > 7


def test_svg(tmp_path):
    path = tmp_path / "elman.svg"
    assert draw(support.elman(), path) == str(path)
    texts = {"".join(one.itertext()) for one in xml.etree.ElementTree.parse(str(path)).iter(SVG + "text")}
    assert texts >= {"FC", "Tanh", "TanhGradient", "h_t", "w_grad", "[t + 1]", "sum over t", "gradient"}


def test_png(tmp_path):
    path = draw(support.lstm(), tmp_path / "lstm.PNG", shapes=support.LSTM_SHAPES)
    pixels = np.round(255 * imread(path)[:, :, :3]).astype(int)
    assert 1000 < pixels.shape[1] <= 150 * 11.7
    colours = {tuple(colour) for colour in np.unique(pixels.reshape(-1, 3), axis=0)}
    for role, colour in FILL.items():
        expected = (255,) * 3 if colour == "#ffffff" else tuple(bytes.fromhex(colour[1:]))
        assert (expected in colours) == (role is not Role.COMPUTED_AGAIN), role


def test_pdf(tmp_path):
    path = draw(support.lstm(), tmp_path / "lstm.pdf")
    content = open(path, "rb").read()
    assert content.startswith(b"%PDF") and content.rstrip().endswith(b"%%EOF")
    sizes = {tuple(map(float, box.split()[2:])) for box in re.findall(rb"/MediaBox \[([^\]]*)\]", content)}
    assert all(min(size) <= A4[0] and max(size) <= A4[1] for size in sizes) and sizes


@pytest.mark.parametrize("ending", [".dot", ".gv"])
def test_text(tmp_path, ending, without_graphviz):
    model = support.lstm()
    path = draw(model, tmp_path / ("lstm" + ending))
    graph = graph_of(model)
    assert open(path).read() == dot_text(graph, LANDSCAPE)


def test_pages():
    assert likely_page(graph_of(support.lstm())) == LANDSCAPE
    assert likely_page(graph_of(support.lstm(), backward=False)) == PORTRAIT


def test_the_page_is_turned_as_the_picture_is(tmp_path):
    wide = scale(open(draw(support.lstm(), tmp_path / "wide.svg")).read())
    tall = scale(open(draw(support.lstm(forward_only=True, gradient=False), tmp_path / "tall.svg")).read())
    assert wide[0] > wide[1] and tall[0] < tall[1]


def test_without_the_backward_step(tmp_path):
    path = draw(support.lstm(), tmp_path / "forward.dot", backward=False)
    assert "LSTMUnitGradient" not in open(path).read()


def layers():
    model = ModelHelper("model")
    outputs = LSTM(model, "x", None, None, 2, [3, 3], "lstm")
    return model, [operator.output[0] for operator in support.operators(model.net)], outputs


@pytest.mark.parametrize("number", [0, 1])
def test_one_loop(tmp_path, number):
    model, first_outputs, _ = layers()
    alone = open(draw(model, tmp_path / "one.dot", loop=number)).read()
    assert alone == open(draw(model, tmp_path / "same.dot", loop=first_outputs[number])).read()
    assert "lstm/layer_{}/gates_t".format(number) in alone
    assert "lstm/layer_{}/gates_t".format(1 - number) not in alone


def test_a_loop_by_a_blob(tmp_path):
    model, _, outputs = layers()
    found = open(draw(model, tmp_path / "one.dot", loop=outputs[2])).read()
    assert found == open(draw(model, tmp_path / "same.dot", loop=1)).read()


def test_all_loops(tmp_path):
    model, _, _ = layers()
    text = open(draw(model, tmp_path / "all.dot")).read()
    assert "lstm/layer_0/gates_t" in text and "lstm/layer_1/gates_t" in text


@pytest.mark.parametrize("kind", [support.LOOP, support.GRADIENT])
def test_an_operator_alone(tmp_path, kind):
    (operator,) = support.operators(support.lstm().net, kind)
    assert "operator {}".format(kind) in open(draw(operator, tmp_path / "operator.dot")).read()


def test_a_net_read_from_a_file_and_optimised(tmp_path):
    model = support.lstm()
    optimize(model, even_if_slower=True, shapes=support.LSTM_SHAPES)
    proto = caffe2_pb2.NetDef.FromString(model.net.Proto().SerializeToString())
    found = [open(draw(net, tmp_path / "net.dot")).read() for net in (model.net, proto)]
    assert found[0] == found[1] and "ATen" in found[0]


# What is wrong with a call, and files that stay as they were


@pytest.fixture
def without_graphviz(monkeypatch):
    """As if the package were not installed; the program is none of its own."""
    monkeypatch.setitem(sys.modules, "graphviz", None)


@pytest.fixture
def without_dot(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def refused(error, folder, net=None, **options):
    """The text of the error; the files of a folder are as they were."""
    before = {path: path.read_text() for path in folder.iterdir()}
    with pytest.raises(error) as caught:
        draw(net or support.elman(), **options)
    assert type(caught.value) is error
    assert {path: path.read_text() for path in folder.iterdir()} == before
    return str(caught.value)


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_the_package_is_missing(tmp_path, ending, without_graphviz):
    (tmp_path / ("old" + ending)).write_text("old")
    assert refused(ImportError, tmp_path, path=tmp_path / ("old" + ending)) == (
        "draw needs the package graphviz for {}: pip install 'caffe2_recurrent[draw]'; a path that ends in .dot or .gv "
        "is written without it".format(ending)
    )


def test_the_program_is_missing(tmp_path, without_dot):
    (tmp_path / "old.svg").write_text("old")
    assert refused(RuntimeError, tmp_path, path=tmp_path / "old.svg") == (
        "draw needs graphviz's program dot for .svg, and it is not on the PATH: apt install graphviz, or "
        "https://graphviz.org/download; a path that ends in .dot or .gv is written without it"
    )
    assert draw(support.elman(), tmp_path / "new.gv") == str(tmp_path / "new.gv")


@pytest.mark.parametrize("name", ["picture", "picture.jpg", ".svg", "svg", ""])
def test_an_ending_that_says_nothing(tmp_path, name):
    path = name and str(tmp_path / name)
    assert refused(ValueError, tmp_path, path=path) == (
        "draw: path must end in .svg, .png, .pdf, .dot or .gv; got '{}'".format(path)
    )


@pytest.mark.parametrize("loop", [2, -1, "gates", "lstm/layer_1/gates_t"], ids=repr)
def test_a_loop_that_is_not_there(tmp_path, loop):
    model, _, _ = layers()
    shown = loop if isinstance(loop, int) else "with the output '{}'".format(loop)
    assert refused(ValueError, tmp_path, model, path=tmp_path / "net.dot", loop=loop) == (
        "draw: net '{}' has no loop {}; it has 0 ('lstm/layer_0/hidden_t_all'), 1 ('lstm/layer_1/hidden_t_all')".format(
            model.net.Name(), shown
        )
    )


def test_all_wrong_types(tmp_path):
    text = refused(TypeError, tmp_path, "net", path=3, loop=1.5, shapes=[], backward="no")
    assert text == listed(
        "draw",
        "path must be a string or a pathlib.Path; got 3 of type int",
        "backward must be True or False; got 'no' of type str",
        "loop must be a position, an output of the loop, or None; got 1.5 of type float",
        "net_or_op must be a ModelHelper, a core.Net, a NetDef or an OperatorDef; got 'net' of type str",
        "shapes must map blobs to their dimensions, like {'x': (20, 128, 40)}; got [] of type list",
    )
    assert "got True of type bool" in refused(TypeError, tmp_path, path="x.dot", loop=True)
    assert "got b'x.dot' of type bytes" in refused(TypeError, tmp_path, path=b"x.dot")


def test_all_wrong_values(tmp_path):
    text = refused(ValueError, tmp_path, path="x.txt", loop=7, shapes={"y": (3,)})
    assert re.sub("net '[^']*'", "net 'N'", text) == listed(
        "draw",
        "path must end in .svg, .png, .pdf, .dot or .gv; got 'x.txt'",
        "shapes has 'y', which no operator reads or writes; the net reads 'x', 'h0', 'w', 'b'",
        "net 'N' has no loop 7; it has 0 ('h_t_all')",
    )


def test_a_net_without_a_loop(tmp_path):
    assert refused(ValueError, tmp_path, core.Net("empty"), path=tmp_path / "net.svg", loop=3).endswith(
        "has no RecurrentNetwork operator; it has no operators"
    )


def test_a_folder_that_is_not_there(tmp_path):
    assert "nowhere" in refused(FileNotFoundError, tmp_path, path=tmp_path / "nowhere" / "net.dot")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.dot"
    draw(support.lstm(), path)
    before = path.read_text()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    assert refused(OSError, tmp_path, path=path) == "disk full"
    assert path.read_text() == before


def test_the_pictures_of_the_documents(tmp_path):
    """They are what `scripts/draw_docs.py` draws now; fonts, and so places, may differ from machine to machine."""
    script = str(ROOT / "scripts" / "draw_docs.py")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, script, str(tmp_path)], check=True, env=environment)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (ROOT / "docs" / "pictures").iterdir())
    for name in drawn:
        ours, theirs = (
            xml.etree.ElementTree.parse(str(folder / name)) for folder in (ROOT / "docs/pictures", tmp_path)
        )
        assert sorted(t.text for t in ours.iter(SVG + "text")) == sorted(t.text for t in theirs.iter(SVG + "text"))
