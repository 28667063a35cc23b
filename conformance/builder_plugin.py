"""A pytest plugin that runs Caffe2's own tests with its builder or with ours, and writes down how each fared.

With `--builder optimised` each net is optimised on its way to the engine, however small it is.

    python -m pytest -p builder_plugin --builder ours --outcomes FILE --pyargs caffe2.python.operator_test.gru_test

FILE gets a line of JSON for each test as it ends, so that a crash leaves what came before it; and, for optimised nets,
one for each test with the number of places that each rule has rewritten in it.
"""

import functools
import json
from collections import Counter

import hypothesis
import numpy as np
import pytest
from caffe2.python import gradient_checker, hypothesis_test_util, recurrent

import caffe2_recurrent
from caffe2_recurrent.rewriting.rules import RULES

# Old tests that newer versions of Hypothesis refuse to run: a test called from two classes, examples that take long.
HEALTH_CHECKS = ("differing_executors", "too_slow")
# Between an unrolled net and one with a loop Caffe2 allows 1e-7, as both run the same operators.
EXACT, ROUNDING = 1e-7, 1e-5
# Tests that count what the RNN executor runs, and the rules that take it off.
OF_THE_EXECUTOR = ("test_observer_rnn_executor",)
TAKE_IT_OFF = ("packed_products", "gates_first", "executor_threads", "backward_loop", "unrolled_steps")
# What each rule has rewritten in the test that runs.
rewritten = Counter()


def pytest_addoption(parser):
    group = parser.getgroup("builder of recurrent nets")
    group.addoption("--builder", choices=("caffe2", "ours", "optimised"), required=True)
    group.addoption("--outcomes", required=True, help="file to append to")


def pytest_configure(config):
    settle_hypothesis()
    builder = config.getoption("builder")
    if builder != "caffe2":
        forbid(recurrent.recurrent_net)
        if builder == "optimised":
            allow_rounding(gradient_checker.NetGradientChecker.CompareNets)
            optimise()
        else:
            caffe2_recurrent.install()


def optimise(leaving_out=()):
    """Optimise nets from now on, by all rules but these, which would leave nets of the sizes of tests alone.

    Some tests compare two nets by all of their blobs, so that nothing may depend on what a trial finds.
    """
    rules = [rule.name for rule in RULES if rule.name not in leaving_out]
    caffe2_recurrent.install(optimize=True, rules=rules, even_if_slower=True, trials=False, on_report=count)


def allow_rounding(compare):
    """Let Caffe2's comparison of two nets allow for rounding, where it takes for granted that there is none."""
    compare.__defaults__ = tuple(ROUNDING if default == EXACT else default for default in compare.__defaults__)


def count(report):
    rewritten.update(report.counts)


def settle_hypothesis():
    """Draw the same examples in every run, as many as Caffe2 wants; look for no simpler one where a test fails."""
    # Caffe2's own profile is loaded by an import that its tests have in common: it must come first.
    assert hypothesis_test_util
    checks = [getattr(hypothesis.HealthCheck, name, None) for name in HEALTH_CHECKS]
    hypothesis.settings.register_profile(
        "conformance",
        hypothesis.settings.default,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=[check for check in checks if check is not None],
    )
    hypothesis.settings.load_profile("conformance")
    forget_deadlines(hypothesis.settings)


def forget_deadlines(settings):
    """Let tests that set themselves a deadline take their time: an optimised net takes some to try out what is fast."""
    original = settings.__init__

    @functools.wraps(original)
    def without(self, *parents, **options):
        if "deadline" in options:
            options["deadline"] = None
        original(self, *parents, **options)

    settings.__init__ = without


def forbid(function):
    """Let each call of `function` fail, whoever holds it: a test that passes has not used it."""

    def called(*_, **__):
        raise AssertionError("Caffe2's own builder was called")

    function.__code__, function.__defaults__ = called.__code__, None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    np.random.seed(0)
    if item.config.getoption("builder") == "optimised":
        optimise(leaving_out=TAKE_IT_OFF if item.name in OF_THE_EXECUTOR else ())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or not report.passed:
        name = "::".join([item.module.__name__.rpartition(".")[2], *item.nodeid.split("::")[1:]])
        note(item.config, name, report)
        write(item.config, {"test": name, "rewritten": +rewritten})
        rewritten.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    report = (yield).get_result()
    if not report.passed:
        note(collector.config, collector.path.stem, report)


def note(config, name, report):
    """Append how a test, or reading a file of tests, ended."""
    # Of a skipped test: (file, line, reason).
    detail = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    write(config, {"test": name, "outcome": report.outcome, "detail": detail})


def write(config, line):
    with open(config.getoption("outcomes"), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
