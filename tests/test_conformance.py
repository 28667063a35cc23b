"""Caffe2's own tests pass with our builder, and the comparison that says so sees what does not."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from caffe2.python import recurrent

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
def test_all_but_the_slowest_tests_of_caffe2_pass_with_ours(capsys):
    status = run.main(["--quick"])
    text = capsys.readouterr().out
    assert status == 0, text
    for name in run.OF_RECURRENT_NETS:
        assert "\n" + name in text
    assert row(text, "recurrent_network_test RecurrentNetworkTest test_mul ") == ["passed", "passed"]
    passed = int(re.search(r"ours: (\d+) passed", text).group(1))
    # 23 with torch 1.10.2; older Caffe2s have tests that the Hypothesis of today cannot run with either builder.
    assert passed >= 12


@pytest.mark.slow
def test_a_regression_is_seen(tmp_path, capsys):
    path = tmp_path / "planted_test.py"
    path.write_text(TESTS, encoding="utf-8")
    assert run.main([str(path)]) == 1
    text = capsys.readouterr().out
    table = text.split("\n\n")[0]
    assert row(table, "planted_test test_both") == ["passed", "passed"]
    assert row(table, "planted_test test_neither") == ["failed", "failed"]
    assert row(table, "planted_test test_caffe2s_only") == ["passed", "failed", "<-", "regression"]
    assert row(table, "planted_test test_ours_only") == ["failed", "passed"]
    assert row(table, "planted_test test_skipped") == ["skipped", "skipped", "Skipped:", "for", "a", "reason"]
    assert row(table, "planted_test TestInAClass test_builders") == ["passed", "passed"]
    assert row(table, "planted_test test_clean_up") == ["passed", "failed", "<-", "regression"]
    assert "AssertionError: planted" in text.split("planted_test::test_caffe2s_only with our builder:")[1]
    assert (
        "Caffe2's builder: 4 passed, 2 failed, 1 skipped; ours: 3 passed, 3 failed, 1 skipped; regressions: 2" in text
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
            assert row(table, "crash_test test_crash") == ["passed", "no", "result", "<-", "regression"]
        else:
            assert found.err.endswith("The run with Caffe2's builder ended with 77.\n")


@pytest.mark.slow
def test_a_file_that_cannot_be_read_has_failed(tmp_path, capsys):
    path = tmp_path / "broken_test.py"
    path.write_text("import no_such_module\n", encoding="utf-8")
    assert run.main([str(path)]) == 0
    assert row(capsys.readouterr().out.split("\n\n")[0], "broken_test") == ["failed", "failed"]


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended(tmp_path, capsys):
    path = tmp_path / "endless_test.py"
    path.write_text("def test_endless():\n    import time\n    time.sleep(600)\n", encoding="utf-8")
    assert run.main(["--limit", "3", str(path)]) == 2
    assert capsys.readouterr().err.endswith("The run with Caffe2's builder ended with -9.\n")


def test_regressions():
    theirs = result(a="passed", b="passed", c="passed", d="failed", e="skipped", f="passed")
    ours = result(a="passed", b="failed", c="skipped", d="failed", e="failed", g="failed")
    assert run.regressions(theirs, ours) == ["b", "c", "f"]


def test_outcomes_are_read_line_by_line_and_failures_stay(tmp_path):
    path = tmp_path / "outcomes"
    assert run.read_outcomes(path) == {}
    lines = ['{{"test": "a", "outcome": "{}", "detail": ""}}'.format(kind) for kind in ("passed", "failed", "passed")]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert run.read_outcomes(path) == {"a": {"outcome": "failed", "detail": ""}}


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
