"""The rules over random step nets and random LSTMs: values and gradients of a numpy loop, and idle the second time."""

import pytest
from caffe2.python import workspace
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cells
import comparing
import random_step_nets
import rewriting_support as support
from caffe2_recurrent import recurrent_net
from caffe2_recurrent.rewriting.rules.forward_links import ForwardLinks
from caffe2_recurrent.rewriting.rules.parameter_gradients import ParameterGradients
from cells import CELLS
from test_random_step_nets import drawn_options, seeds

pytestmark = pytest.mark.usefixtures("nnpack_products")

chosen_rules = st.none() | st.sets(st.sampled_from(support.NAMES), min_size=1)


def assert_step_net_right(seed, sequences, executor, rules, names_again=False):
    workspace.ResetWorkspace()
    step_net = random_step_nets.step_net(seed, sequences, names_again=names_again)
    with support.optimising(rules):
        comparing.assert_right(recurrent_net, step_net, executor=executor, **drawn_options(seed, step_net))


def assert_drawn_cell_right(data, executor, rules):
    workspace.ResetWorkspace()
    changed = cells.drawn(data, CELLS)
    with support.optimising(rules):
        changed.assert_right(executor)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), st.booleans(), chosen_rules, st.booleans())
@example(40409, 1, True, None, True)  # a Mul by ATen that nothing reads any more
@example(89, 1, False, None, False)  # a Tanh in place, whose Sum reads its own output until it is merged
def test_random_step_nets(seed, sequences, executor, rules, names_again):
    assert_step_net_right(seed, sequences, executor, rules, names_again)


@settings(max_examples=60)
@given(st.data(), st.booleans(), chosen_rules)
def test_random_sizes_lengths_options_and_rules_of_cells(data, executor, rules):
    assert_drawn_cell_right(data, executor, rules)


def assert_found_in_random_step_nets(is_enough, rules=None, **options):
    """The properties would say little if the rules found nothing; `is_enough` says of the lines so far."""
    with support.optimising(rules) as lines:
        for seed in range(40):
            workspace.ResetWorkspace()
            step_net = random_step_nets.step_net(seed, 1 + seed % 3)
            comparing.run(recurrent_net, step_net, **options, **drawn_options(seed, step_net))
            if is_enough(lines):
                return
    raise AssertionError("{}, {}".format(lines.counts, lines.reasons))


def test_random_step_nets_give_most_rules_something_to_do():
    # Of the executor only where no product has taken it off.
    least = {
        "parameter_gradients": 10,
        "transposed_weights": 10,
        "forward_links": 10,
        "packed_products": 10,
        "executor_threads": 5,
    }
    refusing = {"parameter_gradients", "forward_links", "executor_threads"}
    assert_found_in_random_step_nets(
        lambda lines: (
            all(lines.counts[rule] >= count for rule, count in least.items())
            and refusing <= {rule for rule, _ in lines.reasons}
        )
    )


def test_a_rule_that_forgets_something_is_found(monkeypatch):
    """Links that the backward step needs, because it writes to them, are taken away."""
    monkeypatch.setattr(ForwardLinks, "refusal", lambda *_: None)
    monkeypatch.setattr(ParameterGradients, "rewrite", lambda self, loop, site, sizes: loop.gradient.parameters.clear())
    wrong = 0
    for seed in range(12):
        workspace.ResetWorkspace()
        try:
            with support.optimising(["parameter_gradients", "forward_links"]):
                comparing.assert_right(recurrent_net, random_step_nets.step_net(seed))
        except (AssertionError, RuntimeError):
            wrong += 1
    assert wrong >= 5
