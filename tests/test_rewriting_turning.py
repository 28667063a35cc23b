"""`turning`: loops of few operators, whose backward pass becomes a loop of its own where a trial finds that faster."""

import pytest
from caffe2.python import workspace

import rewriting_support as support
from any_clock import clock_of
from caffe2_recurrent import optimize
from caffe2_recurrent.loops.sizes import Sizes, find_sizes
from caffe2_recurrent.rewriting import turning
from caffe2_recurrent.rewriting.rules import RULES
from caffe2_recurrent.rewriting.steps import step_counts
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, prepared
from onednn_support import leaving_no_trace
from test_cells import EVERY_CELL
from test_rewriting_rules import loop_of

pytestmark = pytest.mark.usefixtures("backward_loops", "unrolled_steps", "chained_steps")

RULE = "backward_loop"
BOTH = pytest.mark.parametrize("is_faster", [True, False], ids=["faster", "slower"])


@pytest.fixture
def asked(monkeypatch):
    """What has been timed with all around it; a test says what takes how long."""
    found = []

    def seconds(loop, candidates, sizes):
        found.append(candidates)
        return found.answer

    class Asked(list):
        answer = {turning.AS_IT_IS: Seconds(0.0, 1.0), turning.TURNED: Seconds(0.0, 2.0)}

        def is_faster(self, factor=2.0):
            self.answer = {turning.AS_IT_IS: Seconds(0.0, factor), turning.TURNED: Seconds(0.0, 1.0)}

    found = Asked()
    monkeypatch.setattr(turning.loop_trial, "seconds_with_surroundings", seconds)
    return found


def lstm(**options):
    """Without the RNN executor, for which a trial might find that it stays."""
    model, blobs = support.lstm(**options)
    return support.without_executor(model), blobs


@BOTH
def test_a_trial_decides(is_faster, asked):
    expected = support.run(*lstm())
    workspace.ResetWorkspace()
    model, blobs = lstm()
    if is_faster:
        asked.is_faster()
    assert optimize(model).counts[RULE] == is_faster
    (candidates,) = asked
    turned = {name: loop.gradient.turned is not None for name, loop in candidates.items()}
    assert turned == {turning.AS_IT_IS: False, turning.TURNED: True}
    support.assert_same(support.run(model, blobs), expected)


@pytest.mark.parametrize("factor, is_faster", [(1.1, True), (turning.GAIN, False), (1.0, False)])
def test_it_must_be_faster_by_more_than_what_trials_are_wrong(factor, is_faster, asked):
    asked.is_faster(factor)
    assert optimize(lstm()[0]).counts[RULE] == is_faster


@pytest.mark.parametrize("steps, is_turned", [(support.T, False), (100, True)], ids=["few", "more"])
def test_what_cannot_be_tried(steps, is_turned, asked):
    """It gets what it would without trials."""
    asked.answer = "its steps cannot be tried with arbitrary numbers"
    report = optimize(lstm()[0], shapes={"x": (steps, support.N, support.DIM_IN)})
    assert report.counts[RULE] == is_turned and len(asked) == 1
    reasons = [refusal.reason for refusal in report.refusals if refusal.rule == RULE]
    assert all(reason.endswith("a trial has not found that it pays") for reason in reasons)
    assert len(reasons) == (not is_turned)


@pytest.mark.parametrize(
    "options, optimised",
    [
        ({}, {"trials": False}),
        ({}, {"even_if_slower": True}),
        ({}, {"rules": [name for name in support.NAMES if name != RULE]}),
        ({}, {"shapes": {"x": (1000, support.N, support.DIM_IN)}}),
        ({"gradients": False}, {}),
        # What adds up gradients in the loop is refused.
        ({}, {"rules": ["lstm_unit", RULE]}),
    ],
    ids=["no trials", "even if slower", "not chosen", "many", "no gradient", "refused"],
)
def test_what_is_not_tried(options, optimised, asked):
    asked.is_faster()
    optimize(lstm(**options)[0], **optimised)
    assert asked == []


def test_a_loop_of_unknown_sizes_is_not_tried(asked):
    model, _ = lstm()
    workspace.ResetWorkspace()
    optimize(model.net)
    assert asked == []


def test_the_loop_stays_as_it_is(asked):
    """And so does what is known of sizes."""
    asked.is_faster()
    model, _ = lstm()
    loop, sizes = loop_of(model.net), find_sizes(model.net.Proto(), None, {})
    loop.rules = frozenset(support.NAMES)
    before = repr(loop), dict(vars(sizes)["_shapes"])
    assert turning.pays(loop, RULES, sizes)
    assert (repr(loop), vars(sizes)["_shapes"]) == before


def test_how_many_operators_are_few():
    """More of small states, as far as a trial can tell what is faster."""
    loop = loop_of(lstm()[0].net)
    (count,) = {step_counts.operators(loop, Sizes({"layer/i2h": (steps, 3, 16)})) / steps for steps in (1, 9, 200)}
    assert count == sum(map(len, loop.steps)) + len(loop.all_links)
    assert step_counts.operators(loop, Sizes({})) is None
    small = {"layer/i2h": (9, 3, 16), "h0": (1, 3, 4), "c0": (4,)}
    large = {**small, "c0": (3, step_counts.SMALL)}
    assert [step_counts.elements(loop, Sizes(shapes)) for shapes in (small, large)] == [12, 3 * step_counts.SMALL]
    assert step_counts.elements(loop, Sizes({"layer/i2h": (9, 3, 16)})) is None
    assert step_counts.few(loop, Sizes(small)) == step_counts.FEW_OF_SMALL
    assert step_counts.few(loop, Sizes(large)) == step_counts.few(loop, Sizes({})) == step_counts.FEW
    with trial.trying(False):
        assert step_counts.few(loop, Sizes(small)) == step_counts.FEW
    not_trained = loop_of(lstm(gradients=False)[0].net)
    assert step_counts.few(not_trained, Sizes(small)) == step_counts.FEW_OF_SMALL_FORWARD
    assert step_counts.few(not_trained, Sizes(large)) == step_counts.FEW


@BOTH
def test_rules_that_go_by_it(is_faster, asked, monkeypatch):
    """Filters are laid out once for the steps of a run where these have two workspaces."""
    if is_faster:
        asked.is_faster()
    kept = []
    packed = next(rule for rule in RULES if rule.name == "packed_products")
    loss = type(packed).loss

    def noting(self, loop, site, sizes):
        kept.append(loop.turns)
        return loss(self, loop, site, sizes)

    monkeypatch.setattr(type(packed), "loss", noting)
    optimize(lstm()[0])
    # The two ways, and then the net itself.
    assert list(dict.fromkeys(kept)) == [True, False] and kept[-1] is is_faster


@EVERY_CELL
@BOTH
def test_cells_have_the_values_and_gradients_of_a_numpy_loop(cell, is_faster, asked):
    if is_faster:
        asked.is_faster()
    for variant in (cell, cell.but(lengths=[3, 1]), cell.remembering_nothing()):
        workspace.ResetWorkspace()
        with clock_of(0), support.optimising(even_if_slower=False) as lines:
            variant.assert_right(executor=False)
        adds_up = any(reason.startswith("steps add up the gradient") for _, reason in lines.reasons)
        assert lines.counts[RULE] == (is_faster and not adds_up), lines.reasons
        assert not adds_up or cell.name.startswith(("attention", "gru"))


# ----------------------------------------------------------------------------------------------------- what is timed


@pytest.fixture
def subjects(monkeypatch, trials_by_name):
    trial.forget_times()
    found = []

    def in_turn(candidates, one_by_one=False, **others):
        if turning.TURNED in candidates:
            found.append({name: candidate() for name, candidate in candidates.items()})
        return {name: Seconds(0.0, 1.0 + index) for index, name in enumerate(candidates)}

    monkeypatch.setattr(trial, "in_turn", in_turn)
    yield found
    trial.forget_times()


@pytest.mark.parametrize("options", [{}, {"lengths": True}], ids=str)
def test_products_of_the_net_are_timed_too(options, subjects):
    """Those in front of the loop and those behind, as each way has them; all that is read is there."""
    model, _ = lstm(**options)
    optimize(model, ["parameter_gradients", "lstm_unit", "gradient_buffer", RULE])
    (candidates,) = subjects
    for subject in candidates.values():
        kinds = [operator.type for operator in subject.step]
        assert kinds[0] == "FC" and kinds[-1] == "FCGradient" and support.LOOP in kinds
        assert (support.GRADIENT in kinds) == (subject is candidates[turning.AS_IT_IS])
        assert {"x", "dh", "h0", "c0", "layer/i2h_w", "layer/gates_t_w"} <= set(subject.shapes)
        assert subject.shapes["dh"] == (support.T, support.N, support.D)
        with prepared(subject) as timer:
            assert timer(1.0).step > 0


def test_all_that_rules_leave_can_be_timed(subjects):
    model, _ = lstm()
    with leaving_no_trace():
        optimize(model)
    for subject in subjects[0].values():
        with prepared(subject) as timer:
            assert timer(1.0).step > 0
