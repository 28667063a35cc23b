"""The cost of building grows in proportion to the step net.

What is counted is bytecode instructions, which depend neither on the machine nor on what else it does. Loops inside C
functions do not show; they do in `benchmarks/build_time.py`, whose step nets are used here.
"""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Callable

import pytest

from caffe2_recurrent import recurrent_net

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "build_time.py"

OPERATORS = 120
# Twice the operators: 2 if the cost is proportional, 4 if it is quadratic.
LARGEST_RATIO = 2.3


def _load_benchmark() -> Any:
    specification = importlib.util.spec_from_file_location("build_time", BENCHMARK)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


build_time = _load_benchmark()


def instructions(action: Callable[[], Any]) -> int:
    """How many bytecode instructions `action` executes, in all functions that it calls."""
    counter = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            next(counter)
        return trace

    # Coverage traces as well.
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return next(counter)


def growth(kind: str) -> float:
    """The cost of a step net with 2 `OPERATORS` operators over that of one with `OPERATORS`."""
    steps = [build_time.KINDS[kind](operators) for operators in (OPERATORS, 2 * OPERATORS)]
    # What Caffe2 does only the first time, such as imports, belongs to neither.
    build_time.build(recurrent_net, build_time.KINDS[kind](4))
    small, large = (instructions(lambda step=step: build_time.build(recurrent_net, step)) for step in steps)
    return large / small


@pytest.mark.parametrize("kind", list(build_time.KINDS))
def test_cost_is_proportional_to_the_number_of_step_operators(kind):
    assert growth(kind) < LARGEST_RATIO


def test_a_cost_that_is_quadratic_is_noticed(monkeypatch):
    module = sys.modules["caffe2_recurrent.recurrent"]
    read_step_net = module.read_step_net

    def read_step_net_slowly(request, problems):
        operators = request.cell_net.Proto().op
        for operator in operators:
            # The kind of line that slips in: for each operator, something is made out of all of them.
            [other for other in operators if other is operator]
        return read_step_net(request, problems)

    monkeypatch.setattr(module, "read_step_net", read_step_net_slowly)
    assert growth("tanh_mul") > LARGEST_RATIO


def test_the_count_hardly_differs_between_runs():
    step = build_time.tanh_mul(OPERATORS)
    counts = [instructions(lambda: build_time.build(recurrent_net, step)) for _ in range(3)]
    # Caffe2 tries numbers until it finds a name for the outer net that no net had before: a few more each time.
    assert max(counts) - min(counts) < min(counts) / 1000


def test_the_benchmark_prints_a_row_for_each_size_and_the_growth(capsys):
    build_time.main(["--operators", "8", "4", "--rounds", "1", "--kind", "sums", "--with-caffe2"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["sums", "4"], ["sums", "8"], ["sums", "growth"]]
    assert header.split()[:2] == ["kind", "operators"]
    assert all(name in header for name in ("pass ms", "build ms", "caffe2 ms", "build/pass", "caffe2/pass"))


@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        (["--operators", "3"], "argument --operators: 3 is too small; it must be 4 or more"),
        (["--operators", "many"], "argument --operators: 'many' is no whole number"),
        (["--rounds", "0"], "argument --rounds: 0 is too small; it must be 1 or more"),
        (["--kind", "fast"], "argument --kind: invalid choice: 'fast'"),
    ],
)
def test_the_benchmark_explains_arguments_it_cannot_use(arguments, message, capsys):
    with pytest.raises(SystemExit):
        build_time.read_options(arguments)
    assert message in capsys.readouterr().err
