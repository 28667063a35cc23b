"""How long operators take on this machine, with the threads that this process has: run, in a workspace of their own.

What is compared takes turns, so that what else goes on in the machine meets all of it; and it is remembered, because
nets tend to have several loops of a size. Without trials the first of what is to be compared wins.
"""

import contextlib
import contextvars
import functools
import math
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.loop import Loop, Names
from caffe2_recurrent.scratch_workspace import scratch_workspace
from caffe2_recurrent.sizes import Shape

WORKSPACE = "caffe2_recurrent_trial"
TURNS = 3
# Seconds that a few more turns may take: the machine's slow phases last some milliseconds.
SHORT = 0.02
# What takes more than so many times the least has lost.
CLOSE = 1.5
# Seconds after which there is no other turn.
LONG = 2.0
ROUNDS = 2
# Seconds of a round: more than the clock's error, little beside what the net is optimised for.
ENOUGH = 3e-4
MOST_RUNS = 100
# Seconds after which few rounds must do.
MOST = 0.1

Operators = Sequence[caffe2_pb2.OperatorDef]

_trying = contextvars.ContextVar("_trying", default=True)


@contextlib.contextmanager
def trying(is_wanted: bool) -> Iterator[None]:
    """Whether candidates are tried in the body. If not, the same is chosen in each process."""
    before = _trying.set(is_wanted)
    try:
        yield
    finally:
        _trying.reset(before)


class Seconds(NamedTuple):
    """The best time of what is done once, and of what is done in each step."""

    once: float
    step: float

    def of_step(self, steps: int) -> float:
        """The time of a step, with its share of what is done once for all `steps`."""
        return self.step + self.once / steps


def seconds(step: Operators, shapes: Mapping[str, Shape], once: Operators = ()) -> Seconds:
    """The best time of `step`, and of the operators that have to run `once` before; `shapes` are those of the inputs.

    Raises what Caffe2 raises when it cannot run them.
    """
    with scratch_workspace(WORKSPACE):
        random = np.random.RandomState(0)
        for blob, shape in shapes.items():
            workspace.FeedBlob(blob, random.uniform(-1, 1, shape).astype(np.float32))
        found: List[float] = []
        for name, operators in (("once", once), ("step", step)):
            net = _create("trial_" + name, operators)
            found.append(_best(net) if operators else 0.0)
        return Seconds(*found)


def result(operators: Operators, values: Mapping[str, np.ndarray], blob: str) -> np.ndarray:
    """What `operators` make of `values` in `blob`."""
    with scratch_workspace(WORKSPACE):
        for name, value in values.items():
            workspace.FeedBlob(name, value)
        workspace.RunNet(_create("trial", operators))
        return workspace.FetchBlob(blob)


def in_turn(candidates: Mapping[Any, Callable[[], Seconds]], steps: Optional[int] = None) -> Dict[Any, Seconds]:
    """The best times of all candidates, which are functions that time themselves once.

    There are more turns while they take next to no time, and fewer after a long one. The clearly slow are left out from
    the third turn on, or from the second if turns take their time; when one is left, it has won. What counts is a step,
    with its share of what is done once if there are so many `steps`.

    Without trials no other one ever ends but the first, which should be to leave things as they are.
    """
    if not _trying.get():
        return {name: Seconds(0.0, math.inf if index else 1.0) for index, name in enumerate(candidates)}

    def cost(name: Any) -> float:
        return found[name].step if steps is None else found[name].of_step(steps)

    start = time.perf_counter()
    found = {name: candidate() for name, candidate in candidates.items()}
    close, turns, taken = list(candidates), 1, time.perf_counter() - start
    while taken <= LONG and (turns < TURNS or taken < SHORT):
        if turns > 1 or taken > SHORT:
            least = min(map(cost, found))
            close = [name for name in close if cost(name) <= CLOSE * least]
        if len(close) < 2:
            break
        for name in close:
            best, again = found[name], candidates[name]()
            found[name] = Seconds(min(best.once, again.once), min(best.step, again.step))
        turns, taken = turns + 1, time.perf_counter() - start
    return found


_remembering: List[Any] = []


def remembered(function: Callable[..., Any]) -> Any:
    """A function of trials that makes them once for the same arguments, until `forget`."""

    @functools.lru_cache(maxsize=None)
    def cached(_: bool, *arguments: Any) -> Any:
        return function(*arguments)

    @functools.wraps(function)
    def remembering(*arguments: Any) -> Any:
        return cached(_trying.get(), *arguments)

    _remembering.append(cached)
    return remembering


def forget() -> None:
    """To be called when the process gets another number of threads: let all be tried again."""
    for cached in _remembering:
        cached.cache_clear()


def rows_to_try(rows: int, inner: int, outer: int, enough: float) -> int:
    """As many of `rows` rows as make `enough` multiplications with `[inner, outer]`; time is in proportion to them."""
    return min(rows, max(1, int(enough / (inner * outer))))


def lone_loop(names: Iterable[str]) -> Loop:
    """A loop of nothing, to have operators put in; its blobs are called by none of `names`, of which the first is its
    sequence.
    """
    used = list(names)
    forward = caffe2_pb2.OperatorDef(output=["trial"])
    return Loop(
        name="trial",
        forward=forward,
        net=caffe2_pb2.NetDef(),
        operators=[],
        inputs=used[:1],
        outputs=list(forward.output),
        states=[],
        links=[],
        aliases=[],
        timestep="timestep",
        shared=[],
        gradient=None,
        names=Names(used),
    )


def _create(name: str, operators: Operators) -> str:
    # Not by `workspace.CreateNet`, which `install` may have told to optimise nets with loops.
    workspace.C.create_net(caffe2_pb2.NetDef(name=name, op=operators).SerializeToString(), False)
    return name


def _best(net: str) -> float:
    # The first run allocates.
    workspace.RunNet(net, 1)
    once = _time(net, 1)
    runs = max(1, min(MOST_RUNS, int(ENOUGH / max(once, 1e-9))))
    rounds = min(ROUNDS, int(MOST / max(once, 1e-9)))
    return min([once, *(_time(net, runs) for _ in range(rounds))])


def _time(net: str, runs: int) -> float:
    start = time.perf_counter()
    workspace.RunNet(net, runs)
    return (time.perf_counter() - start) / runs
