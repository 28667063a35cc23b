"""Products that keep filters refuse rows of another width than they have memory for, and go on with right ones."""

import numpy as np
import pytest
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

import onednn_support
from caffe2_recurrent import GRU, LSTM, MILSTM, LSTMWithAttention, optimize, recurrent_net
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.products import row_widths
from caffe2_recurrent.rewriting.products.kept_filters import KEPT_FILTERS
from caffe2_recurrent.rewriting.products.row_widths import Width
from caffe2_recurrent.rewriting.rules import packed_products
from caffe2_recurrent.rewriting.steps import step_counts
from test_rewriting_kept_filters import ALL, IS_RIGHT, inner_nets, kept_filters

STEPS, BATCH, DIM_IN, DIM = 3, 2, 3, 4
OTHERS = pytest.mark.parametrize("more", [-1, 1, 400], ids=["narrower", "wider", "in other memory"])


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Products keep filters wherever they may; backward passes are loops, of however few steps."""
    onednn_support.force(monkeypatch, KEPT_FILTERS)
    onednn_support.promise_constant_threads(monkeypatch)
    monkeypatch.setattr(
        packed_products, "_fastest", lambda *given: KEPT_FILTERS if KEPT_FILTERS in given[4] else given[4][0]
    )
    monkeypatch.setattr(step_counts, "few", lambda *_: 0)


def lstm(model, builder=LSTM, **options):
    states = [model.net.AddExternalInput(name) for name in ("h0", "c0")]
    return builder(model, "x", None, states, DIM_IN, DIM, "layer", **options)


def milstm(model, **options):
    return lstm(model, MILSTM, **options)


def gru(model, **options):
    return GRU(model, "x", None, [model.net.AddExternalInput("h0")], DIM_IN, DIM, "layer", **options)


def with_attention(model, **options):
    states = [model.net.AddExternalInput(name) for name in ("h0", "c0", "context")]
    return LSTMWithAttention(
        model,
        decoder_inputs=model.net.AddExternalInput("x"),
        decoder_input_lengths=None,
        initial_decoder_hidden_state=states[0],
        initial_decoder_cell_state=states[1],
        initial_attention_weighted_encoder_context=states[2],
        encoder_output_dim=DIM,
        encoder_outputs=model.net.AddExternalInput("encoder"),
        encoder_lengths=None,
        decoder_input_dim=DIM_IN,
        decoder_state_dim=DIM,
        scope="layer",
        **options,
    )


SHAPES = {
    "x": (STEPS, BATCH, DIM_IN),
    "h0": (1, BATCH, DIM),
    "c0": (1, BATCH, DIM),
    "context": (BATCH, DIM),
    "encoder": (STEPS, BATCH, DIM),
    "dh": (STEPS, BATCH, DIM),
}


def feed(blob, more=0):
    *leading, last = SHAPES[blob]
    random = np.random.RandomState(len(blob))
    workspace.FeedBlob(blob, random.uniform(-1, 1, (*leading, last + more)).astype(np.float32))


def optimised(build, trained=False, rules=ALL):
    """The net, its first output, and what that is."""
    model = ModelHelper("model")
    for blob in SHAPES:
        feed(blob)
    result = str(build(model, forward_only=not trained)[0])
    if trained:
        model.net.AddGradientOperators({result: model.net.AddExternalInput("dh")})
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    expected = workspace.FetchBlob(result)
    optimize(model, rules, even_if_slower=True)
    steps = [inner for (_, name), inner in inner_nets(model.net) if name == "step_net"]
    assert any(kept_filters.are_in(step.op) for step in steps) == IS_RIGHT
    workspace.CreateNet(model.net, overwrite=True)
    return model.net, result, expected


def assert_refused(of_net, blob, more):
    """With so many columns more `blob` is, and the net gives what it gave, before and after that."""
    net, result, expected = of_net
    for is_wrong in (False, True, False, True, False):
        feed(blob, more if is_wrong else 0)
        if is_wrong:
            with pytest.raises(RuntimeError):
                workspace.RunNet(net)
        else:
            workspace.RunNet(net)
            np.testing.assert_allclose(workspace.FetchBlob(result), expected, atol=1e-5)


FORWARD = [(lstm, "x"), (lstm, "h0"), (milstm, "h0"), (gru, "h0"), (with_attention, "x"), (with_attention, "context")]


@OTHERS
@pytest.mark.usefixtures("backward_loops")
@pytest.mark.parametrize(
    "build, blob, trained",
    [*((build, blob, False) for build, blob in FORWARD), (lstm, "x", True), (milstm, "h0", True), (gru, "h0", True)],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_another_width_is_refused_and_leaves_nothing_behind(build, blob, trained, more):
    assert_refused(optimised(build, trained), blob, more)


@pytest.mark.parametrize("blob, size", [("x", DIM_IN), ("h0", DIM)])
def test_it_says_whose_width_it_is(blob, size):
    net, *_ = optimised(lstm)
    feed(blob, 1)
    said = "the last dimension of '{}' is not {}, for which the net has been optimised".format(blob, size)
    with pytest.raises(RuntimeError, match=said if IS_RIGHT else ""):
        workspace.RunNet(net)


def test_widths_that_make_up_for_each_other_are_refused():
    net, *_ = optimised(lstm)
    feed("x", 1)
    feed("h0", -1)
    with pytest.raises(RuntimeError):
        workspace.RunNet(net)


def test_other_numbers_of_steps_make_nothing_anew():
    """What tells that memory is to be made for others knows nothing of them."""
    net, *_ = optimised(lstm)
    workspace.RunNet(net)
    seen = [str(blob) for blob in workspace.Blobs() if str(blob).endswith("_rows_seen")]
    before = [workspace.FetchBlob(blob) for blob in seen]
    workspace.FeedBlob("x", np.ones((STEPS + 2, BATCH, DIM_IN), np.float32))
    workspace.RunNet(net)
    assert all(map(np.array_equal, map(workspace.FetchBlob, seen), before)) and bool(seen) == IS_RIGHT


def test_without_the_check_they_would_be_taken(monkeypatch):
    """What the tests above find is not there otherwise."""
    monkeypatch.setattr(row_widths, "check", lambda *_: None)
    net, result, expected = optimised(lstm)
    # Narrower, so that what is read is there.
    feed("x", -1)
    if IS_RIGHT:
        workspace.RunNet(net)
        assert workspace.FetchBlob(result).shape == expected.shape


# ---------------------------------------------------------------------------------------------------------- in the step


def add_loop(model, step, forward_only):
    """A loop with a sequence `x`, of which `x_t` are slices, and a state `h` from `h0`."""
    model.net.AddExternalInput("x", "h0")
    step_of = {"cell_net": step, "inputs": [("x_t", "x")], "timestep": "timestep", "forward_only": forward_only}
    return recurrent_net(model.net, initial_cell_inputs=[("h_prev", "h0")], links={"h_prev": "h_t"}, **step_of)


def computing(kind):
    """A loop whose step computes the rows of its product, by such an operator."""

    def build(model, forward_only):
        for name, shape in (("w", (DIM, DIM_IN)), ("b", (DIM,))):
            model.net.AddExternalInput(name)
            workspace.FeedBlob(name, np.random.RandomState(7).uniform(-1, 1, shape).astype(np.float32))
        step = core.Net("step")
        x, previous = step.AddExternalInput("x_t", "h_prev")
        step.AddExternalInput("w", "b", "timestep")
        x = step.Tanh([x], "computed") if kind == "Tanh" else step.Softmax([x], "computed", axis=2)
        product = step.FC([x, "w", "b"], "product", axis=2)
        step.Sum([product, previous], "h_t")
        return add_loop(model, step, forward_only)

    return build


def in_steps(net):
    steps = [inner for (_, name), inner in inner_nets(net) if name == "step_net"]
    return [operator for step in steps for operator in step.op if operator.type == "Reshape"]


@OTHERS
@pytest.mark.parametrize("kind", ["Tanh", "Softmax"])
def test_rows_that_the_step_computes(kind, more):
    """By element they are as wide as what they are computed of; others the step looks at itself."""
    # Not made once for all steps, and then slices.
    of_net = optimised(computing(kind), rules=["packed_products"])
    assert bool(in_steps(of_net[0])) == (kind == "Softmax" and IS_RIGHT)
    assert_refused(of_net, "x", more)


# --------------------------------------------------------------------------------------------------------------- widths


def loop_of(*operators, before=()):
    """A loop whose step has such operators, and others in front of it."""
    model = ModelHelper("model")
    step = core.Net("step")
    x, previous, _ = step.AddExternalInput("x_t", "h_prev", "timestep")
    step.Sum([x, previous], "h_t")
    add_loop(model, step, True)
    (loop,) = read_loops(model.net.Proto()).values()
    loop.operators[:] = [core.CreateOperator(*given, **arguments) for *given, arguments in operators]
    loop.before[:] = before
    return loop


ONES = core.CreateOperator("ConstantFill", [], ["ones"], shape=[1, BATCH, 1], value=1.0)
AXIS = {"axis": 2}
SUM = ("Add", ["x_t", "h_prev"], ["r"], {})


@pytest.mark.parametrize(
    "operators, width, expected",
    [
        ([("Copy", ["x_t"], ["r"], {})], 5, (("x", 5, True),)),
        ([("Concat", ["x_t", "h_prev", "ones"], ["r", "sizes"], AXIS)], 11, (("x", 5, True), ("h0", 5), ("ones", 1))),
        (
            [
                ("Concat", ["x_t", "h_prev"], ["q", "sizes"], AXIS),
                ("Concat", ["q", "x_t"], ["r", "other sizes"], AXIS),
            ],
            15,
            (("x", 5, True), ("h0", 5), ("x", 5, True)),
        ),
        ([SUM], 5, (("x", 5, True),)),
        ([("Exp", ["x_t"], ["e"], {}), ("Mul", ["e", "h_prev"], ["r"], {})], 5, (("h0", 5),)),
        # The wider one is computed, and not known.
        ([("Exp", ["x_t"], ["e"], {}), ("Mul", ["ones", "e"], ["r"], {})], 5, None),
        ([("Mul", ["ones", "ones"], ["r"], {})], 1, None),
        ([("Exp", ["x_t"], ["r"], {})], 5, None),
        ([("Exp", ["x_t"], ["e"], {}), ("Concat", ["e", "h_prev"], ["r", "sizes"], AXIS)], 10, None),
        ([("Concat", ["x_t", "h_prev"], ["r", "sizes"], {"axis": 1})], 5, None),
        ([SUM, ("Add", ["r", "h_prev"], ["r"], {})], 5, (("x", 5, True),)),
        ([("Tanh", ["x_t"], ["x_t"], {}), ("Copy", ["x_t"], ["r"], {})], 5, (("x", 5, True),)),
        ([SUM, ("Exp", ["r"], ["r"], {})], 5, None),
        ([("Copy", ["a parameter"], ["r"], {})], 5, None),
        # Not what the weights want.
        ([SUM], 6, None),
    ],
)
def test_what_is_behind_rows(operators, width, expected):
    loop = loop_of(*operators, ("FC", ["r", "w", "b"], ["y"], AXIS), before=[ONES])
    sizes = Sizes({"x": (3, BATCH, 5), "h0": (BATCH, 5), "a parameter": (5,)})
    found = row_widths.of_rows(loop, loop.operators[-1], "r", width, sizes)
    assert found == (None if expected is None else tuple(Width(*given) for given in expected))


def test_what_is_written_behind_the_product_does_not_count():
    loop = loop_of(SUM, ("FC", ["r", "w", "b"], ["y"], AXIS), ("Exp", ["y"], ["r"], {}))
    sizes = Sizes({"x": (3, BATCH, 5), "h0": (BATCH, 5)})
    assert row_widths.of_rows(loop, loop.operators[1], "r", 5, sizes) == (Width("x", 5, True),)


def test_each_operator_is_looked_at_once():
    """Otherwise this would not end."""
    doubling = [("Add", ["r", "r"], ["r"], {})] * 100
    loop = loop_of(("Copy", ["x_t"], ["r"], {}), *doubling, ("FC", ["r", "w", "b"], ["y"], AXIS))
    found = row_widths.of_rows(loop, loop.operators[-1], "r", 5, Sizes({"x": (3, BATCH, 5)}))
    assert found == (Width("x", 5, True),)


def test_sizes_that_are_not_known():
    loop = loop_of(SUM, ("FC", ["r", "w", "b"], ["y"], AXIS))
    assert row_widths.of_rows(loop, loop.operators[-1], "r", 5, Sizes({})) is None


def test_backward_steps_are_not_asked():
    loop = loop_of(SUM)
    assert row_widths.of_rows(loop, core.CreateOperator("FC", ["r", "w", "b"], ["y"]), "r", 5, Sizes({})) == ()
