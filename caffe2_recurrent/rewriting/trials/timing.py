"""Operators that are run and timed, with the threads that this process has, in workspaces of their own."""

import contextlib
import math
import time
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operators import copied
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.scratch_workspace import inside, scratch_workspace

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

WORKSPACE = "caffe2_recurrent_trial"
ROUNDS = 2
# Seconds of a round: more than the clock's error, little beside what the net is optimised for.
ENOUGH = 3e-4
MOST_RUNS = 100
# Seconds that rounds may take, of what takes long fewer; and those after which a run is run again only if it matters.
MOST_OF_ROUNDS = 0.03
MOST = 0.1
# Seconds in which the allocator has to settle, and runs one after the other that show that it has.
SETTLING = 0.1
SETTLED = 3
# Seconds in which a net that has just been made has to get warm, and runs none of which is faster by this factor than
# all before: then it is.
WARMING = 0.03
WARM = 5
FASTER = 1.02
# So many new pages are none.
FEW_PAGES = 8
FLOAT = 4  # bytes
# Bytes of slices that do not fit into a core's own cache; those of one step below which it does not matter where they
# come from; and steps that are as good as all.
FAR = 1 << 22
LEAST_SLICE = 1 << 15
MOST_TURNS = 32
# Operators that a step has beside those that are tried.
OTHERS = 12

Operators = Sequence[caffe2_pb2.OperatorDef]


class Seconds(NamedTuple):
    """The time of what is done once, and of what is done in each step: the best ones, or the usual ones."""

    once: float
    step: float

    def of_step(self, steps: int) -> float:
        """The time of a step, with its share of what is done once for all `steps`."""
        return self.step + self.once / steps


class Subject(NamedTuple):
    """The operators of a `step`, and those that have to run `once` before; `shapes` are those of the inputs.

    `wakes_threads`: what it takes depends on how soon the system lets another thread go on, so that what counts is not
    its best time but the usual one. `slices` are inputs of the step that are others in each of `steps` steps. What runs
    before all that is `kept` from run to run, and takes no time. `anew`: whether the operators of the step are made
    once for all steps, among as many others as a step has.
    """

    step: Operators
    shapes: Mapping[str, Shape]
    once: Operators = ()
    wakes_threads: bool = False
    slices: Tuple[str, ...] = ()
    steps: int = 1
    kept: Operators = ()
    anew: bool = False

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return _bytes(self.inputs.values())

    @property
    def turns(self) -> int:
        """How many steps are timed one behind the other, so that each finds its slices as far away as in a loop."""
        each = _bytes(self.shapes[blob] for blob in self.slices)
        return 1 if each < LEAST_SLICE else min(self.steps, MOST_TURNS, math.ceil(FAR / each))

    @property
    def inputs(self) -> Dict[str, Shape]:
        """The shapes of all inputs, with the slices of each of those steps."""
        own = {name: self.shapes[blob] for turn in range(self.turns) for blob, name in self._names(turn).items()}
        return {**self.shapes, **own}

    @property
    def operators(self) -> List[caffe2_pb2.OperatorDef]:
        """Those of all these steps."""
        found = []
        for turn in range(self.turns):
            names = self._names(turn)
            for operator in map(copied, self.step):
                operator.input[:] = [names.get(blob, blob) for blob in operator.input]
                found.append(operator)
        return found

    def _names(self, turn: int) -> Dict[str, str]:
        """How the slices are called in that step."""
        return {blob: "{}_{}".format(blob, turn) if turn else blob for blob in self.slices}


def _bytes(shapes: Iterable[Shape]) -> int:
    return FLOAT * sum(int(np.prod(shape)) for shape in shapes)


@contextlib.contextmanager
def prepared(subject: Subject) -> Iterator[Callable[[float], Seconds]]:
    """A function that times the subject each time it is called, in a workspace that is there for the body's time.

    It is told how long a step may take at most to be of any interest: one that takes long, and longer than that, is not
    run again to be timed better.

    Raises what Caffe2 raises when it cannot make or run the operators.
    """
    with _own_workspace() as name:
        with inside(name):
            random = np.random.default_rng(0)
            for blob, shape in subject.inputs.items():
                workspace.FeedBlob(blob, 2 * random.random(shape, dtype=np.float32) - 1)
            if subject.kept:
                workspace.RunNet(_create("trial_kept", subject.kept))
            once = _create("trial_once", subject.once)
            # What it makes has to be there before a net that reads it can be created.
            workspace.RunNet(once)
            step = _create("trial_step", subject.operators)
            for net, operators in ((once, subject.once), (step, subject.step)):
                if any(operator.type == ATEN for operator in operators):
                    _settle(net)
            making = _making(subject) if subject.anew else 0.0
        is_new, turns = True, subject.turns

        def seconds(of_interest: float) -> Seconds:
            nonlocal is_new
            was_new, is_new = is_new, False
            with inside(name):
                return Seconds(
                    making + (_timed(once, math.inf, was_new, _best) if subject.once else 0.0),
                    _timed(step, turns * of_interest, was_new, _usual if subject.wakes_threads else _best) / turns,
                )

        yield seconds


def _making(subject: Subject) -> float:
    """The time that the operators of a step take when they are made, and more than usual when they first run."""
    blob = next(iter(subject.inputs))
    others = [caffe2_pb2.OperatorDef(type="Copy", input=[blob], output=["other"]) for _ in range(OTHERS)]
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        net = _create("trial_anew", [*subject.step, *others], overwrite=True)
        workspace.RunNet(net)
        found.append(time.perf_counter() - start - _time(net, 1))
    return max(0.0, min(found))


def result(operators: Operators, values: Mapping[str, np.ndarray], blob: str) -> np.ndarray:
    """What `operators` make of `values` in `blob`."""
    (found,) = results(operators, [values], blob)
    return found


def results(operators: Operators, runs: Sequence[Mapping[str, np.ndarray]], blob: str) -> List[np.ndarray]:
    """What one net of `operators` makes in `blob`, of the values of each run."""
    found: List[np.ndarray] = []
    with scratch_workspace(WORKSPACE):
        for values in runs:
            for name, value in values.items():
                workspace.FeedBlob(name, value)
            if not found:
                _create("trial", operators)
            workspace.RunNet("trial")
            found.append(workspace.FetchBlob(blob))
    return found


_in_use: Set[str] = set()


@contextlib.contextmanager
def _own_workspace() -> Iterator[str]:
    """An empty workspace that nobody else uses meanwhile; there are no more of them than are in use at once."""
    number = 1
    while "{}_{}".format(WORKSPACE, number) in _in_use:
        number += 1
    name = "{}_{}".format(WORKSPACE, number)
    _in_use.add(name)
    try:
        with inside(name):
            workspace.ResetWorkspace()
        yield name
    finally:
        with inside(name):
            workspace.ResetWorkspace()
        _in_use.remove(name)


def _create(name: str, operators: Operators, overwrite: bool = False) -> str:
    workspace.CreateNet(caffe2_pb2.NetDef(name=name, op=operators), overwrite)
    return name


def _settle(net: str) -> None:
    """Runs a net until its operators find memory that they have had before.

    ATen's allocate what they return. For some runs glibc does not fit it in where the same was before, as it has to be
    aligned; each of its pages is then new, and takes the system longer than the operator.
    """
    start, settled = time.perf_counter(), 0
    while settled < SETTLED and time.perf_counter() - start < SETTLING:
        before = _pages()
        workspace.RunNet(net)
        settled = settled + 1 if _pages() - before < FEW_PAGES else 0


def _pages() -> int:
    """How many pages this process has been given so far, if that is known."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _timed(net: str, of_interest: float, is_new: bool, runs: Callable[[str, float], float]) -> float:
    first, limit = _time(net, 1), max(MOST, of_interest)
    if is_new and first > limit:
        # A loop makes its steps then, and allocates what they keep.
        first = _time(net, 1)
    # It has found other caches than the next one will: of what takes long, that is little.
    if first > limit:
        return first
    return runs(net, _warmed_up(net, first) if is_new else _time(net, 1))


def _best(net: str, once: float) -> float:
    """The best time of a run, of some rounds of them; `once` is that of one run."""
    runs = max(1, min(MOST_RUNS, int(ENOUGH / max(once, 1e-9))))
    rounds = min(ROUNDS, int(MOST_OF_ROUNDS / max(once, 1e-9)))
    return min([once, *(_time(net, runs) for _ in range(rounds))])


def _usual(net: str, once: float) -> float:
    """The median of some runs; `once` is the time of one run."""
    runs = max(1, min(MOST_RUNS, int(MOST / max(once, 1e-9))))
    return float(np.median([_time(net, 1) for _ in range(runs)]))


def _warmed_up(net: str, best: float) -> float:
    """The best time of a run, once these do not get faster any more.

    A net of more than a thousand operators, as a loop that trains has, does that for a dozen runs or two: what these
    are and read has to come into the caches first.
    """
    start, as_before = time.perf_counter(), 0
    while True:
        run = _time(net, 1)
        as_before = 0 if FASTER * run < best else as_before + 1
        best = min(best, run)
        if as_before >= WARM or time.perf_counter() - start > WARMING:
            return best


def _time(net: str, runs: int) -> float:
    start = time.perf_counter()
    workspace.RunNet(net, runs)
    return (time.perf_counter() - start) / runs
