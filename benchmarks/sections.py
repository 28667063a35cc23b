"""What is measured, section by section, as plain data: lists, dicts, strings and numbers that go into a JSON file.

Times are seconds of one pass, one for each round; what failed stands under "failures" with the first line of its error.
"""

import contextlib
import functools
import random
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

import batch_parts
import memory
from interpreters import PASSES as INTERPRETER_PASSES
from interpreters import Interpreter, Other
from layers import (
    OPTIMISED,
    OURS,
    PASSES,
    STOCK,
    TRAINING,
    Layer,
    Shape,
    difference,
    lstm_values,
    optimizer,
)
from measuring import Measured, Subject, faster, measure, set_threads
from other_interpreter import TorchLSTM, clocked, first_line
from products import Products
from step_operators import StepOperators

TORCH = memory.TORCH
PRODUCTS = "products alone"
OPERATORS = "operators alone"
EXECUTOR = {False: "executor off", True: "executor on"}
# The variant of a candidate that has a part of the batch for each thread.
IN_PARTS = "in parts"
ONLY = ""  # the variant of what has no variants

GROWTH_STEPS = (25, 50, 100, 200, 400, 800, 1600)
GROWTH_SHAPE = Shape(0, 16, 64, 128)
SWEEP_CELLS = ("LSTM", "GRU", "LSTMWithLengths", "MILSTM", "LSTMWithAttention", "GRUWithLengths")
SWEEP_STEPS, SWEEP_BATCHES = (5, 10, 20, 40, 60, 100, 200), (1, 2, 4, 8, 16, 48)
SWEEP_SIZES = ((8, 16), (32, 32), (20, 50), (64, 128), (100, 200), (128, 256))
# Multiplications of the products with one gate's weights.
SWEEP_LARGEST = 2e8
SWEEP_ENOUGH = 0.5  # seconds for one row
SWEEP_AGAIN = 6  # times as many for one that seems slower
# Steps of the short loop that shows what a step keeps.
KEPT_STEPS = 4
# With a backward pass of its own a loop has a step workspace or two, whatever the number of steps.
TWO = ("backward_loop",)

Record = Dict[str, Any]
Say = Callable[[str], None]
Limit = Union[Products, StepOperators]


class Plan(NamedTuple):
    """What is to be measured, and how often."""

    rounds: int
    enough: float  # seconds for one row, where that makes more rounds
    threads: Sequence[int]
    cells: Dict[str, Sequence[Shape]]
    growth_steps: Sequence[int]
    memory_shapes: Sequence[Shape]
    recompute_shapes: Sequence[Shape]
    sweep: Sequence[Tuple[str, Shape]]


def makers() -> List[str]:
    return [STOCK, OURS] + ([OPTIMISED] if optimizer() else [])


# ----------------------------------------------------------------------------------------------------------- one shape


class Contest:
    """Subjects that do the same, built, compared and timed in turn; they are closed at its end.

    A candidate may enter in several variants, of which the fastest will count. `rewritten` are the places at which
    `optimize` has changed a candidate's net, in any variant.
    """

    def __init__(self, threads: int, executors: Sequence[bool] = tuple(EXECUTOR)) -> None:
        self.threads, self.failures = threads, {}  # type: int, Dict[str, str]
        self._executors = executors
        self.rewritten: Dict[str, int] = {}
        self._subjects: Dict[Tuple[str, str], Callable[[int], float]] = {}
        self._expected: Optional[Dict[str, np.ndarray]] = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> "Contest":
        # Before anything is built: threads that start now take their number from it.
        set_threads(self.threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def enter(
        self,
        name: str,
        variant: str,
        make: Callable[[contextlib.ExitStack], Any],
        own_clock: bool = False,
        unless: Optional[str] = None,
    ) -> None:
        """`make` returns what has `run` and, if it is to be compared, `results`; what it opens goes on the stack.

        It may fail and stay out for a reason that says `unless`.
        """
        try:
            entrant = make(self._closing)
            if hasattr(entrant, "results"):
                self._compare(entrant.results())
        except Exception as error:
            line = first_line(error)
            if unless is None or unless not in line:
                self._failed(name, variant, line)
        else:
            self._subjects[name, variant] = entrant.run if own_clock else clocked(entrant.run)
            self.rewritten[name] = self.rewritten.get(name, 0) + getattr(entrant, "rewritten", 0)

    def enter_layer(self, name: str, cell: str, maker: str, shape: Shape, pass_: str, **options: Any) -> None:
        """With the RNN executor off and on."""
        for executor in self._executors:
            variant = EXECUTOR[executor]

            def make(stack: contextlib.ExitStack, executor: bool = executor) -> Layer:
                layer = Layer(cell, maker, shape, pass_, self.threads, executor, **options)
                stack.callback(layer.close)
                return layer

            self.enter(name, variant, make)

    def _compare(self, found: Dict[str, np.ndarray]) -> None:
        if self._expected is None:
            self._expected = found
            return
        problem = difference(found, self._expected)
        if problem is not None:
            raise ValueError("it computes something else: {}".format(problem))

    def _failed(self, name: str, variant: str, line: str) -> None:
        self.failures["{}, {}".format(name, variant) if variant else name] = line

    def time(self, plan: Plan) -> Dict[str, Dict[str, List[float]]]:
        """Seconds by candidate and variant."""
        self._expected = None
        keys = {"{}\n{}".format(*key): key for key in self._subjects}
        measured: Measured = measure(
            [Subject(text, self._subjects[key]) for text, key in keys.items()], plan.rounds, plan.enough
        )
        for text, line in measured.failures.items():
            self._failed(*keys[text], line)
        found: Dict[str, Dict[str, List[float]]] = {}
        for text, (name, variant) in keys.items():
            if text in measured.seconds:
                found.setdefault(name, {})[variant] = [float("{:.4g}".format(s)) for s in measured.seconds[text]]
        return found


# ------------------------------------------------------------------------------------------------------------ sections


def times(plan: Plan, interpreters: Sequence[Interpreter], say: Say) -> List[Record]:
    """All candidates at all shapes, passes and numbers of threads."""
    return [
        _times(plan, cell, shape, pass_, threads, interpreters, say)
        for cell, shapes in plan.cells.items()
        for shape in shapes
        for threads in plan.threads
        for pass_ in PASSES
    ]


def _times(
    plan: Plan, cell: str, shape: Shape, pass_: str, threads: int, interpreters: Sequence[Interpreter], say: Say
) -> Record:
    record: Record = {"cell": cell, "shape": str(shape), "pass": pass_, "threads": threads}
    limits: Dict[str, Limit] = {}

    def enter(contest: Contest, is_first: bool) -> None:
        for maker in makers():
            contest.enter_layer(maker, cell, maker, shape, pass_)
        if is_first and threads > 1:
            _enter_parts(contest, cell, shape, pass_)
        if is_first and cell == "LSTM":
            _enter_others(contest, limits, shape, pass_, interpreters)

    timed = _timed(plan, threads, enter)
    record.update(seconds=timed.seconds, failures=timed.failures)
    for limit, field in ((PRODUCTS, "products"), (OPERATORS, "operators")):
        if limit in timed.seconds:
            record[field] = {name: list(found) for name, found in limits[limit].best().items()}
    say(_summary(record))
    return record


class Timed(NamedTuple):
    """Seconds by candidate and variant, failures, and the places that `optimize` changed, by candidate."""

    seconds: Dict[str, Dict[str, List[float]]]
    failures: Dict[str, str]
    rewritten: Dict[str, int]


def _timed(plan: Plan, threads: int, enter: Callable[[Contest, bool], object]) -> Timed:
    """One contest for each of `rounds_of_executors`; `enter` is told whether it is the first."""
    timed = Timed({}, {}, {})
    for index, executors in enumerate(rounds_of_executors(threads)):
        with Contest(threads, executors) as contest:
            enter(contest, index == 0)
            for name, variants in contest.time(plan).items():
                timed.seconds.setdefault(name, {}).update(variants)
            timed.failures.update(contest.failures)
            for name, count in contest.rewritten.items():
                timed.rewritten[name] = timed.rewritten.get(name, 0) + count
    return timed


def rounds_of_executors(threads: int) -> List[Tuple[bool, ...]]:
    """The settings of the RNN executor that are measured side by side.

    With several threads, those without it first and by themselves: the executor's threads bring OpenMP threads of their
    own, and as soon as these are more than the cores, all OpenMP threads of the process wait passively for each other,
    torch's too. At 50,32,128,256 that alone made the optimised training pass take 60 ms in place of 22.
    """
    return [tuple(EXECUTOR)] if threads == 1 else [(executor,) for executor in EXECUTOR]


def _enter_parts(contest: Contest, cell: str, shape: Shape, pass_: str) -> None:
    """Ours optimised, with a part of the batch for each thread: a variant of it, unless the batch stays as it is."""
    if optimizer() is None or shape.batch < contest.threads:
        return
    other = Other(OPTIMISED, sys.executable, cell)

    def make(stack: contextlib.ExitStack) -> Interpreter:
        interpreter = stack.enter_context(Interpreter(other, Path(batch_parts.__file__)))
        interpreter.prepare(shape, pass_, contest.threads)
        return interpreter

    contest.enter(OPTIMISED, IN_PARTS, make, own_clock=True, unless=batch_parts.STAYS)


def _enter_others(
    contest: Contest, limits: Dict[str, Limit], shape: Shape, pass_: str, interpreters: Sequence[Interpreter]
) -> None:
    contest.enter(TORCH, ONLY, lambda _: _torch(shape, pass_))
    for interpreter in interpreters:
        if pass_ in INTERPRETER_PASSES[interpreter.other.kind]:
            contest.enter(
                interpreter.other.name,
                ONLY,
                functools.partial(_prepared, interpreter, shape, pass_, contest.threads),
                own_clock=True,
            )
    for name, make in ((PRODUCTS, Products), (OPERATORS, StepOperators)):
        contest.enter(name, ONLY, functools.partial(_limit, limits, name, make, shape, pass_), own_clock=True)


def _torch(shape: Shape, pass_: str) -> Any:
    layer = TorchLSTM(shape, pass_ == TRAINING, {name: value.tobytes() for name, value in lstm_values(shape).items()})
    return _Arrays(layer)


class _Arrays:
    """`TorchLSTM` with results as arrays."""

    def __init__(self, layer: TorchLSTM) -> None:
        self._layer, self.run = layer, layer.run

    def results(self) -> Dict[str, np.ndarray]:
        return {
            name: np.frombuffer(data, np.float32).reshape(size) for name, (size, data) in self._layer.results().items()
        }


def _prepared(interpreter: Interpreter, shape: Shape, pass_: str, threads: int, _: object) -> Interpreter:
    interpreter.prepare(shape, pass_, threads)
    return interpreter


def _limit(
    limits: Dict[str, Limit],
    name: str,
    make: Callable[[Shape, str], Limit],
    shape: Shape,
    pass_: str,
    stack: contextlib.ExitStack,
) -> Limit:
    limits[name] = make(shape, pass_)
    stack.callback(limits[name].close)
    return limits[name]


def growth(plan: Plan, say: Say) -> List[Record]:
    """Ours, at more and more steps, on the first number of threads."""
    records = []
    for pass_ in PASSES:
        for steps in plan.growth_steps:
            shape = GROWTH_SHAPE._replace(steps=steps)
            with Contest(plan.threads[0]) as contest:
                for maker in makers():
                    if maker != STOCK:
                        contest.enter_layer(maker, "LSTM", maker, shape, pass_)
                seconds = contest.time(plan)
            record = {
                "pass": pass_,
                "threads": plan.threads[0],
                "shape": str(shape),
                "steps": steps,
                "seconds": seconds,
                "failures": contest.failures,
            }
            say(_summary(dict(record, cell="LSTM")))
            records.append(record)
    return records


def peaks(plan: Plan, say: Say) -> List[Record]:
    """Peak memory of training steps, each in a process of its own."""
    candidates = [(name, False) for name in (*makers(), TORCH)]
    candidates += [(name, True) for name in makers() if name != STOCK]
    records = []
    for shape in plan.memory_shapes:
        record: Record = {"shape": str(shape), "bytes": {}, "failures": {}}
        for name, memory_optimization in candidates:
            label = with_recompute(name) if memory_optimization else name
            try:
                record["bytes"][label] = memory.peak_in_child(name, shape, memory_optimization)
            except Exception as error:
                record["failures"][label] = first_line(error)
        say("memory {}: {}".format(shape, _megabytes(record["bytes"])))
        records.append(record)
    return records


def recompute(plan: Plan, say: Say) -> List[Record]:
    """Training with and without `memory_optimization`, and what a step keeps."""
    records = []
    for shape in plan.recompute_shapes:
        kept: Dict[str, int] = {}
        unknown: Dict[str, str] = {}

        def enter(contest: Contest, _: bool, shape: Shape = shape) -> None:
            for maker in makers():
                if maker != STOCK:
                    contest.enter_layer(maker, "LSTM", maker, shape, TRAINING)
                    contest.enter_layer(with_recompute(maker), "LSTM", maker, shape, TRAINING, memory_optimization=True)

        for threads in plan.threads:
            timed = _timed(plan, threads, enter)
            if not kept:
                kept, unknown = _kept(shape)
            failures = {**timed.failures, **unknown}
            record = {"shape": str(shape), "threads": threads, "seconds": timed.seconds}
            record.update(kept=kept, failures=failures)
            say(_summary(dict(record, cell="LSTM", **{"pass": TRAINING})))
            records.append(record)
    return records


def sweep(plan: Plan, say: Say) -> List[Record]:
    """Ours and ours optimised, as records of `times`, for the cells and shapes of a sweep.

    Of so many rows, each timed for so short, some seem slower optimised whatever they are: these are timed again, with
    nets made anew and for longer, and that counts.
    """
    short = plan._replace(enough=min(plan.enough, SWEEP_ENOUGH))
    longer = plan._replace(enough=SWEEP_AGAIN * short.enough, rounds=SWEEP_AGAIN * short.rounds)
    records = []
    for cell, shape in plan.sweep:
        for threads in plan.threads:
            for pass_ in PASSES:
                record = _swept(short, cell, shape, pass_, threads)
                if _seems_slower(record):
                    record = dict(_swept(longer, cell, shape, pass_, threads), again=True)
                records.append(record)
                say(_summary(record))
    return records


def _seems_slower(record: Record) -> bool:
    best = {name: min(variants[faster(variants)]) for name, variants in record["seconds"].items()}
    return OURS in best and OPTIMISED in best and best[OPTIMISED] > best[OURS]


def _swept(plan: Plan, cell: str, shape: Shape, pass_: str, threads: int) -> Record:
    def enter(contest: Contest, _: bool) -> None:
        for maker in makers():
            if maker != STOCK:
                contest.enter_layer(maker, cell, maker, shape, pass_)

    timed = _timed(plan, threads, enter)
    record: Record = {"cell": cell, "shape": str(shape), "pass": pass_, "threads": threads}
    record.update(seconds=timed.seconds, failures=timed.failures, rewritten=timed.rewritten.get(OPTIMISED, 0))
    return record


def drawn_shapes(count: int, seed: int = 0) -> List[Tuple[str, Shape]]:
    """Cells in turn, with shapes drawn among small and middling ones; the first ones are the same for any `count`."""
    random_, found = random.Random(seed), []  # type: random.Random, List[Tuple[str, Shape]]
    while len(found) < count:
        shape = Shape(*map(random_.choice, (SWEEP_STEPS, SWEEP_BATCHES)), *random_.choice(SWEEP_SIZES))
        if shape.steps * shape.batch * shape.dim * (shape.dim_in + shape.dim) < SWEEP_LARGEST:
            found.append((SWEEP_CELLS[len(found) % len(SWEEP_CELLS)], shape))
    return found


def with_recompute(name: str) -> str:
    return name + ", memory_optimization"


def _kept(shape: Shape) -> Tuple[Dict[str, int], Dict[str, str]]:
    """Bytes that one step keeps, by candidate: of the step that keeps most; and failures."""
    short = shape._replace(steps=KEPT_STEPS)
    found, failures = {}, {}
    for maker in makers():
        for memory_optimization in (False, True):
            name = with_recompute(maker) if memory_optimization else maker
            try:
                layer = Layer(
                    "LSTM", maker, short, TRAINING, executor=False, memory_optimization=memory_optimization, without=TWO
                )
                try:
                    found[name] = max(layer.kept_by_steps())
                finally:
                    layer.close()
            except Exception as error:
                failures[name + ", what a step keeps"] = first_line(error)
    return found, failures


def _summary(record: Record) -> str:
    """A line of progress."""
    best = {name: 1e3 * min(variants[faster(variants) or ""]) for name, variants in record["seconds"].items()}
    times_ = ", ".join("{} {:.4g}".format(name, milliseconds) for name, milliseconds in best.items())
    line = "{} {}, {}, {}: {} ms".format(
        record["cell"], record["shape"], record["pass"], threads_text(record["threads"]), times_
    )
    return line + "".join("\n  FAILED {}: {}".format(*failure) for failure in record["failures"].items())


def _megabytes(by_name: Dict[str, int]) -> str:
    return ", ".join("{} {:.0f} MB".format(name, size / 1e6) for name, size in by_name.items())


def threads_text(threads: int) -> str:
    return "1 thread" if threads == 1 else "{} threads".format(threads)
