"""Caffe2's own tests of recurrent nets, run where they are installed: with its builder, with ours, with ours optimised.

Prints how each test fared with each. A test that passes with Caffe2's builder must pass with ours, and with every net
optimised: the exit status is 1 where one does not, or where no rule has found anything to rewrite in all that is known;
2 where the run with Caffe2's builder itself came to nothing.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from caffe2_recurrent import installation

HERE = Path(__file__).resolve().parent
# Each with the head of its column.
BUILDERS = {"caffe2": "Caffe2's", "ours": "ours", "optimised": "optimised"}
OPERATOR_TESTS = "caffe2.python.operator_test."
OF_RECURRENT_NETS = (
    "basic_rnn_test",
    "cudnn_recurrent_test",
    "gru_test",
    "recurrent_net_executor_test",
    "recurrent_network_test",
    "rnn_cell_test",
)
# Others that build loops, with what they import beside Caffe2.
ALSO = {
    "caffe2.python.crf_viterbi_test": (),
    "caffe2.python.hypothesis_test::TestOperators::test_elman_recurrent_network": (),
    "caffe2.python.models.seq2seq.seq2seq_beam_search_test": ("networkx",),
    "caffe2.python.models.seq2seq.seq2seq_model_helper_test": (),
    "caffe2.python.observer_test": (),
    "caffe2.python.operator_test.crf_test": ("scipy",),
}
# Most of the time; the shorter tests build the same cells.
SLOW = (
    "test_lstm_equal_simplenet",
    "test_lstm_with_coverage_attention",
    "test_lstm_with_recurrent_attention",
    "test_lstm_with_regular_attention",
    "test_multi_lstm",
)
QUICK = "leave out the slowest, all that is not about cells, and Caffe2's builder where nothing fails with ours"
SHOWN_LINES = 30


def main(arguments=None):
    """Run, compare, print; returns the exit status."""
    options = read(arguments)
    started = time.time()
    until = started + options.limit
    with tempfile.TemporaryDirectory() as folder:
        statuses = run(("ours", "optimised") if options.quick else BUILDERS, options, Path(folder), until)
        # What passes with ours is no regression, whatever it does with Caffe2's.
        if "caffe2" not in statuses and any(statuses.values()):
            statuses.update(run(("caffe2",), options, Path(folder), until))
        if statuses.get("caffe2", 0) not in (0, 1):
            print((Path(folder) / "caffe2.log").read_text(encoding="utf-8"), file=sys.stderr)
            print("The run with Caffe2's builder ended with {}.".format(statuses["caffe2"]), file=sys.stderr)
            return 2
        ran = [builder for builder in BUILDERS if builder in statuses]
        outcomes = {builder: read_outcomes(Path(folder) / (builder + ".json")) for builder in ran}
        logs = {builder: (Path(folder) / (builder + ".log")).read_text(encoding="utf-8") for builder in ran}
        rewritten = read_rewritten(Path(folder) / "optimised.json")
    print(table(outcomes))
    for test in regressions(outcomes):
        for builder in failing(outcomes, test):
            found = outcomes[builder]
            detail = shortened(found[test]["detail"] if test in found else logs[builder])
            print("\n{}, {}:\n{}".format(test, BUILDERS[builder], detail))
    print("\n{}\n{} in {:.0f} s".format(rules_summary(rewritten), summary(outcomes), time.time() - started))
    idle = not rewritten and not options.chosen
    return 1 if regressions(outcomes) or idle else 0


def read(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=QUICK)
    parser.add_argument("tests", nargs="*", help="modules, files or pytest's names of tests (default: all known)")
    parser.add_argument("--limit", type=float, default=1200, metavar="S", help="stop after so many seconds (1200)")
    options = parser.parse_args(arguments)
    options.chosen = bool(options.tests)
    options.tests = options.tests or known_tests(options.quick)
    return options


def known_tests(quick):
    """The tests that this Caffe2 comes with and that can be imported here."""
    names = [OPERATOR_TESTS + name for name in OF_RECURRENT_NETS]
    if not quick:
        names += [name for name, needed in ALSO.items() if all(map(importlib.util.find_spec, needed))]
    above = Path(installation.caffe2_place()).parent
    return [name for name in names if (above / (name.split("::")[0].replace(".", "/") + ".py")).exists()]


def run(builders, options, folder, until):
    """Run the tests with each of the builders, side by side; returns how the processes ended."""
    running = {builder: start(builder, options, folder) for builder in builders}
    for process in running.values():
        wait(process, until)
    return {builder: process.returncode for builder, process in running.items()}


def start(builder, options, folder):
    """Start pytest with one of the builders, in a folder of its own; returns the process."""
    home = folder / (builder + "_run")
    home.mkdir()
    # Settings of the project that we are called from are not for Caffe2's tests.
    (home / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "builder_plugin"]
    # Else each process rewrites the asserts of all that Hypothesis is made of, which takes as long as its start.
    command.append("--assert=plain")
    command += ["--builder", builder, "--outcomes", str(folder / (builder + ".json"))]
    command += ["--continue-on-collection-errors"]
    if options.quick:
        command += ["-k", " and ".join("not " + name for name in SLOW)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    paths = [str(HERE), str(HERE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with open(str(folder / (builder + ".log")), "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, "--pyargs", *options.tests],
            cwd=str(home),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait(process, until):
    """Wait for a process to end, and end it where it takes too long."""
    try:
        process.wait(timeout=max(0, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_outcomes(path):
    """How each test fared: {test: {"outcome", "detail"}}. A test that failed while it was cleaned up has failed."""
    outcomes = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            if "outcome" not in found:
                continue
            if outcomes.get(found["test"], {}).get("outcome") != "failed":
                outcomes[found.pop("test")] = found
    return outcomes


def read_rewritten(path):
    """How many places each rule has rewritten: {rule: {"places", "tests"}}."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    counts = [line["rewritten"] for line in lines if "rewritten" in line]
    places = sum(map(Counter, counts), Counter())
    return {rule: {"places": places[rule], "tests": sum(rule in count for count in counts)} for rule in places}


def outcome(outcomes, test):
    return outcomes[test]["outcome"] if test in outcomes else "no result"


def failing(outcomes, test):
    """With what a test that passes with Caffe2's builder does not pass."""
    if outcome(outcomes.get("caffe2", {}), test) != "passed":
        return []
    return [builder for builder, found in outcomes.items() if outcome(found, test) != "passed"]


def regressions(outcomes):
    """The tests that pass with Caffe2's builder and do not with ours, or not when their nets are optimised."""
    return [test for test in outcomes.get("caffe2", {}) if failing(outcomes, test)]


def table(outcomes):
    first = next(iter(outcomes.values()))
    rows = [("test", *(BUILDERS[builder] for builder in outcomes), "")]
    for test in sorted(set().union(*outcomes.values())):
        remark = ""
        if outcome(first, test) == "skipped":
            remark = shortened(first[test]["detail"], 1)
        elif failing(outcomes, test):
            remark = "<- regression"
        rows.append((test.replace("::", " "), *(outcome(found, test) for found in outcomes.values()), remark))
    width = max(len(row[0]) for row in rows)
    columns = "  {:9}" * len(outcomes)
    return "\n".join(("{:{}}" + columns + "  {}").format(row[0], width, *row[1:]).rstrip() for row in rows)


def summary(outcomes):
    parts = ["{}: {}".format(BUILDERS[builder], counted(found)) for builder, found in outcomes.items()]
    return "; ".join([*parts, "regressions: {}".format(len(regressions(outcomes)))])


def rules_summary(rewritten):
    """What has been optimised, so that a run in which nothing was does not pass for one."""
    lines = ["  {}: {places} in {tests}".format(rule, **found) for rule, found in sorted(rewritten.items())]
    return "\n".join(["places rewritten, by rule and in how many tests:", *(lines or ["  none"])])


def counted(outcomes):
    found = [test["outcome"] for test in outcomes.values()]
    return ", ".join("{} {}".format(found.count(kind), kind) for kind in ("passed", "failed", "skipped"))


def shortened(text, lines=SHOWN_LINES):
    return "\n".join(text.strip().splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
