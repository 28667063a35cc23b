"""The rule `unread_blobs`: what the backward step does not read, in memory that all steps share."""

import numpy as np
import pytest
from caffe2.python import workspace

import comparing
import step_memory
import step_nets
from caffe2_recurrent import optimize, recurrent_net
from cells import CELLS
from rewriting_support import Optimised

EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
# The backward step of the plain LSTM reads all that its step writes.
EVERY_CELL = pytest.mark.parametrize("cell", CELLS[1:], ids=lambda cell: cell.name)


def run(cell, executor, rules):
    rewrite = Optimised(rules, even_if_slower=False)
    outputs, gradients, model = cell.run(executor, rewrite)
    return outputs, gradients, rewrite.report, model


@EVERY_CELL
@EXECUTOR
def test_less_is_kept_and_nothing_changes(cell, executor):
    cell = cell.but(lengths=[3, 1])
    outputs, gradients, _, model = run(cell, executor, [])
    before = step_memory.owned_bytes(model.net)
    workspace.ResetWorkspace()
    new_outputs, new_gradients, report, model = run(cell, executor, ["unread_blobs"])
    after = step_memory.owned_bytes(model.net)
    assert report.counts == {"unread_blobs": 1} and report.refusals == ()
    assert max(after) < min(before)
    for found, expected in zip(new_outputs, outputs):
        np.testing.assert_array_equal(found, expected)
    assert set(gradients) == set(new_gradients)
    for name, expected in gradients.items():
        np.testing.assert_array_equal(new_gradients[name], expected, err_msg=name)


@EVERY_CELL
def test_the_report_names_blobs_that_no_gradient_needs(cell):
    _, _, report, model = run(cell, True, ["unread_blobs"])
    (rewrite,) = report.rewrites
    (loop,) = [operator for operator in model.net.Proto().op if operator.type == "RecurrentNetwork"]
    (backward,) = [argument.n for argument in loop.arg if argument.name == "backward_step_net"]
    read = {blob for operator in backward.op for blob in [*operator.input, *operator.output]}
    visible = {blob for operator in model.net.Proto().op for blob in [*operator.input, *operator.output]}
    linked = {blob.decode() for argument in loop.arg if argument.name == "link_internal" for blob in argument.strings}
    shared = {blob.strip("'") for blob in rewrite.what.split(", ")}
    assert shared and shared.isdisjoint(read | visible | linked)


@EVERY_CELL
def test_what_keeps_nothing_is_left_as_it_is(cell):
    assert run(cell.but(options={"forward_only": True}), True, ["unread_blobs"])[2].total == 0
    workspace.ResetWorkspace()
    _, _, report, model = run(cell.remembering_nothing(), True, ["unread_blobs"])
    assert set(step_memory.owned_bytes(model.net)) == {4}


def test_what_the_backward_step_reads_is_kept():
    (cell, *_) = CELLS
    assert cell.name == "lstm"
    assert run(cell, True, ["unread_blobs"])[2].total == 0


def shared(make_step, rules=("unread_blobs",)):
    net, _ = comparing.build(recurrent_net, make_step)
    comparing.feed(make_step)
    net.AddGradientOperators([net.Proto().op[-1].output[0]])
    optimize(net, rules, even_if_slower=True)
    (loop,) = [operator for operator in net.Proto().op if operator.type == "RecurrentNetwork"]
    (blobs,) = [given.strings for given in loop.arg if given.name == "recompute_blobs_on_backward"]
    return [blob.decode() for blob in blobs]


def test_what_the_step_exports_stays_where_it_can_be_looked_at():
    assert "watched" not in shared(step_nets.exported_blob_that_is_no_state())


def test_what_the_executor_would_not_hold_back_is_not_shared():
    make = step_nets.Maker()
    x, h, w = make.sequence(), make.state(), make.reference("w", step_nets.D)
    # Nothing reads it, and all that it is made of is there before the first step.
    make.cell.Tanh(w, "from_outside")
    make.cell.Scale(make.cell.Tanh(x, "inside"), "unread", scale=2.0)
    make.link(h, make.cell.Mul([x, h], "h_t"))
    assert shared(make.done()) == ["inside_shared", "unread_shared"]


def shown(through):
    """A step that reads `scaled` by another name, whose memory its backward step reads too, if it is by the input."""
    make = step_nets.Maker()
    x, h = make.sequence(), make.state()
    seen = make.cell.Alias(make.cell.Alias(make.cell.Scale(x, "scaled", scale=2.0), "once"), "twice")
    # The gradient of Sigmoid reads what it has written, that of Mul what it has read.
    there = make.cell.Sigmoid(seen, "there") if through == "output" else make.cell.Mul([seen, h], "there")
    make.link(h, make.cell.Tanh(make.cell.Sum([there, h], "total"), "h_t"))
    return make.done()


@EXECUTOR
@pytest.mark.parametrize("through", ["output", "input"])
def test_memory_that_is_read_by_another_name(through, executor):
    """It is shared where the backward step does not read it, unless the executor, going by names, overwrites it."""
    step_net, rewrite = shown(through), Optimised(["unread_blobs"])

    def rewritten(net):
        comparing.configure(net, executor)
        rewrite(net)

    comparing.assert_outputs_and_gradients(step_net, *comparing.run(recurrent_net, step_net, executor, rewritten))
    (shared_blobs,) = [made.what for made in rewrite.report.rewrites]
    assert ("'scaled'" in shared_blobs) == (not executor and through == "output")
    assert "'total'" in shared_blobs
