"""`timing`: operators run and timed in workspaces of their own. Never how long they take."""

import itertools
import math

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.rewriting.trials import timing
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject, prepared
from caffe2_recurrent.scratch_workspace import inside
from onednn_support import leaving_no_trace

pytestmark = pytest.mark.usefixtures("whole_trials")
SHAPES = {"x": (5, 4), "w": (3, 4), "b": (3,)}
PRODUCT = core.CreateOperator("FC", ["x", "w", "b"], ["y"])


@pytest.fixture
def own():
    """The workspace of a caller, with a blob by a name that the trials use and a net."""
    before = workspace.CurrentWorkspace()
    workspace.SwitchWorkspace("callers", True)
    workspace.FeedBlob("x", np.arange(3.0))
    net = core.Net("trial_step")
    net.Copy("x", "copied")
    workspace.CreateNet(net)
    yield net
    assert workspace.CurrentWorkspace() == "callers"
    # As it was created, and not one of a trial's.
    workspace.RunNet(net)
    np.testing.assert_array_equal(workspace.FetchBlob("copied"), np.arange(3.0))
    workspace.ResetWorkspace()
    workspace.SwitchWorkspace(before)


def seconds(subject):
    with leaving_no_trace(), prepared(subject) as timer:
        return timer(math.inf)


def test_times_of_a_step_and_of_what_is_done_once(own):
    found = seconds(Subject([core.CreateOperator("Tanh", ["y"], ["z"])], SHAPES, once=[PRODUCT]))
    assert found.once > 0 and found.step > 0


def test_nothing_to_do_once(own):
    found = seconds(Subject([PRODUCT], SHAPES))
    assert found.once == 0 and found.step > 0


def test_what_is_kept_is_there_and_takes_no_time(own):
    found = seconds(Subject([core.CreateOperator("Tanh", ["y"], ["z"])], SHAPES, kept=[PRODUCT]))
    assert found.once == 0 and found.step > 0


@pytest.mark.parametrize("anew, once", [(False, 0.0), (True, 0.5)])
def test_operators_that_are_made_anew_count(anew, once, own, monkeypatch):
    """In what is done once for all steps."""
    monkeypatch.setattr(timing, "_making", lambda subject: 0.5)
    assert seconds(Subject([PRODUCT], SHAPES, anew=anew)).once == once


def test_operators_are_made_to_be_timed(own, monkeypatch):
    """With those that a step has beside them; what a run takes when they have run before is taken off."""
    made, create = [], timing._create

    def counted(name, operators, overwrite=False):
        made.append((name, len(operators), overwrite))
        return create(name, operators, overwrite)

    monkeypatch.setattr(timing, "_create", counted)
    assert seconds(Subject([PRODUCT], SHAPES, anew=True)).once >= 0
    assert made.count(("trial_anew", 1 + timing.OTHERS, True)) == timing.ROUNDS


def test_subjects_lie_side_by_side(own):
    """Each in a workspace of its own, which another one gets once it is free."""
    made = []
    for _ in range(2):
        with leaving_no_trace():
            with prepared(Subject([PRODUCT], SHAPES)) as one, prepared(Subject([PRODUCT], {**SHAPES, "x": (9, 4)})):
                with inside("callers"):
                    assert one(math.inf).step > 0
                made.append({name for name in workspace.Workspaces() if name.startswith(timing.WORKSPACE)})
            with pytest.raises(RuntimeError):
                one(math.inf)
    assert made[0] == made[1] and len(made[0]) >= 2


def test_what_is_timed_may_be_timed_again(own):
    with leaving_no_trace(), prepared(Subject([PRODUCT], SHAPES)) as timer:
        found = [timer(math.inf) for _ in range(3)]
    assert all(seconds.step > 0 for seconds in found)


def test_the_size_of_a_subject():
    assert Subject([], SHAPES).size == 4 * (5 * 4 + 3 * 4 + 3)
    assert Subject([], {}).size == 0


# Of 32 KiB each.
SLICED = {"a": (1, 32, 256), "b": (3,)}


@pytest.mark.parametrize(
    "slices, steps, turns",
    [
        ((), 50, 1),
        (("b",), 50, 1),
        (("a",), 1, 1),
        (("a",), 3, 3),
        (("a",), 500, timing.MOST_TURNS),
        (("a", "b"), 5, 5),
    ],
)
def test_slices_come_from_as_far_as_in_a_loop(slices, steps, turns):
    subject = Subject([core.CreateOperator("Add", ["a", "b"], ["y"])], SLICED, slices=slices, steps=steps)
    assert subject.turns == turns
    reads = [tuple(operator.input) for operator in subject.operators]
    assert reads == [
        tuple("{}_{}".format(blob, turn) if turn and blob in slices else blob for blob in "ab") for turn in range(turns)
    ]
    assert set(subject.inputs) == {blob for read in reads for blob in read}
    assert subject.size == 4 * sum(np.prod(SLICED[name[0]]) for name in subject.inputs)


def test_large_slices_are_few():
    assert Subject([], {"a": (1, 512, 2048)}, slices=("a",), steps=50).turns == 1
    assert Subject([], {"a": (1, 128, 2048)}, slices=("a",), steps=50).turns == 4


def test_the_time_of_a_step_is_that_of_one_of_several(monkeypatch):
    """And what is of interest is that of one, too."""
    asked = []

    def timed(net, of_interest, is_new, runs):
        asked.append(of_interest)
        return 6.0

    monkeypatch.setattr(timing, "_timed", timed)
    subject = Subject([core.CreateOperator("Copy", ["a"], ["y"])], SLICED, slices=("a",), steps=3)
    with leaving_no_trace(), prepared(subject) as timer:
        assert timer(5.0) == Seconds(0.0, 2.0)
    assert asked == [15.0]


def test_steps_with_slices_of_their_own_run(own):
    found = seconds(Subject([core.CreateOperator("Add", ["a", "a"], ["y"])], SLICED, slices=("a",), steps=3))
    assert found.step > 0


NONSENSE = caffe2_pb2.OperatorDef(type="Nonsense")
CANNOT_RUN = {
    "unknown": ([NONSENSE], (), "Cannot create operator of type 'Nonsense'"),
    "unknown, once": ([PRODUCT], [NONSENSE], "Cannot create operator of type 'Nonsense'"),
    "no input": ([core.CreateOperator("Tanh", ["nowhere"], ["z"])], (), "non-existing input blob: nowhere"),
    "sizes": ([core.CreateOperator("FC", ["x", "x", "b"], ["y"])], (), "Error from operator"),
}


@pytest.mark.parametrize("step, once, reason", CANNOT_RUN.values(), ids=list(CANNOT_RUN))
def test_what_cannot_run(step, once, reason, own):
    with pytest.raises(RuntimeError, match=reason):
        seconds(Subject(step, SHAPES, once))


def test_random_numbers_of_the_caller_stay():
    np.random.seed(3)
    expected = np.random.rand(4)
    np.random.seed(3)
    seconds(Subject([PRODUCT], SHAPES))
    np.testing.assert_array_equal(np.random.rand(4), expected)


def test_inputs(monkeypatch):
    """Of the shapes given, float32, the same each time, and neither all alike nor large."""
    found = []

    def timed(net, of_interest, is_new, runs):
        found.append({blob: workspace.FetchBlob(blob) for blob in SHAPES})
        return 1.0

    monkeypatch.setattr(timing, "_timed", timed)
    for _ in range(2):
        assert seconds(Subject([PRODUCT], SHAPES)) == Seconds(0.0, 1.0)
    for blob, shape in SHAPES.items():
        assert found[0][blob].shape == shape and found[0][blob].dtype == np.float32
        assert np.ptp(found[0][blob]) > 0 and np.abs(found[0][blob]).max() <= 1
        np.testing.assert_array_equal(found[0][blob], found[1][blob])


ATENS = core.CreateOperator("ATen", ["x"], ["z"], operator="tanh")


@pytest.mark.parametrize("pages", [0, 1, 20])
def test_what_allocates_is_run_until_it_gets_no_new_memory(pages, monkeypatch):
    monkeypatch.setattr(timing, "SETTLING", 60)
    assert nets_run(Subject([ATENS], SHAPES), pages, monkeypatch) == (pages + timing.SETTLED) * ["trial_step"]


def test_few_new_pages_are_none(monkeypatch):
    found = nets_run(Subject([ATENS], SHAPES), 5, monkeypatch, each=timing.FEW_PAGES - 1)
    assert len(found) == timing.SETTLED


def test_what_is_done_once_settles_too(monkeypatch):
    found = nets_run(Subject([PRODUCT], SHAPES, once=[ATENS]), 0, monkeypatch)
    assert found == timing.SETTLED * ["trial_once"]


def test_what_keeps_its_memory_is_not_run_before_it_is_timed(monkeypatch):
    assert nets_run(Subject([PRODUCT], SHAPES), 5, monkeypatch) == []


def test_settling_has_its_time(monkeypatch):
    monkeypatch.setattr(timing, "SETTLING", 0)
    assert nets_run(Subject([ATENS], SHAPES), 5, monkeypatch) == []


def nets_run(subject, runs, monkeypatch, each=100):
    """Those that are run before any is timed, if the first `runs` get `each` new pages."""
    seen, run_net = [], workspace.RunNet

    def run(net):
        seen.append(net)
        return run_net(net)

    # Without the run before, which is for the results of what is done once.
    monkeypatch.setattr(timing, "_pages", lambda: each * min(len(seen) - 1, runs))
    monkeypatch.setattr(workspace, "RunNet", run)
    with leaving_no_trace(), prepared(subject):
        return seen[1:]


def test_pages_are_counted():
    before = timing._pages()
    np.ones(1 << 26, np.uint8)
    assert timing._pages() > before


def test_pages_where_nobody_counts_them(monkeypatch):
    monkeypatch.setattr(timing, "resource", None)
    assert timing._pages() == 0


def timed(times, monkeypatch, of_interest=math.inf, **options):
    """What is found of the `times` that runs are to take, how many runs each was of, and which times were left."""
    asked, left = [], iter(times)
    monkeypatch.setattr(timing, "_time", lambda net, runs: asked.append(runs) or next(left))
    monkeypatch.setattr(timing, "_warmed_up", lambda net, first: timing._time(net, 1))
    with prepared(Subject([PRODUCT], SHAPES, **options)) as timer:
        return timer(of_interest).step, asked, list(left)


# Behind the first run, which does not count.
@pytest.mark.parametrize(
    "times, expected, runs",
    [
        # One run is enough for the clock: a few rounds of it.
        ([4e-4, 5e-4, 3e-4], 3e-4, [1] + [1] * 2),
        # So short that a round takes many.
        ([1e-6] + [2e-6] * 2, 1e-6, [1] + [100] * 2),
        ([9e-5] + [2e-4, 8e-5], 8e-5, [1] + [3] * 2),
        # So long that few rounds must do, or none.
        ([0.2], 0.2, [1]),
        ([0.04], 0.04, [1]),
        ([0.02, 0.015], 0.015, [1, 1]),
        ([0.01, 0.02, 0.005], 0.005, [1, 1, 1]),
        ([0.0] + [0.0] * 2, 0.0, [1] + [100] * 2),
    ],
)
@pytest.mark.parametrize("first", [0.0, 0.3])
def test_the_best_of_some_rounds(first, times, expected, runs, monkeypatch):
    assert timed([first, *times], monkeypatch) == (expected, [1, *runs], [])


@pytest.mark.parametrize(
    "times, expected, runs",
    [
        # As many runs as fit into the time there is, each by itself.
        ([0.03, 0.05, 0.01, 0.02], 0.02, [1] * 4),
        ([1e-6] + [3e-6] * 49 + [2e-6] + [1e-6] * 50, 1.5e-6, [1] * 101),
        # The one behind the first counts for nothing either, but where it takes long.
        ([0.2, 0.4], 0.4, [1, 1]),
        ([0.0] * 101, 0.0, [1] * 101),
    ],
)
def test_the_usual_time_of_what_wakes_threads(times, expected, runs, monkeypatch):
    found = timed([0.3, *times], monkeypatch, wakes_threads=True)
    assert found == (pytest.approx(expected), [1, *runs], [])


@pytest.mark.parametrize("wakes_threads", [False, True])
@pytest.mark.parametrize(
    "times, of_interest, is_timed_better",
    [
        # In the first run of all, loops make their steps.
        ([0.9, 0.3], 0.29, False),
        ([0.9, 0.28, 0.2], 0.29, True),
        ([0.3, 0.2], 0.31, True),
        # It takes no time to run it again.
        ([timing.MOST, 0.2], 0.001, True),
    ],
)
def test_what_is_of_no_interest_is_timed_no_better(times, of_interest, is_timed_better, wakes_threads, monkeypatch):
    # The usual time is had of others than those that were to tell.
    given = [*times, 0.2] if is_timed_better and wakes_threads else times
    assert timed(given, monkeypatch, of_interest, wakes_threads=wakes_threads) == (given[-1], [1] * len(given), [])


def test_what_is_of_no_interest_later_is_run_once(monkeypatch):
    left = iter([0.1, 0.05, 0.3, 0.3])
    monkeypatch.setattr(timing, "_time", lambda net, runs: next(left))
    monkeypatch.setattr(timing, "_warmed_up", lambda net, first: timing._time(net, 1))
    with prepared(Subject([PRODUCT], SHAPES)) as timer:
        assert timer(math.inf).step == 0.05
        assert timer(0.29).step == 0.3
    assert list(left) == [0.3]


def test_what_is_done_once_is_always_of_interest(monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "_timed", lambda *arguments: asked.append(arguments[:3]) or 0.5)
    with prepared(Subject([PRODUCT], SHAPES, once=[PRODUCT])) as timer:
        for _ in range(2):
            assert timer(0.1) == Seconds(0.5, 0.5)
    # What has been timed before is warm.
    assert asked == [
        (net, most, is_new) for is_new in (True, False) for net, most in (("trial_once", math.inf), ("trial_step", 0.1))
    ]


def warmed_up(times, monkeypatch, each=0.0):
    """The best of the `times` of runs, and how many were left; the clock says that each has taken `each`."""
    clock, left = itertools.count(0.0, each), iter(times)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "_time", lambda net, runs: next(left))
    best = timing._warmed_up("net", 2.0)
    return best, len(list(left))


def test_a_net_runs_until_its_runs_get_no_faster(monkeypatch):
    falling = [2.1, 1.8, 1.6, 1.7, 1.5, 1.2, 1.3, 1.2]
    assert warmed_up([*falling, *[1.19] * 3, 1.0, 1.0], monkeypatch) == (1.19, 2)
    assert warmed_up([2.0] * timing.WARM, monkeypatch) == (2.0, 0)
    # A little faster is not faster.
    assert warmed_up([1.99, 1.98, 1.97, 1.97, 1.97, 1.0], monkeypatch) == (1.97, 1)


def test_getting_warm_has_its_time(monkeypatch):
    falling = [2.0 * 0.9**run for run in range(20)]
    assert warmed_up(falling, monkeypatch, each=timing.WARMING / 4.5) == (falling[4], 15)
    assert warmed_up(falling, monkeypatch, each=1.0) == (falling[0], 19)


def test_only_what_is_new_has_to_get_warm(monkeypatch):
    warmed = []
    monkeypatch.setattr(timing, "_warmed_up", lambda net, first: warmed.append(net) or first)
    with prepared(Subject([PRODUCT], SHAPES, once=[PRODUCT])) as timer:
        for _ in range(2):
            timer(math.inf)
    assert warmed == ["trial_once", "trial_step"]
