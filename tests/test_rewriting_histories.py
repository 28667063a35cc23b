"""Nets of one layer that take turns in a workspace, optimised and not, with other numbers of steps and sequences.

What a run leaves, views of memory among it, is there in the next one. Each run must give what it gives in an empty
workspace.
"""

import contextlib

import numpy as np
import pytest
from caffe2.python import workspace
from caffe2.python.model_helper import ModelHelper
from hypothesis import given, settings
from hypothesis import strategies as st

import rewriting_support as support
from caffe2_recurrent import GRU, LSTM, MILSTM, optimize
from caffe2_recurrent.operators import LINK
from caffe2_recurrent.rewriting import unrolled

pytestmark = pytest.mark.usefixtures("backward_loops", "unrolled_steps", "nnpack_products")

CELLS = {LSTM: ("h0", "c0"), MILSTM: ("h0", "c0"), GRU: ("h0",)}
STEPS, SEQUENCES = 5, 2
SIZES = [(STEPS, SEQUENCES), (2, SEQUENCES), (9, SEQUENCES), (STEPS, 1), (1, 3)]
WRITTEN_OUT = ["parameter_gradients", "unrolled_steps"]
TURNED = ["parameter_gradients", "backward_loop"]
# They keep what the backward step needs in the memory of the sequence's gradient.
KEPT = ["parameter_gradients", "lstm_unit", "gradient_buffer", "zero_gradients", "unrolled_steps"]
RULES = [None, WRITTEN_OUT, TURNED, KEPT]


class Layer:
    """A net of a layer, and what must be the same as in any other net of that layer."""

    def __init__(self, cell, name, trains, lengths=False, **options):
        states = CELLS[cell]
        self.model = ModelHelper(name)
        if not trains:
            options["forward_only"] = True
        sizes = support.DIM_IN, support.D
        outputs = cell(self.model, "x", "lengths" if lengths else None, states, *sizes, "layer", **options)
        found = {}
        if trains:
            found = self.model.net.AddGradientOperators({outputs[0]: self.model.net.AddExternalInput("dh")})
        visible = [found[blob] for blob in ("x", *states, *map(str, self.model.params)) if blob in found]
        self.blobs = [str(blob) for blob in [*outputs, *visible]]

    def feed_parameters(self):
        workspace.RunNetOnce(self.model.param_init_net)
        random = np.random.RandomState(1)
        for parameter in map(str, self.model.params):
            shape = workspace.FetchBlob(parameter).shape
            workspace.FeedBlob(parameter, random.uniform(-1, 1, shape).astype(np.float32))

    def values(self):
        return [workspace.FetchBlob(blob) for blob in self.blobs], {}


@contextlib.contextmanager
def empty_workspace():
    here = workspace.CurrentWorkspace()
    workspace.SwitchWorkspace("empty", True)
    try:
        yield
    finally:
        workspace.ResetWorkspace()
        workspace.SwitchWorkspace(here)


def assert_each_run_right(cell, trains, rules, runs, **options):
    """`runs` are which net runs, the plain one or that of a position in `rules`, and with which of the sizes."""
    workspace.ResetWorkspace()
    support.feed(STEPS, SEQUENCES)
    layers = [Layer(cell, "net{}".format(number), trains, **options) for number in range(1 + len(rules))]
    layers[0].feed_parameters()
    for layer, names in zip(layers[1:], rules):
        optimize(layer.model, names, even_if_slower=True)
    for layer in layers:
        workspace.CreateNet(layer.model.net)
    for seed, (number, size) in enumerate(runs):
        support.feed(*SIZES[size], seed=seed)
        workspace.RunNet(layers[number].model.net)
        with empty_workspace():
            alone = Layer(cell, "alone", trains, **options)
            alone.feed_parameters()
            support.feed(*SIZES[size], seed=seed)
            workspace.RunNetOnce(alone.model.net)
            expected = alone.values()
        support.assert_same(layers[number].values(), expected)


some_runs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, len(SIZES) - 1)), min_size=2, max_size=7)
some_rules = st.sampled_from(RULES) | st.sets(st.sampled_from(support.NAMES), min_size=3)
two_of_the_rules = st.tuples(some_rules, some_rules)


@settings(max_examples=35)
@given(st.sampled_from(list(CELLS)), st.booleans(), st.booleans(), two_of_the_rules, some_runs)
def test_nets_that_take_turns(cell, trains, lengths, rules, runs):
    assert_each_run_right(cell, trains, rules, runs, lengths=lengths)


@settings(max_examples=12)
@given(st.booleans(), two_of_the_rules, some_runs)
def test_nets_that_keep_gates_in_sequences_and_take_turns(lengths, rules, runs):
    assert_each_run_right(LSTM, True, rules, runs, lengths=lengths, memory_optimization=True)


def test_rows_that_one_net_shows_and_another_one_writes():
    """Those of the gradient, whose memory a run of more numbers lets go of."""
    layers = []
    for number, rules in enumerate((KEPT, WRITTEN_OUT)):
        workspace.ResetWorkspace()
        support.feed(STEPS, SEQUENCES)
        layers.append(Layer(LSTM, "net{}".format(number), True))
        layers[-1].feed_parameters()
        report = optimize(layers[-1].model, rules, even_if_slower=True)
        assert report.counts["unrolled_steps"] == 1, report
    shown, written = (
        {
            blob
            for operator in layer.model.net.Proto().op
            for given in operator.arg
            if given.name == "then_net"
            for inside in given.n.op
            if (inside.type == LINK) == is_link
            for blob in inside.output[: 1 if is_link else None]
        }
        for layer, is_link in zip(layers, (True, False))
    )
    assert shown and not shown & written
    assert_each_run_right(LSTM, True, [KEPT, WRITTEN_OUT], [(1, 2), (1, 0), (2, 2), (2, 0), (1, 0), (2, 0)])


def test_a_blob_that_is_written_through_a_view_is_found(monkeypatch):
    """The last value of a state copied, as it is where nothing else has run before."""
    right = unrolled.new_operator
    copying = {"Alias": "Copy"}
    monkeypatch.setattr(
        unrolled, "new_operator", lambda kind, *args, **given: right(copying.get(kind, kind), *args, **given)
    )
    with pytest.raises(AssertionError, match="output"):
        assert_each_run_right(LSTM, True, [WRITTEN_OUT], [(1, 1), (1, 2), (1, 1), (1, 0)])
