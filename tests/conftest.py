"""What all tests share: empty workspaces, Hypothesis's profiles, and no GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

# The last bit depends on the number of threads, which GlobalInit sets to 1 and without it is that of the cores. Tests
# compare processes, and so that it is the same in all of them it is set before any library reads it.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import coverage  # noqa: E402
import hypothesis  # noqa: E402
import pytest  # noqa: E402
from caffe2.python import core, workspace  # noqa: E402

# A shell has what runs in its background ignore Ctrl-C, and all that is started there; some tests are about it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Building a net takes as long as it takes: a deadline would only measure the machine.
hypothesis.settings.register_profile("default", deadline=None)
# The same examples on every run, so that a red build is red again.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of steps by oneDNN in all sizes: also those at which torch 1.7's would spread what is no number."""
    from caffe2_recurrent.rewriting.products import separate_rows

    monkeypatch.setattr(separate_rows, "in_steps", lambda way, *_: True)


@pytest.fixture
def trials_forgotten() -> Iterator[None]:
    """What has been asked of this Caffe2 is asked anew, in the test and behind it."""
    from caffe2_recurrent.rewriting.trials import trial

    trial.forget()
    yield
    trial.forget()


@pytest.fixture
def backward_loops() -> None:
    """Backward passes may become loops of their own; elsewhere tests look at loops and their gradients as one."""


@pytest.fixture
def unrolled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may be written out one behind the other; elsewhere tests look at the loop that they are.

    No trial has them keep filters, which cannot be written out.
    """
    from caffe2_recurrent.rewriting.products import kept_filters

    monkeypatch.setattr(kept_filters, "are_right", lambda inner, outer: False)


@pytest.fixture
def chained_steps() -> None:
    """The operators of a step may be in a net of their own; elsewhere tests look at those of the step."""


# By the rule that has them, what a test has to ask for.
ASKED_FOR = {
    "backward_loop": "backward_loops",
    "unrolled_steps": "unrolled_steps",
    "chained_steps": "chained_steps",
}


@pytest.fixture(autouse=True)
def no_rules_that_are_not_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from caffe2_recurrent.rewriting.rules import RULES

    for rule in RULES:
        if rule.name in ASKED_FOR and ASKED_FOR[rule.name] not in request.fixturenames:
            monkeypatch.setattr(type(rule), "sites", lambda self, loop: iter(()))


@pytest.fixture
def nnpack_products() -> None:
    """Products of steps may be NNPACK's; elsewhere tests look at those of MKL and oneDNN."""


@pytest.fixture(autouse=True)
def no_nnpack_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from caffe2_recurrent.rewriting.products import nnpack

    if "nnpack_products" not in request.fixturenames:
        monkeypatch.setattr(nnpack, "is_missing", lambda: True)


@pytest.fixture
def weights_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are known by their names, where nothing else tells them, as a dimension may be the batch's size."""
    from caffe2_recurrent.loops.sizes import Sizes

    monkeypatch.setattr(Sizes, "is_parameter", lambda self, blob: blob.endswith(("_w", "_b")))


@pytest.fixture
def trials_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs are called in trials as they are in the net, for tests that look for them there."""
    from caffe2_recurrent.rewriting.trials.numbering import Numbering

    monkeypatch.setattr(Numbering, "blob", lambda self, name: name)


@pytest.fixture
def whole_trials() -> None:
    """Trials take the time in which they find what is faster; elsewhere they take less, and are wrong more often."""


@pytest.fixture(autouse=True)
def short_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from caffe2_recurrent.rewriting.trials import timing, trial

    if "whole_trials" not in request.fixturenames:
        for name in ("SHORT", "PATIENT"):
            monkeypatch.setattr(trial, name, 1e-3)
        for name in ("MOST", "SETTLING", "WARMING"):
            monkeypatch.setattr(timing, name, 1e-3)


WITH, WITHOUT = (["tests", "--caffe2_rnn_executor={}".format(value)] for value in (1, 0))


@pytest.fixture(autouse=True)
def fresh_workspace() -> Iterator[None]:
    """Give each test an empty workspace, and leave none of its blobs behind."""
    # The examples, of which tests run some in this process, take the RNN executor off for the whole of it, and the
    # benchmarks have the calling thread run chains.
    workspace.GlobalInit([*WITH, "--caffe2_net_async_run_root_tasks_inline=0"])
    workspace.ResetWorkspace()
    yield
    workspace.ResetWorkspace()


@pytest.fixture(autouse=True)
def fresh_net_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caffe2 tries one number after the other for the name of a new net; of thousands of tests each took longer."""
    monkeypatch.setattr(core.Net, "_net_names_used", set())


@pytest.fixture
def executor_in_created_nets() -> None:
    """Nets that are created have the RNN executor too; elsewhere only those have it that are run once."""


@pytest.fixture(autouse=True)
def no_executor_in_created_nets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's race is between two runs of one net, so that there is none where each run makes the net anew."""
    if "executor_in_created_nets" in request.fixturenames:
        return
    create_net = workspace.C.create_net

    def without(*arguments: object) -> object:
        workspace.GlobalInit(WITHOUT)
        try:
            return create_net(*arguments)
        finally:
            workspace.GlobalInit(WITH)

    monkeypatch.setattr(workspace.C, "create_net", without)


def pytest_collection_finish() -> None:
    # Thousands of tests stay until the end; to look through them again and again takes a twentieth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# Of so many cases of a test, one is traced, and none that is drawn or is about code that is not measured: to trace all
# takes a fifth to a quarter of the time of all tests again.
CASES_PER_TRACED = 16
IS_UNTRACED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = workspace.has_gpu_support and workspace.NumCudaDevices() > 0
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="this Caffe2 has no GPU to use"))
        test = item.nodeid.split("[")[0]
        is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        is_about_others = item.get_closest_marker("untraced") is not None
        item.stash[IS_UNTRACED] = is_drawn or is_about_others or seen[test] % CASES_PER_TRACED > 0
        seen[test] += 1


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    # Not by pytest-cov's `no_cover`: with several processes that goes back to another tracer below its own.
    tracer = sys.gettrace()
    # Where nothing is measured, it is a debugger's.
    if item.stash[IS_UNTRACED] and coverage.Coverage.current() is not None:
        sys.settrace(None)
    yield
    sys.settrace(tracer)
