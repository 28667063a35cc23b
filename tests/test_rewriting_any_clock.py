"""The rules, whatever trials find: values and gradients of a numpy loop, or of the net as it was built.

Where a rule asks itself, or another one, whether something pays, `even_if_slower` has no say; here the clock is drawn.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from caffe2.python import core, workspace
from hypothesis import given, settings
from hypothesis import strategies as st

import comparing
import random_step_nets
import rewriting_support as support
from any_clock import clock_of
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.rewriting.products import onednn_over_steps
from step_nets import D
from test_random_step_nets import drawn_options, seeds
from test_rewriting_random import assert_drawn_cell_right, assert_step_net_right, chosen_rules

pytestmark = pytest.mark.usefixtures("nnpack_products", "backward_loops", "chained_steps", "every_size")

clocks = st.integers(0, 9999)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), chosen_rules, clocks)
def test_random_step_nets(seed, sequences, rules, clock):
    with clock_of(clock):
        assert_step_net_right(seed, sequences, False, rules)


@settings(max_examples=60)
@given(st.data(), chosen_rules, clocks)
def test_random_sizes_lengths_options_and_rules_of_cells(data, rules, clock):
    with clock_of(clock):
        assert_drawn_cell_right(data, False, rules)


class Products:
    """A random step net over sequences that products in front of the loop make."""

    def __init__(self, seed, sequences):
        workspace.ResetWorkspace()
        step_net = random_step_nets.step_net(seed, sequences, added=seed % 4 != 0)
        options = drawn_options(seed, step_net)
        self.net = core.Net("outer")
        self.random = np.random.RandomState(seed % 2**32)
        comparing.feed(step_net)
        floats = [name for name in step_net.floats if name not in {str(outer) for _, outer in step_net.inputs}]
        inputs = []
        for inner, outer in step_net.inputs:
            made = self._feed(str(outer), step_net.outer[str(outer)])
            floats += made
            inputs.append((inner, self.net.FC(made, "loop/{}".format(outer), axis=2)))
        changed = dataclasses.replace(step_net, inputs=inputs)
        _, self.outputs = comparing.build(recurrent_net, changed, self.net, scope="loop", **options)
        self.gradients = {}
        if not options.get("forward_only"):
            given = comparing.output_gradients(step_net, options, comparing.reference_outputs(step_net))
            found = comparing._differentiate(self.net, self.outputs, given)
            self.gradients = {name: str(found[name]) for name in floats if name in found}
        comparing.configure(self.net, False)

    def _feed(self, outer, value):
        """Blobs of which a product makes `value`, so that the loop has the values for which it was drawn."""
        weights = np.eye(D) + self.random.uniform(-0.3, 0.3, (D, D))
        bias = self.random.uniform(-1, 1, D)
        rows = (value - bias) @ np.linalg.inv(weights).T
        names = ["{}_{}".format(outer, ending) for ending in ("rows", "w", "b")]
        for name, made in zip(names, (rows, weights, bias)):
            workspace.FeedBlob(name, made.astype(np.float32))
        return names

    def values(self, runs=1):
        workspace.CreateNet(self.net)
        for _ in range(runs):
            workspace.RunNet(self.net)
        gradients = {name: workspace.FetchBlob(blob) for name, blob in self.gradients.items()}
        return [workspace.FetchBlob(output) for output in self.outputs], gradients


def assert_products_right(seed, sequences, rules, clock):
    expected = Products(seed, sequences).values()
    made = Products(seed, sequences)
    with clock_of(clock):
        rewrite = support.Optimised(rules)
        rewrite(made.net)
    support.assert_same(made.values(runs=2), expected)
    return rewrite.report


@settings(max_examples=80)
@given(seeds, st.integers(1, 3), chosen_rules, clocks)
def test_random_step_nets_over_products(seed, sequences, rules, clock):
    assert_products_right(seed, sequences, rules, clock)


def test_a_copy_that_two_products_share_and_a_third_one_writes_to_is_found(monkeypatch):
    """All of them have one blob."""
    monkeypatch.setattr(onednn_over_steps, "_results", lambda *_: "loop/results")
    monkeypatch.setattr(
        onednn_over_steps, "to_share", lambda loop, operator: onednn_over_steps.Shared("loop/results", False)
    )
    wrong = 0
    for seed in range(60):
        try:
            assert_products_right(seed, 1 + seed % 2, ["parameter_gradients", "products_over_steps"], seed)
        except (AssertionError, RuntimeError):
            wrong += 1
        if wrong == 3:
            return
    raise AssertionError("It is found in {} of 60.".format(wrong))


def test_products_give_most_rules_something_to_do():
    counts = Counter()
    rules = ("sequence_bias", "joined_sequence", "products_over_steps", "joined_gradients", "gradient_in_place")
    for seed in range(60):
        counts.update(assert_products_right(seed, 1 + seed % 3, None, seed).counts)
        if all(counts[rule] >= 2 for rule in rules):
            return
    raise AssertionError(counts)
