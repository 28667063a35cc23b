"""`trial`: who wins, by a clock that is made up; `vectorised`, which decides by it. Never how long anything takes."""

import contextlib
import functools
import math

import pytest
from caffe2.python import core

from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.trials import threads, trial, turns
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject
from made_up_clock import make_up_clock
from onednn_support import leaving_no_trace

pytestmark = pytest.mark.usefixtures("whole_trials")


def test_a_loop_of_nothing():
    loop = trial.lone_loop(["x", "x_1"])
    assert loop.steps == [[]] and loop.before == []
    assert loop.new_blob("x") == "x_2" and loop.new_blob("y") == "y"


# Sigmoid and Tanh.

KINDS = pytest.mark.parametrize("kind", vectorised.KINDS)


def emitted(kind, elements):
    """What takes the place of an operator: its type, and the operator that ATen is told to run."""
    loop = trial.lone_loop(["x"])
    emitter = Emitter(loop, loop.forward, "x")
    blob = vectorised.emit(emitter, kind, "x", "made", elements)
    (operator,) = emitter.operators
    assert list(operator.input) == ["x"] and list(operator.output) == [blob] and blob in emitter.made
    return operator.type, [given.s.decode() for given in operator.arg]


@KINDS
def test_the_faster_operator_is_taken(kind, monkeypatch):
    monkeypatch.setattr(vectorised, "aten_is_faster", lambda asked, elements: asked == kind and elements > 10)
    assert emitted(kind, 11) == ("ATen", [kind.lower()])
    assert emitted(kind, 10) == (kind, [])


@KINDS
def test_atens_operator_is_taken_where_the_size_is_not_known(kind, monkeypatch):
    monkeypatch.setattr(vectorised, "aten_is_faster", lambda asked, elements: False)
    assert emitted(kind, None) == ("ATen", [kind.lower()])


@KINDS
@pytest.mark.parametrize("atens, own, faster", [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, False)])
def test_what_a_trial_says(kind, atens, own, faster, monkeypatch):
    def seconds(subject):
        operators, shapes, once = subject[:3]
        assert once == ()
        (operator,) = operators
        assert shapes == dict.fromkeys(operator.input, (7,)) and operator.type in ("ATen", kind)
        return Seconds(0.0, atens if operator.type == "ATen" else own)

    make_up_clock(monkeypatch, seconds)
    assert vectorised.aten_is_faster.__wrapped__(kind, 7) is faster


@pytest.mark.parametrize("atens, own, faster", [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_what_a_trial_says_of_additions(atens, own, faster, monkeypatch):
    def seconds(subject):
        operators, shapes, once = subject[:3]
        assert once == ()
        (operator,) = operators
        assert shapes == {"x": (1, 3, 7), "b": (7,)} and list(operator.input) == list(shapes)
        return Seconds(0.0, atens if operator.type == "ATen" else own)

    make_up_clock(monkeypatch, seconds)
    assert vectorised._aten_adds_faster.__wrapped__(3, 7) is faster


@pytest.mark.parametrize("atens, own, faster", [(1.0, 1.2, True), (1.0, 1.05, False), (2.0, 1.0, False)])
def test_what_a_trial_says_of_products(atens, own, faster, monkeypatch):
    """In a step, a little less is nothing gained."""

    def seconds(subject):
        operators, shapes, once = subject[:3]
        assert once == ()
        operator, *others = operators
        assert list(shapes.values()) == [(7,), (7,)] and list(operator.input) == list(shapes)
        assert others == (vectorised.IN_A_ROW - 1) * [operator]
        return Seconds(0.0, atens if operator.type == "ATen" else own)

    make_up_clock(monkeypatch, seconds)
    assert vectorised.aten_multiplies_faster.__wrapped__(7) is faster


@pytest.mark.parametrize("atens, own, faster", [(1.2, 1.0, True), (1.05, 1.0, False), (1.0, 2.0, False)])
def test_what_a_trial_says_of_sums_of_three(atens, own, faster, monkeypatch):
    """In a step, a little less is nothing gained."""

    def seconds(subject):
        operators, shapes, once = subject[:3]
        assert once == ()
        operator, *others = operators
        assert shapes == {"Sum": {"x": (7,), "z": (7,)}, "ATen": {"one": (1,), "x": (7,)}}[operator.type]
        assert others == (vectorised.IN_A_ROW - 1) * [operator]
        return Seconds(0.0, atens if operator.type == "ATen" else own)

    make_up_clock(monkeypatch, seconds)
    assert vectorised.sum_of_three_is_faster.__wrapped__(7) is faster


def test_both_sums_run():
    with leaving_no_trace():
        assert vectorised.sum_of_three_is_faster.__wrapped__(50) in (True, False)


def test_a_product_of_unknown_size_is_caffe2s(monkeypatch):
    monkeypatch.setattr(vectorised, "aten_multiplies_faster", lambda elements: True)
    loop = trial.lone_loop(["x", "y"])
    emitter = Emitter(loop, loop.forward, "x")
    for elements in (None, 7):
        vectorised.emit_product(emitter, ["x", "y"], "made", elements)
    assert [operator.type for operator in emitter.operators] == ["Mul", "ATen"]


def test_both_products_run():
    with leaving_no_trace():
        assert vectorised.aten_multiplies_faster.__wrapped__(50) in (True, False)


def test_no_trial_of_additions(monkeypatch):
    """Where the number of rows is not known, or there is no ATen."""
    monkeypatch.setattr(vectorised, "_aten_adds_faster", lambda rows, columns: True)
    assert vectorised.aten_adds_faster(3, 7) and not vectorised.aten_adds_faster(None, 7)
    monkeypatch.setattr(vectorised, "aten_is_missing", lambda: True)
    assert not vectorised.aten_adds_faster(3, 7)


def test_both_additions_run():
    with leaving_no_trace():
        assert vectorised._aten_adds_faster.__wrapped__(3, 7) in (True, False)


@KINDS
def test_both_operators_run(kind):
    with leaving_no_trace():
        assert vectorised.aten_is_faster.__wrapped__(kind, 50) in (True, False)


def taking_turns(monkeypatch, candidates, steps=None, asked=None, warming_up=0.0):
    """What a trial finds of candidates, each given by the seconds of its turns, and which had a turn when.

    A second of a step takes a second, and the first turn of each so many more. To `asked` goes what was of interest in
    each turn.
    """
    seen, now = [], [0.0]
    left = {name: list(turns) for name, turns in candidates.items()}

    def seconds(subject):
        (name,) = subject.step
        seen.append(name)
        found = Seconds(*left[name].pop(0))
        now[0] += found.step + (warming_up if seen.count(name) == 1 else 0.0)
        return found

    make_up_clock(monkeypatch, seconds, asked)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])
    return trial.in_turn({name: functools.partial(Subject, [name], {}) for name in candidates}, steps), "".join(seen)


def test_candidates_take_turns(monkeypatch):
    # A slow phase of the machine may meet one turn of each.
    candidates = {"a": [(9, 0.4), (2, 0.3), (3, 0.2)], "b": [(1, 0.3), (9, 0.4), (1, 0.5)]}
    assert taking_turns(monkeypatch, candidates) == ({"a": (2, 0.2), "b": (1, 0.3)}, "ab" * trial.TURNS)


def test_what_is_clearly_slower_has_one_turn(monkeypatch):
    candidates = {"a": [(0, 0.2)] * 3, "b": [(5, 0.31)], "c": [(0, 0.3), (0, 0.2), (0, 0.1)]}
    found, seen = taking_turns(monkeypatch, candidates)
    assert found == {"a": (0, 0.2), "b": (5, 0.31), "c": (0, 0.1)} and seen == "abc" + "ac" * (trial.TURNS - 1)


def test_what_is_done_once_counts_for_each_step(monkeypatch):
    """Who has much of it is no faster than who has long steps."""
    candidates = {"a": [(0, 0.9)] * 3, "b": [(20, 0.5), (8, 0.5), (9, 0.5)]}
    found, seen = taking_turns(monkeypatch, candidates, steps=10)
    assert found == {"a": (0, 0.9), "b": (20, 0.5)} and seen == "ab"
    candidates = {"a": [(0, 0.4)] * 3, "b": [(2, 0.2), (3, 0.2), (1, 0.2)]}
    found, seen = taking_turns(monkeypatch, candidates, steps=10)
    assert found == {"a": (0, 0.4), "b": (1, 0.2)} and seen == "ab" * trial.TURNS


def test_what_is_clearly_slower_than_the_best_so_far_is_of_no_interest(monkeypatch):
    candidates = {"a": [(0, 0.4), (0, 0.3)], "b": [(0, 0.2), (0, 0.1)], "c": [(9, 0.5)], "d": [(0, 0.3), (0, 0.2)]}
    asked = []
    _, seen = taking_turns(monkeypatch, candidates, asked=asked)
    assert seen == "abcd" + "bd" and turns.CLOSE == 1.5
    assert asked == pytest.approx([math.inf, 0.6, 0.3, 0.3] + [0.3, 0.15])


def test_with_something_to_do_once_all_steps_are_of_interest(monkeypatch):
    asked = []
    taking_turns(monkeypatch, {"a": [(1, 0.2)] * 3, "b": [(1, 0.2)] * 3}, steps=10, asked=asked)
    assert asked == [math.inf] * 2 * trial.TURNS


# Bytes of the inputs of two subjects, whether they are never to be there together, and whether they ever are.
@pytest.mark.parametrize(
    "sizes, one_by_one, together",
    [
        ([4, 4], False, True),
        ([4, 4], True, False),
        ([trial.LITTLE - 4, 4], False, True),
        ([trial.LITTLE - 4, 8], False, False),
    ],
)
def test_subjects_are_there_at_once_unless_they_are_large(sizes, one_by_one, together, monkeypatch):
    there, seen = [], []

    @contextlib.contextmanager
    def prepared(subject):
        there.append(subject)
        yield lambda of_interest: seen.append(len(there)) or Seconds(0.0, 1.0)
        there.remove(subject)

    monkeypatch.setattr(trial, "prepared", prepared)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: float(len(seen)) / 10)
    subjects = [Subject([], {"x": (size // 4,)}) for size in sizes]
    trial.in_turn({name: lambda subject=subject: subject for name, subject in zip("ab", subjects)}, None, one_by_one)
    assert seen == 2 * trial.TURNS * [2 if together else 1] and there == []


def test_nothing_is_left_of_a_trial_that_fails():
    """Caffe2 cannot run one of the subjects."""
    good, bad = (Subject([core.CreateOperator("Tanh", [blob], ["y"])], {"x": (3,)}) for blob in ("x", "nowhere"))
    with leaving_no_trace(), pytest.raises(RuntimeError, match="non-existing input blob: nowhere"):
        trial.in_turn({"good": lambda: good, "bad": lambda: bad})


def test_without_trials_the_first_is_taken():
    def candidate():
        pytest.fail("it is run")

    with trial.trying(False):
        for steps in (None, 3):
            found = trial.in_turn(dict.fromkeys(["a", "b", "c"], candidate), steps)
            assert found == {"a": (0, 1), "b": (0, math.inf), "c": (0, math.inf)}


def test_what_was_chosen_without_trials_is_not_remembered_for_others(monkeypatch):
    make_up_clock(monkeypatch, lambda subject: Seconds(0.0, *subject.step))
    asked = []

    @trial.remembered
    def chosen(size):
        asked.append(size)
        return min(trial.in_turn({"a": lambda: Subject([5.0], {}), "b": lambda: Subject([3.0], {})}).values())

    for _ in range(2):
        with trial.trying(False):
            assert chosen(7) == (0, 1)
            with trial.trying(True):
                assert chosen(7) == (0, 3)
            assert chosen(7) == (0, 1)
        assert chosen(7) == (0, 3)
    assert asked == [7, 7]
    trial.forget()
    assert chosen(7) == (0, 3) and asked == [7, 7, 7]


def test_short_trials_have_more_turns(monkeypatch):
    """So that a slow phase of some milliseconds does not decide; whoever is still slow in the third turn has lost."""
    candidates = {
        "a": [(0, 0.001)] * 20,
        "b": [(0, 0.002), (0, 0.0008)] + [(0, 0.001)] * 10 + [(0, 0.0008)] * 10,
        "c": [(0, 0.002)] * 2,
    }
    found, seen = taking_turns(monkeypatch, candidates)
    assert found == {"a": (0, 0.001), "b": (0, 0.0008), "c": (0, 0.002)}
    # Behind the first, 3.8 ms, and 2 ms each until 30 are over; then b is that fast once more.
    assert trial.SHORT == 0.03 and seen == "abc" * 2 + "ab" * 14


def test_a_phase_that_only_one_of_them_has_met_does_not_decide(monkeypatch):
    """Warming up has taken the time of short trials: a is fast, and the machine slow when it is b's turn, and later."""
    slow, fast = [(0, 0.004), (0, 0.0032)], [(0, 0.002), (0, 0.0016)]
    a, b = zip([fast[0], slow[1]], slow, slow, slow, fast, slow, fast)
    found, seen = taking_turns(monkeypatch, {"a": a, "b": b}, warming_up=trial.SHORT)
    assert found == {"a": (0, 0.002), "b": (0, 0.0016)} and seen == "ab" * len(a)


def test_patience_has_an_end(monkeypatch):
    """Of b nothing faster is found."""
    found, seen = taking_turns(monkeypatch, {"a": [(0, 0.01)] + [(0, 0.02)] * 30, "b": [(0, 0.02)] * 30})
    assert found == {"a": (0, 0.01), "b": (0, 0.02)} and trial.PATIENT == 0.3
    # 30 ms, and 40 each until 300 are over.
    assert seen == "ab" * 8


def test_what_is_brief_has_one_turn_if_it_is_very_slow(monkeypatch):
    """Slow phases take twice as long for all; what is clearly slower than the others in each turn has two."""
    d = [(0, 0.02), (0, 0.011), (0, 0.011)]
    candidates = {"a": [(0, 0.01)] * 3, "b": [(0, 0.031)], "c": [(0, 0.029), (0, 0.019)], "d": d}
    found, seen = taking_turns(monkeypatch, candidates)
    assert found == {"a": (0, 0.01), "b": (0, 0.031), "c": (0, 0.019), "d": (0, 0.011)}
    assert seen == "abcd" + "acd" + "ad" and turns.DISTANT == 3 and turns.BRIEF == 0.02


def test_what_is_slow_by_best_times_alone_is_not_slow(monkeypatch):
    """In the second turn b is as fast as a, whose best time is from another phase."""
    a, b = zip(*[[(0, 0.01), (0, 0.02)], [(0, 0.02)] * 2, *[[(0, 0.01)] * 2] * 2])
    assert taking_turns(monkeypatch, {"a": a, "b": b}) == ({"a": (0, 0.01), "b": (0, 0.01)}, "ab" * 4)


def test_who_is_left_has_won(monkeypatch):
    candidates = {"a": [(0, 0.001)] * 2, "b": [(0, 0.002)] * 2}
    assert taking_turns(monkeypatch, candidates) == ({"a": (0, 0.001), "b": (0, 0.002)}, "abab")


def test_there_is_no_other_turn_after_a_long_one(monkeypatch):
    candidates = {"a": [(0, 1.0), (0, 0.9)], "b": [(0, 0.9), (0, 1.0)]}
    assert taking_turns(monkeypatch, candidates) == ({"a": (0, 0.9), "b": (0, 0.9)}, "abab")


def test_trials_are_remembered_until_they_are_forgotten():
    made = []
    remembering = trial.remembered(lambda size: made.append(size) or len(made))
    assert [remembering(1), remembering(1), remembering(2)] == [1, 1, 2]
    trial.forget()
    assert remembering(1) == 3


@pytest.mark.parametrize("deciding", [trial.remembered, trial.known])
def test_what_was_asked_long_ago_is_asked_again(deciding):
    """So that a process which optimises again and again does not keep all of it."""
    made = []
    remembering = deciding(lambda size: made.append(size) or len(made))
    for size in range(trial.REMEMBERED + 1):
        remembering(size)
    assert remembering(trial.REMEMBERED) == remembering(1) + trial.REMEMBERED - 1 == len(made)
    remembering(0)
    assert made[-1] == 0 and len(made) == trial.REMEMBERED + 2


@pytest.mark.parametrize("deciding", [trial.remembered, trial.known])
@pytest.mark.parametrize("setting", range(len(threads.ASKED)))
def test_what_holds_for_some_threads_is_asked_again_for_others(setting, deciding, monkeypatch):
    made, said = [], [1, 1, 1]
    monkeypatch.setattr(threads, "settings", lambda: tuple(said))
    remembering = deciding(lambda size: made.append(size) or len(made))
    assert remembering(5) == remembering(5) == 1
    said[setting] = 2
    assert remembering(5) == 2
    said[setting] = 1
    assert remembering(5) == 1


def test_what_operators_make_is_known_whether_they_are_timed_or_not():
    made = []
    known = trial.known(lambda size: made.append(size) or len(made))
    with trial.trying(False):
        assert known(1) == 1
    assert [known(1), known(2)] == [1, 2]
    trial.forget_times()
    assert known(1) == 1
    trial.forget()
    assert known(1) == 3


def test_to_know_what_operators_make_nothing_is_timed():
    known = trial.known(trial.are_wanted)
    assert not known() and trial.are_wanted()
