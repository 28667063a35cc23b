"""What the README says of its scripts and commands; that its scripts run is shown by test_docs.py."""

import functools
import re
import subprocess
import sys

from documents import README, ROOT, blocks


@functools.lru_cache(maxsize=None)
def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_scripts_are_there():
    assert ["LSTM(" in block for block in blocks(README, "python")] == [True, False, True, True]
    assert sum(map(bool, blocks(README, "python")[0].splitlines())) == 15


def test_the_lstm_script_learns():
    result = run(blocks(README, "python")[0])
    error, variance = re.match(r"mean squared error (\S+) of (\S+)", result.stdout).groups()
    assert float(error) < 0.1 * float(variance)


def test_the_step_net_script_prints_what_it_made():
    assert run(blocks(README, "python")[1]).stdout.strip() == "h_t_all (5, 2, 3) w_grad (3, 3)"


def test_the_script_of_a_drawing_writes_it():
    assert run(blocks(README, "python")[3]).stdout.splitlines()[-1].endswith("lstm.dot")


def test_commands_exist():
    targets = re.findall(r"^make (\w+)", "\n".join(blocks(README, "sh")), flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(r"^{}:".format(target), makefile, flags=re.MULTILINE)


def test_named_files_exist():
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/build_time.py"):
        assert name in README.read_text(encoding="utf-8")
        assert (ROOT / name).exists()
