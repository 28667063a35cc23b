"""Caffe2's own tests pass with our builder, and the comparison that says so sees what does not."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import hypothesis
import pytest
from caffe2.python import gradient_checker, recurrent

CONFORMANCE = Path(__file__).resolve().parent.parent / "conformance"
sys.path.insert(0, str(CONFORMANCE))

import builder_plugin  # noqa: E402
import run  # noqa: E402

TESTS = """
import pytest
from caffe2.python import core, recurrent

OURS = recurrent.recurrent_net.__module__.startswith("caffe2_recurrent")
held_before_collection = recurrent.recurrent_net

def test_both():
    pass

def test_neither():
    assert False, "as expected"

def test_caffe2s_only():
    assert not OURS, "planted"

def test_ours_only():
    assert OURS

def test_skipped():
    pytest.skip("for a reason")

class TestInAClass:
    def test_builders(self):
        assert held_before_collection is recurrent.recurrent_net

@pytest.fixture
def clean_up():
    yield
    assert not OURS, "planted"

def test_clean_up(clean_up):
    pass
"""


def result(**outcomes):
    return {test: {"outcome": outcome, "detail": "detail of " + test} for test, outcome in outcomes.items()}


def row(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line[len(name) :].split()


@pytest.mark.slow
def test_all_but_the_slowest_tests_of_caffe2_pass_with_ours_and_optimised(capsys):
    status = run.main(["--quick"])
    text = capsys.readouterr().out
    assert status == 0, text
    for name in run.OF_RECURRENT_NETS:
        assert "\n" + name in text
    # Nothing has failed that Caffe2's builder could pass.
    assert row(text, "test ") == ["ours", "optimised"]
    assert row(text, "recurrent_network_test RecurrentNetworkTest test_mul ") == ["passed"] * 2
    # 22 with torch 1.10.2; older Caffe2s have tests that the Hypothesis of today cannot run with either builder.
    for column in ("ours", "optimised"):
        assert int(re.search(column + r": (\d+) passed", text).group(1)) >= 12
    for rule in ("parameter_gradients", "transposed_weights", "lstm_unit", "zero_gradients", "forward_links"):
        assert int(re.search(rule + r": (\d+) in \d+\n", text).group(1)) > 0


@pytest.mark.slow
def test_a_regression_is_seen(tmp_path, capsys):
    path = tmp_path / "planted_test.py"
    path.write_text(TESTS, encoding="utf-8")
    assert run.main([str(path)]) == 1
    text = capsys.readouterr().out
    table = text.split("\n\n")[0]
    assert row(table, "planted_test test_both") == ["passed"] * 3
    assert row(table, "planted_test test_neither") == ["failed"] * 3
    assert row(table, "planted_test test_caffe2s_only") == ["passed", "failed", "failed", "<-", "regression"]
    assert row(table, "planted_test test_ours_only") == ["failed", "passed", "passed"]
    assert row(table, "planted_test test_skipped") == ["skipped"] * 3 + ["Skipped:", "for", "a", "reason"]
    assert row(table, "planted_test TestInAClass test_builders") == ["passed"] * 3
    assert row(table, "planted_test test_clean_up") == ["passed", "failed", "failed", "<-", "regression"]
    assert "AssertionError: planted" in text.split("planted_test::test_caffe2s_only, ours:")[1]
    counted = "3 passed, 3 failed, 1 skipped"
    assert (
        "  none\nCaffe2's: 4 passed, 2 failed, 1 skipped; ours: {0}; optimised: {0}; regressions: 2".format(counted)
        in text
    )


@pytest.mark.slow
def test_a_crash_with_ours_is_a_regression_and_one_with_caffe2s_an_error(tmp_path, capsys):
    path = tmp_path / "crash_test.py"
    for ours, status in ((True, 1), (False, 2)):
        path.write_text(
            TESTS + "def test_crash():\n    import os\n    if OURS is {}:\n        os._exit(77)\n".format(ours),
            encoding="utf-8",
        )
        assert run.main([str(path)]) == status
        found = capsys.readouterr()
        if ours:
            table = found.out.split("\n\n")[0]
            assert row(table, "crash_test test_crash") == ["passed"] + ["no", "result"] * 2 + ["<-", "regression"]
        else:
            assert found.err.endswith("The run with Caffe2's builder ended with 77.\n")


@pytest.mark.slow
def test_a_file_that_cannot_be_read_has_failed(tmp_path, capsys):
    path = tmp_path / "broken_test.py"
    path.write_text("import no_such_module\n", encoding="utf-8")
    assert run.main([str(path)]) == 0
    assert row(capsys.readouterr().out.split("\n\n")[0], "broken_test") == ["failed"] * 3


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended(tmp_path, capsys):
    path = tmp_path / "endless_test.py"
    path.write_text("def test_endless():\n    import time\n    time.sleep(600)\n", encoding="utf-8")
    assert run.main(["--limit", "3", str(path)]) == 2
    assert capsys.readouterr().err.endswith("The run with Caffe2's builder ended with -9.\n")


def test_regressions():
    theirs = result(a="passed", b="passed", c="passed", d="failed", e="skipped", f="passed")
    ours = result(a="passed", b="failed", c="skipped", d="failed", e="failed", g="failed")
    optimised = result(a="failed", b="passed", c="passed", d="passed", f="passed")
    outcomes = {"caffe2": theirs, "ours": ours, "optimised": optimised}
    assert run.regressions(outcomes) == ["a", "b", "c", "f"]
    assert [run.failing(outcomes, test) for test in "abd"] == [["optimised"], ["ours"], []]


def test_outcomes_are_read_line_by_line_and_failures_stay(tmp_path):
    path = tmp_path / "outcomes"
    assert run.read_outcomes(path) == {}
    lines = ['{{"test": "a", "outcome": "{}", "detail": ""}}'.format(kind) for kind in ("passed", "failed", "passed")]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert run.read_outcomes(path) == {"a": {"outcome": "failed", "detail": ""}}


def test_what_the_rules_did_is_added_up(tmp_path):
    path = tmp_path / "outcomes"
    assert run.read_rewritten(path) == {}
    assert run.rules_summary({}).endswith("\n  none")
    lines = ['{"test": "a", "outcome": "passed", "detail": ""}', '{"test": "a", "rewritten": {"x": 2, "y": 1}}']
    path.write_text("\n".join([*lines, '{"test": "b", "rewritten": {"x": 3}}']), encoding="utf-8")
    found = run.read_rewritten(path)
    assert found == {"x": {"places": 5, "tests": 2}, "y": {"places": 1, "tests": 1}}
    assert run.rules_summary(found).endswith(":\n  x: 5 in 2\n  y: 1 in 1")
    assert run.read_outcomes(path) == {"a": {"outcome": "passed", "detail": ""}}


@pytest.mark.slow
def test_what_fails_with_ours_is_run_with_caffe2s(tmp_path, monkeypatch, capsys):
    (tmp_path / "planted_test.py").write_text(TESTS, encoding="utf-8")
    monkeypatch.setattr(run, "known_tests", lambda quick: [str(tmp_path / "planted_test.py")])
    assert run.main(["--quick"]) == 1
    table = capsys.readouterr().out.split("\n\n")[0]
    assert row(table, "planted_test test_caffe2s_only") == ["passed", "failed", "failed", "<-", "regression"]


@pytest.mark.slow
def test_known_tests_in_which_nothing_is_rewritten_say_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "idle_test.py").write_text("def test_idle():\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(run, "known_tests", lambda quick: [str(tmp_path / "idle_test.py")])
    assert run.main(["--quick"]) == 1
    assert "regressions: 0" in capsys.readouterr().out


def test_rounding_is_allowed_where_caffe2_compares_two_nets():
    def compare(nets, values=None, threshold=1e-7, images=False):
        return values, threshold, images

    builder_plugin.allow_rounding(compare)
    assert compare([]) == (None, builder_plugin.ROUNDING, False)
    signature = inspect.signature(gradient_checker.NetGradientChecker.CompareNets)
    assert signature.parameters["threshold"].default == builder_plugin.EXACT


def test_deadlines_are_forgotten(monkeypatch):
    monkeypatch.setattr(hypothesis.settings, "__init__", hypothesis.settings.__init__)
    before = hypothesis.settings(deadline=7)
    builder_plugin.forget_deadlines(hypothesis.settings)
    after = hypothesis.settings(before, max_examples=3, deadline=7)
    assert (before.deadline.microseconds, after.deadline, after.max_examples) == (7000, None, 3)


def test_tests_that_this_caffe2_lacks_or_that_need_what_is_absent_are_left_out(monkeypatch):
    known = run.known_tests(quick=True)
    assert known == [run.OPERATOR_TESTS + name for name in run.OF_RECURRENT_NETS]
    monkeypatch.setattr(run, "OF_RECURRENT_NETS", ("gru_test", "no_such_test"))
    monkeypatch.setattr(run, "ALSO", {"caffe2.python.crf_test": ("no_such_module",), "caffe2.python.core": ()})
    assert run.known_tests(quick=False) == [run.OPERATOR_TESTS + "gru_test", "caffe2.python.core"]


def test_a_forbidden_function_fails_for_whoever_holds_it():
    def builder(net, timestep=None):
        return net

    held = builder
    builder_plugin.forbid(builder)
    for arguments in ([], [1], [1, 2]):
        with pytest.raises(AssertionError, match="Caffe2's own builder was called"):
            held(*arguments)


def test_none_of_this_changes_caffe2_here():
    importlib.reload(builder_plugin)
    assert recurrent.recurrent_net.__code__.co_name == "recurrent_net"
