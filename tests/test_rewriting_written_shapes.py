"""Steps that write a state as `[N, D]`, which the engine shows as `[1, N, D]`, to the same step's backward pass too."""

import numpy as np
import pytest
from caffe2.python import core, workspace

import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.loops.parts import RowBiases, Unrolled
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.rewriting import memory_names
from caffe2_recurrent.rewriting.steps import step_shapes
from test_rewriting_rules import loop_of

T, N, D = 4, 5, 6
RULE = "parameter_gradients"
SHAPES = {"x": (T, N, D), "h0": (N, D), "w": (D, D), "b": (D,), "v": (D, D), "c": (D,)}


def squeezed_first(cell, summed):
    """h = tanh of `[N, D]`, of a sum `[1, N, D]`."""
    return cell.Tanh(cell.Squeeze(summed, "flat", dims=[0]), "h_t")


def squeezed_last(cell, summed):
    return cell.Squeeze(cell.Tanh(summed, "tanh"), "h_t", dims=[0])


def reshaped(cell, summed):
    """Its gradient goes back to the shape that there was."""
    return cell.Reshape(cell.Tanh(summed, "tanh"), ["h_t", "old_shape"], shape=[-1, D])[0]


def softsign(cell, summed):
    """Whose gradient Caffe2 takes to be shaped like the sum."""
    return cell.Squeeze(cell.Softsign(summed, "softsign"), "h_t", dims=[0])


def built(gradients=True, state=squeezed_first):
    random = np.random.RandomState(0)
    for blob, shape in SHAPES.items():
        workspace.FeedBlob(blob, random.uniform(-0.4, 0.4, shape).astype(np.float32))
    step = core.Net("step")
    x, h, w, b, v, c = step.AddExternalInputs("x_t", "h_prev", "w", "b", "v", "c")
    summed = step.Sum([step.FC([x, w, b], "of_x", axis=2), step.FC([h, v, c], "of_h", axis=2)], "summed")
    out = state(step, summed)
    step.AddExternalOutput(out)
    net = core.Net("net")
    options = {"outputs_with_grads": "auto"} if gradients else {"forward_only": True}
    hidden, _ = recurrent_net(net, step, [(x, "x")], [(h, "h0")], {h: out}, scope="loop", **options)
    if not gradients:
        return net, [hidden]
    found = net.AddGradientOperators([net.SumElements(net.Sqr(hidden, "squared"), "loss")])
    return net, [hidden, *(found[blob] for blob in SHAPES)]


def run(net, blobs):
    workspace.RunNetOnce(net)
    found, _ = support.values(blobs)
    return found


@pytest.mark.parametrize("trials", [False, True])
@pytest.mark.parametrize("without", [[], ["packed_products"], ["parameter_gradients"]], ids=str)
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("state", [squeezed_first, squeezed_last, reshaped, softsign], ids=lambda state: state.__name__)
def test_values_and_gradients(state, gradients, without, trials, unrolled_steps):
    expected = run(*built(gradients, state))
    net, blobs = built(gradients, state)
    optimize(net, even_if_slower=True, without=without, trials=trials)
    for found, right in zip(run(net, blobs), expected):
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, atol=2e-5)


@pytest.mark.parametrize("state", [squeezed_first, squeezed_last], ids=lambda state: state.__name__)
def test_the_gradient_of_a_product_has_another_shape_then(state):
    net, _ = built(state=state)
    loop = loop_of(net)
    sizes = find_sizes(net.Proto(), None, SHAPES)
    assert step_shapes.other_shapes(loop, sizes) == {"h_t"}
    shapes = step_shapes.shapes_before(loop, sizes, loop.gradient.operators, len(loop.gradient.operators))
    assert shapes["h_t"] == (1, N, D) and shapes["summed_grad"] == (1, 1, N, D)
    assert step_shapes.shapes_written(loop, sizes)["h_t"] == (N, D)


def test_it_has_not_where_the_gradient_goes_back_to_the_shape_that_there_was():
    net, _ = built(state=reshaped)
    assert optimize(net, [RULE], even_if_slower=True).counts == {RULE: 2}


@pytest.mark.parametrize("state", [squeezed_first, squeezed_last], ids=lambda state: state.__name__)
def test_parameter_gradients_are_refused(state):
    net, _ = built(state=state)
    report = optimize(net, [RULE], even_if_slower=True)
    reason = "'summed_grad' (1, 1, 5, 6) has not one row for each sequence: steps write 'h_t' in another shape than"
    assert [found.reason for found in report.refusals] == [reason + " its slice has"] * 2


def test_parameter_gradients_are_refused_where_a_gradient_is_of_unknown_shape():
    """Caffe2 infers nothing of ClipGradient."""
    net, _ = built(state=lambda cell, summed: cell.Squeeze(cell.Clip(summed, "clipped"), "h_t", dims=[0]))
    report = optimize(net, [RULE], even_if_slower=True)
    reason = "the shape of 'summed_grad' is not known, and steps write 'h_t' in another shape than its slice has"
    assert [found.reason for found in report.refusals] == [reason] * 2


def test_names_of_slices_in_steps_that_are_written_out_follow_when_blobs_are_renamed():
    """Which have been found before."""
    net, _ = built(gradients=False)
    loop = loop_of(net)
    loop.unrolled = Unrolled(T, "condition", {}, frozenset(["h_t"]), RowBiases({}, {}), {})
    loop.original = loop.original._replace(linked=frozenset())
    memory_names.set_apart(loop)
    assert loop.unrolled.shapeless == {"h_t_linked"} and "h_t_linked" in {link.inner for link in loop.links}
