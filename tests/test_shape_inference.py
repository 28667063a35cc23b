"""`shape_inference`: what is known of blobs behind operators, beside what a run of these makes."""

import numpy as np
import pytest
from caffe2.python import core, workspace

import rewriting_support as support
from caffe2_recurrent import LSTM, optimize
from caffe2_recurrent.loops.shape_inference import Inference
from caffe2_recurrent.loops.sizes import Sizes, find_sizes
from caffe2_recurrent.rewriting.products.step_products import weights_shape
from caffe2_recurrent.rewriting.trials.trial import lone_loop
from step_nets import N, T

X = (T, N, 4)
made = core.CreateOperator


def follow(operators, **given):
    inference = Inference(given or {"x": X})
    inference.follow(operators)
    return inference


def one_by_batch(kind="ConstantFill", **arguments):
    """What is `[1, N, ...]`, with N from `x`."""
    return [
        made("GivenTensorInt64Fill", [], ["one"], shape=[1], values=[1]),
        made("Shape", ["x"], ["batch"], axes=[1]),
        made("Concat", ["one", "batch"], ["shape", "widths"], axis=0),
        made(kind, ["shape"], ["y"], input_as_shape=1, **arguments),
    ]


WHOLE_SHAPE = [made("Shape", ["x"], ["shape"]), made("ConstantFill", ["shape"], ["y"], input_as_shape=1)]
TWICE = [
    made("Transpose", ["x"], ["turned"], axes=[1, 0, 2]),
    made("Shape", ["turned"], ["shape"], axes=[0, 2]),
    made("ConstantFill", ["shape"], ["z"], input_as_shape=1, value=2.0),
    made("Tanh", ["z"], ["y"]),
]
LIKE_ITS_INPUT = [made("ConstantFill", ["x"], ["y"], value=2.0)]
FILLS = [
    one_by_batch(),
    one_by_batch(extra_shape=[5, 2]),
    one_by_batch("UniformFill"),
    WHOLE_SHAPE,
    TWICE,
    LIKE_ITS_INPUT,
]


@pytest.mark.parametrize("operators", FILLS, ids=lambda operators: operators[-1].type + str(len(operators)))
def test_fills_are_as_large_as_they_are_in_a_run(operators):
    found = follow(operators)
    workspace.FeedBlob("x", np.ones(X, np.float32))
    workspace.RunOperatorsOnce(operators)
    assert found.shapes["y"] == workspace.FetchBlob("y").shape
    held = {blob: list(content) for blob, content in found.contents.items()}
    assert held == {blob: list(workspace.FetchBlob(blob)) for blob in held}
    assert ("shape" in held) is (operators is not LIKE_ITS_INPUT)


@pytest.mark.parametrize("operators", FILLS, ids=lambda operators: operators[-1].type + str(len(operators)))
def test_of_weights_only_the_operators_are_followed_that_make_them(operators, monkeypatch):
    last = operators[-1].output[0]
    # In the end the blob itself is written to as well, and before that read.
    others = [made("Copy", ["x"], ["copied"]), made("Copy", [last], ["later"]), made("Tanh", [last], [last])]
    loop, sizes, followed = lone_loop(["x"]), Sizes({"x": X}), []
    loop.before = [others[0], *operators, *others[1:]]
    expected = follow(loop.before).shapes
    for blob in expected.keys() | {"nobody_makes_it"}:
        assert weights_shape(loop, blob, sizes) == expected.get(blob), blob
    monkeypatch.setattr(Inference, "follow", lambda self, given: followed.extend(given))
    weights_shape(loop, last, sizes)
    assert followed == [*operators, others[-1]]


@pytest.mark.parametrize(
    "operators",
    [
        [made("Cast", ["numbers"], ["shape"], to=core.DataType.INT64), *one_by_batch()[-1:]],
        [made("Shape", ["unknown"], ["shape"]), *one_by_batch()[-1:]],
        [made("Shape", ["x"], ["shape"], axes=[3]), *one_by_batch()[-1:]],
        [*one_by_batch()[:-1], made("Copy", ["numbers"], ["shape"]), *one_by_batch()[-1:]],
        [made("Transpose", ["x"], ["y"], axes=[1, 0])],
        [made("Transpose", ["x"], ["y"], axes=[1, 0, 3])],
    ],
    ids=["no shape", "unknown", "no such axis", "overwritten", "fewer axes", "another axis"],
)
def test_what_is_not_known(operators):
    assert "y" not in follow(operators, x=X, numbers=(2,)).shapes


def test_what_an_operator_overwrites_is_not_known_any_more():
    """Unless somebody has said what it is."""
    operators = [made("Copy", ["x"], ["y"]), made("ATen", ["x"], ["y"], operator="squeeze")]
    assert follow(operators[:1]).shapes["y"] == X
    assert "y" not in follow(operators).shapes
    assert follow(operators[1:], x=X, y=(2, 3)).shapes["y"] == (2, 3)


def test_a_scalar():
    assert follow([made("Shape", ["x"], ["y"])], x=()).contents["y"] == ()


@pytest.mark.parametrize("in_workspace", [True, False])
def test_initial_states_that_the_net_fills(in_workspace):
    """As large as the batch; a run has left those of another one."""
    model = support.ModelHelper("filled")
    for operator in one_by_batch(extra_shape=[support.D]):
        model.net.Proto().op.append(operator)
    LSTM(model, "x", None, ("y", "y"), support.DIM_IN, support.D, "layer", forward_only=True)
    workspace.FeedBlob("x", np.ones((support.T, support.N, support.DIM_IN), np.float32))
    workspace.RunNetOnce(model.param_init_net)
    if in_workspace:
        workspace.FeedBlob("y", np.ones((1, support.N + 1, support.D), np.float32))
    assert find_sizes(model.net.Proto(), None, {}).shape("y") == (1, support.N, support.D)
    report = optimize(model, dry_run=True)
    assert "give shapes" not in str(report)


def test_what_a_net_changes_in_its_place():
    """A blob that it is fed, in another shape behind that."""
    model = support.ModelHelper("in_place")
    shape = [support.T, support.N, support.DIM_IN]
    x, _ = model.net.Reshape("x", ["x", "old_shape"], shape=shape)
    LSTM(model, x, None, None, support.DIM_IN, support.D, "layer", forward_only=True)
    workspace.FeedBlob("x", np.ones((support.T * support.N, support.DIM_IN), np.float32))
    assert find_sizes(model.net.Proto(), None, {}).shape("x") == tuple(shape)
