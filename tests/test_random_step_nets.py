"""Properties of `recurrent_net` over random step nets."""

import random

import pytest
from caffe2.python import core, recurrent, workspace
from hypothesis import given
from hypothesis import strategies as st

import comparing
import random_step_nets
from caffe2_recurrent import recurrent_net

seeds = st.integers(0, 2**32 - 1)


def drawn_options(seed, step_net):
    draw = random.Random(seed)
    outputs = range(2 * len(step_net.initial))
    options = {"outputs_with_grads": sorted(draw.sample(outputs, draw.randint(1, len(outputs))))}
    if draw.random() < 0.3:
        options["outputs_with_grads"] = "auto"
    if draw.random() < 0.5:
        options["recompute_blobs_on_backward"] = random_step_nets.recomputable(step_net, draw)
    return options


@given(seeds, st.integers(1, 3), st.booleans(), st.booleans())
def test_values_and_gradients_are_those_of_a_numpy_loop(seed, sequences, executor, names_again):
    workspace.ResetWorkspace()
    step_net = random_step_nets.step_net(seed, sequences, names_again=names_again)
    comparing.assert_right(recurrent_net, step_net, executor=executor, **drawn_options(seed, step_net))


def builders_agree(seed, executor=False):
    """Whether Caffe2's builder makes the same operator; where it does not, its gradients must be wrong."""
    workspace.ResetWorkspace()
    step_net = random_step_nets.step_net(seed)
    options = drawn_options(seed, step_net)
    # Every output has a gradient: a wrong link must show, and not only pass on zeros.
    options["outputs_with_grads"] = range(2 * len(step_net.initial))
    # What nothing reads may make steps race, which no comparison of values can show for sure; see test_recurrent_net.
    read = {blob for operator in step_net.cell.Proto().op for blob in operator.input}
    recomputed = options.get("recompute_blobs_on_backward", ())
    options["recompute_blobs_on_backward"] = [blob for blob in recomputed if blob in read]
    ours, _ = comparing.build(recurrent_net, step_net, scope="loop", **options)
    theirs = core.Net(ours.Name())
    try:
        comparing.build(recurrent.recurrent_net, step_net, theirs, scope="loop", **options)
    except (IndexError, KeyError, RuntimeError):
        return False
    if comparing.differences(ours.Proto().op[0], theirs.Proto().op[0]) == []:
        return True
    with pytest.raises(Exception):  # noqa: B017 - an engine error or a wrong gradient
        comparing.assert_right(recurrent.recurrent_net, step_net, executor=executor, scope="loop", **options)
    return False


@given(seeds)
def test_the_operator_is_caffe2s_or_caffe2s_is_wrong(seed):
    builders_agree(seed)


def test_random_step_nets_show_both_sides():
    """The property above would say little if all nets, or none, were the same as Caffe2's."""
    agreed = sum(builders_agree(seed) for seed in range(60))
    assert 10 <= agreed <= 50
