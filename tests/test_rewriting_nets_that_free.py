"""Nets of a type that lets go of blobs behind their last reader: what loops show of them under other names stays."""

import pytest
from caffe2.python import core, workspace

import comparing
import rewriting_support as support
import step_nets
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.products.kept_filters import KEPT_FILTERS
from caffe2_recurrent.rewriting.steps import step_counts
from onednn_support import EVERY_CELL, assert_cell, force, promise_constant_threads, proto_of

EVERY_STEP_NET = pytest.mark.parametrize("make", step_nets.AS_CAFFE2 + step_nets.MENDED, ids=lambda make: make.__name__)
KIND = "simple_refcount"


@pytest.fixture
def kept_filters(monkeypatch):
    """Products of both loops are in memory that oneDNN and the CPU share."""
    promise_constant_threads(monkeypatch)
    force(monkeypatch, KEPT_FILTERS)


@pytest.fixture
def of_few_steps(monkeypatch):
    """Backward passes are loops of their own, of however few steps."""
    monkeypatch.setattr(step_counts, "few", lambda *_: 0)


class Freeing:
    """Gives a net its type and optimises it; what it makes already is asked for."""

    def __init__(self, rules):
        self.optimised = support.Optimised(rules)

    def __call__(self, finished):
        proto = proto_of(finished)
        proto.type = KIND
        made = (blob for operator in proto.op for blob in operator.output)
        named = {blob for blob in made if not blob.endswith("step_workspaces")} - set(proto.external_output)
        proto.external_output.extend(sorted(named))
        self.optimised(finished)
        assert self.optimised.report.total


def assert_step_net(make, rules):
    step_net = make()
    outputs, gradients = comparing.run(recurrent_net, step_net, False, Freeing(rules))
    comparing.assert_outputs_and_gradients(step_net, outputs, gradients)


@EVERY_CELL
@pytest.mark.parametrize("rules", [["parameter_gradients"], support.NAMES], ids=["one rule", "all rules"])
def test_cells(name, variant, rules):
    assert_cell(name, variant, Freeing(rules))


@EVERY_STEP_NET
def test_step_nets(make):
    assert_step_net(make, support.NAMES)


@EVERY_CELL
@pytest.mark.usefixtures("backward_loops", "of_few_steps")
def test_cells_with_backward_loops(name, variant):
    assert_cell(name, variant, Freeing(support.NAMES))


@EVERY_STEP_NET
@pytest.mark.usefixtures("backward_loops", "of_few_steps")
def test_step_nets_with_backward_loops(make):
    assert_step_net(make, support.NAMES)


@EVERY_CELL
@pytest.mark.usefixtures("backward_loops", "of_few_steps", "kept_filters")
def test_cells_that_keep_filters(name, variant):
    assert_cell(name, variant, Freeing(support.NAMES))


@EVERY_STEP_NET
@pytest.mark.usefixtures("backward_loops", "of_few_steps", "kept_filters")
def test_step_nets_that_keep_filters(make):
    assert_step_net(make, support.NAMES)


@EVERY_CELL
@pytest.mark.usefixtures("unrolled_steps")
def test_cells_that_are_written_out(name, variant):
    assert_cell(name, variant, Freeing(support.NAMES))


@EVERY_STEP_NET
@pytest.mark.usefixtures("unrolled_steps")
def test_step_nets_that_are_written_out(make):
    assert_step_net(make, support.NAMES)


def states(net):
    """What the loop reads and writes as states, in the order of their names."""
    (loop,) = [operator for operator in net.Proto().op if operator.type == "RecurrentNetwork"]
    return sorted(blob.decode() for blob in set(support.argument(loop, "recurrent_states").strings))


@pytest.mark.parametrize("kind", ["simple", KIND])
def test_states_that_others_read_are_asked_for(kind):
    """Not in nets that keep all blobs."""
    model, blobs = support.lstm()
    model.net.Proto().type = kind
    before = list(model.net.Proto().external_output)
    optimize(model, ["parameter_gradients"], even_if_slower=True)
    added = list(model.net.Proto().external_output)[len(before) :]
    hidden = [state for state in states(model.net) if "hidden" in state]
    assert added == (hidden if kind == KIND else [])


def test_it_would_show_if_a_state_were_gone():
    model, blobs = support.lstm()
    model.net.Proto().external_output.extend(blobs)
    expected = support.run(model, blobs)
    model.net.Proto().name, model.net.Proto().type = "freeing", KIND
    optimize(model, ["parameter_gradients"], even_if_slower=True)
    model.net.Proto().external_output[:] = blobs
    # Whoever gets the memory next writes to it.
    model.net.Proto().op.extend(
        core.CreateOperator("ConstantFill", [], ["other_{}".format(size)], shape=[size], value=7.0)
        for size in range(1, 200)
    )
    found = support.run(model, blobs)
    with pytest.raises(AssertionError):
        support.assert_same(found, expected)
    workspace.ResetWorkspace()
