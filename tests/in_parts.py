"""Nets whose batches are in parts: made, and held against what they are without."""

import pytest
from caffe2.python import workspace

import cells
import comparing
import random_step_nets
import rewriting_support as support
from caffe2_recurrent import optimize, recurrent_net
from caffe2_recurrent.rewriting.batch_parts.parting import RULE
from test_random_step_nets import drawn_options

EVERY_NUMBER = pytest.mark.parametrize("parts", [2, 3])
# Also of fewer sequences than there are parts, of which one would be empty.
SIZES = [(2, 1), (14, 17), (1, 2), (14, 5), (3, 7)]


def parted(parts=2, rules=None, **options):
    """An LSTM whose batch is in parts, and what must stay what it is."""
    model, blobs = support.lstm(**options)
    report = optimize(model, rules, even_if_slower=True, batch_parts=parts)
    assert report.counts[RULE] == 1, report
    return model, blobs


def assert_right(parts, rules, **options):
    """Values and gradients stay, and a second call finds nothing to do; gives the model."""
    expected = support.run(*support.lstm(**options))
    workspace.ResetWorkspace()
    model, blobs = parted(parts, rules, **options)
    support.assert_done(model.net, rules, batch_parts=parts)
    support.assert_same(support.run(model, blobs), expected)
    return model


def assert_right_cell(cell):
    """That its batch is parted, and has the values and gradients of a numpy loop."""
    for lengths in (None, [cell.steps, 1]):
        workspace.ResetWorkspace()
        with support.optimising(batch_parts=2) as lines:
            cell.but(lengths=lengths).assert_right(executor=False)
        assert [report.counts[RULE] for report in lines.reports] == [1]


def assert_right_step_net(seed, sequences):
    workspace.ResetWorkspace()
    step_net = random_step_nets.step_net(seed, sequences)
    with support.optimising(batch_parts=2):
        comparing.assert_right(recurrent_net, step_net, executor=False, **drawn_options(seed, step_net))


def assert_right_drawn_cell(data):
    workspace.ResetWorkspace()
    with support.optimising(batch_parts=2):
        cells.drawn(data, cells.CELLS).assert_right(executor=False)


def assert_right_in_other_sizes(parts, **options):
    expected = support.runs_of_other_sizes(lambda model: None, SIZES, **options)
    found = support.runs_of_other_sizes(
        lambda model: optimize(model, even_if_slower=True, batch_parts=parts), SIZES, **options
    )
    support.assert_same(found, expected)
