"""Loops of parts with convolutions of the CPU: values, gradients, and that they share nothing with other ones."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import in_parts
import rewriting_support as support
from caffe2_recurrent import optimize, prediction_net
from caffe2_recurrent.loops.reading import made_in_a_run, outer_blobs, workspaces_of
from caffe2_recurrent.operator_arguments import nets_of
from caffe2_recurrent.operators import opened
from caffe2_recurrent.rewriting import calling_thread
from caffe2_recurrent.rewriting.batch_parts import own_buffers, side_by_side
from caffe2_recurrent.rewriting.engine_blobs import CONVOLUTION_BUFFERS
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from cells import CELLS
from every_pair import every_pair
from in_parts import EVERY_NUMBER, parted
from onednn_support import force
from test_random_step_nets import seeds
from test_rewriting_onednn import CHOSEN, PRODUCTS

# Its loops are created as they first run: `flag` says whether they have the executor.
pytestmark = pytest.mark.usefixtures("nnpack_products", "every_size", "executor_in_created_nets")

BUFFER, LOCK = CONVOLUTION_BUFFERS


@pytest.fixture(autouse=True)
def flag():
    workspace.GlobalInit(["tests", calling_thread.FLAG, "--caffe2_rnn_executor=0"])
    yield
    workspace.GlobalInit(["tests", calling_thread.FLAG[:-1] + "0"])


@pytest.fixture(autouse=True)
def by_nnpack(monkeypatch):
    """Products of steps are NNPACK's, whatever is faster."""
    force(monkeypatch, NNPACK)


def scopes(model):
    """The names of the scopes that loops of it run in."""
    return {operator.output[-1] for operator in opened(model.net.Proto().op, with_steps=False) if operator.type == "Do"}


# Values and gradients.


@every_pair
@EVERY_NUMBER
@support.EVERY_LSTM
@CHOSEN
def test_values_and_gradients_stay(options, parts, rules):
    model = in_parts.assert_right(parts, rules, **options)
    assert len(scopes(model)) == parts


@pytest.mark.usefixtures("backward_loops")
def test_a_backward_loop_has_a_scope_too():
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    model, blobs = parted(rules=[*PRODUCTS, "backward_loop"])
    assert len(scopes(model)) == 4
    support.assert_same(support.run(model, blobs), expected)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell):
    in_parts.assert_right_cell(cell)


@settings(max_examples=30)
@given(seeds, st.integers(1, 3))
def test_random_step_nets(seed, sequences):
    in_parts.assert_right_step_net(seed, sequences)


@settings(max_examples=12)
@given(st.data())
def test_random_sizes_lengths_and_options_of_cells(data):
    in_parts.assert_right_drawn_cell(data)


@EVERY_NUMBER
@support.EVERY_LSTM
def test_runs_of_other_sizes(options, parts):
    in_parts.assert_right_in_other_sizes(parts, **options)


# What is their own.


@pytest.mark.parametrize("options", [{}, {"gradients": False, "forward_only": True}], ids=["trained", "forward"])
def test_buffer_and_lock_of_the_workspace_stay_what_they_are(options):
    model, blobs = parted(rules=PRODUCTS, **options)
    workspace.FeedBlob(BUFFER, np.full(2, 3.0, dtype=np.float32))
    workspace.FeedBlob(LOCK, np.full(3, 5.0, dtype=np.float32))
    support.run(model, blobs)
    assert workspace.FetchBlob(BUFFER).tolist() == [3.0, 3.0]
    # Where a convolution takes a lock that is there, it makes it anew: then this is no tensor.
    np.testing.assert_array_equal(workspace.FetchBlob(LOCK), np.full(3, 5.0))


def test_a_lock_that_is_taken_is_seen(monkeypatch):
    monkeypatch.setattr(own_buffers, "with_own_buffers", list)
    # One part after the other: at the same time they would use one buffer, which may end the process.
    monkeypatch.setattr(side_by_side, "TYPE", "simple")
    with pytest.raises(AssertionError):
        test_buffer_and_lock_of_the_workspace_stay_what_they_are({})


def test_nets_that_differ_with_the_same_blobs():
    """Steps that stay see the blobs of the net that ran first; so those of another net are others."""
    expected = support.run(*support.lstm())
    workspace.ResetWorkspace()
    chosen = [PRODUCTS, None, [*PRODUCTS, "lstm_unit"]]
    nets = [parted(rules=rules, name="model_{}".format(number)) for number, rules in enumerate(chosen)]
    assert len(set().union(*(scopes(model) for model, _ in nets))) == 2 * len(chosen)
    for model, blobs in [*nets, *nets]:
        support.assert_same(support.run(model, blobs), expected)


def test_the_same_net_again():
    model, blobs = parted()
    expected = support.run(model, blobs)
    for _ in range(2):
        support.assert_same(support.run(model, blobs), expected)


def test_a_predictor_is_cut_out_of_it():
    """The scopes know blobs of the backward pass that are not there any more."""
    model, blobs = parted()
    expected = support.run(model, blobs[:1])
    net, _ = prediction_net(model, ["x", "h0", "c0"], blobs[:1])
    workspace.ResetWorkspace()
    support.lstm()
    workspace.CreateNet(net)
    workspace.RunNet(net, 2)
    support.assert_same(support.values(blobs[:1]), expected)


def test_a_scope_sees_each_outer_blob_of_its_loops():
    model, _ = parted(rules=PRODUCTS)
    runs = [operator for operator in opened(model.net.Proto().op, with_steps=False) if operator.type == "Do"]
    loops = [net.op[0] for run in runs for net in nets_of(run)]
    assert len(loops) == 4
    for run, loop in zip(runs, loops):
        seen = set(map(bytes.decode, support.argument(run, "inner_blobs").strings))
        both = [other for other in loops if workspaces_of(other) == workspaces_of(loop)]
        assert seen >= set().union(*map(outer_blobs, both))
        assert seen.isdisjoint(CONVOLUTION_BUFFERS)


def test_without_convolutions_nothing_changes(monkeypatch):
    force(monkeypatch, "none")
    model, _ = parted(rules=[])
    operators = list(model.net.Proto().op)
    assert not scopes(model)
    assert list(map(id, own_buffers.with_own_buffers(operators))) == list(map(id, operators))


def test_loops_that_are_not_in_parts_stay():
    model, _ = support.lstm()
    optimize(model, PRODUCTS, even_if_slower=True)
    assert not scopes(model)


# What a loop knows.


def test_blobs_that_go_by_other_names():
    names = {"recurrent_states": ["a", "b"], "b_grad.rename": "of_b", "link_external": ["b_grad", "c"]}
    given = {"link_internal": ["inner", "other"], "link_offset": [0, 0]}
    operator = core.CreateOperator("RecurrentNetworkGradient", ["dy", "x"], ["x_grad"], **names, **given)
    assert made_in_a_run(operator) == ["a_grad", "of_b"]
    assert outer_blobs(operator) == {"dy", "x", "x_grad", "a", "b", "a_grad", "of_b", "c"}


def test_a_loop_makes_no_gradients():
    assert made_in_a_run(caffe2_pb2.OperatorDef(type="RecurrentNetwork", output=["y"])) == []
