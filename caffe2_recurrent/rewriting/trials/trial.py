"""What takes the least time on this machine, tried out.

What is compared takes turns, so that what else goes on in the machine meets all of it; and it is remembered, because
nets tend to have several loops of a size: by what is to be done and the threads that do it. Without trials the first of
what is to be compared wins.
"""

import contextlib
import contextvars
import functools
import math
import time
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Mapping, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping, Surroundings
from caffe2_recurrent.rewriting.switches import switched
from caffe2_recurrent.rewriting.trials import threads
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject, prepared
from caffe2_recurrent.rewriting.trials.turns import Turns

TURNS = 3
# Seconds of turns behind the first one, in which what is new gets warm, and in which the machine may have been slow.
SHORT = 0.03
# Seconds in which to wait for another turn that confirms a best time.
PATIENT = 0.3
# Seconds after which there is no other turn.
LONG = 2.0
# Bytes of inputs up to which all subjects are there at once.
LITTLE = 1 << 26
# So many results of each function are remembered, those that were last asked for.
REMEMBERED = 256

_trying = contextvars.ContextVar("_trying", default=True)


def trying(is_wanted: bool) -> ContextManager[None]:
    """Whether candidates are tried in the body. If not, the same is chosen in each process."""
    return switched(_trying, is_wanted)


def are_wanted() -> bool:
    """Whether candidates are tried here."""
    return _trying.get()


def in_turn(
    candidates: Mapping[Any, Callable[[], Subject]], steps: Optional[int] = None, one_by_one: bool = False
) -> Dict[Any, Seconds]:
    """The best times of all candidates, which are functions that say what is to be timed.

    Each is made ready once, so that turns are short, and phases in which the machine is slow meet all alike. Large ones
    are made ready again for each turn, and so are all that must not be there together: `one_by_one`.

    There are more turns while they take next to no time, and while a best time may be that of another phase than the
    others', as no other turn has confirmed it; and fewer after a long one. The clearly slow are left out from the third
    turn on, or from the second if turns take their time, and what takes long and is clearly slow has one turn; when one
    is left, it has won. What counts is a step, with its share of what is done once if there are so many `steps`.

    Without trials no other one ever ends but the first, which should be to leave things as they are.
    """
    if not are_wanted():
        return {name: Seconds(0.0, math.inf if index else 1.0) for index, name in enumerate(candidates)}
    subjects = {name: candidate() for name, candidate in candidates.items()}
    with _timers(subjects, one_by_one or sum(subject.size for subject in subjects.values()) > LITTLE) as timers:
        found, start = Turns(timers, steps), time.perf_counter()
        _take_turns(found, timers)
        first = taken = time.perf_counter() - start
        if taken > SHORT:
            found.leave_out()
        count = 1
        while len(found.close) > 1 and taken <= LONG:
            is_enough = count >= TURNS and taken - first >= SHORT
            if is_enough and (taken >= PATIENT or found.are_confirmed()):
                break
            _take_turns(found, timers)
            found.leave_out()
            count, taken = count + 1, time.perf_counter() - start
    return found.best()


def _take_turns(found: Turns, timers: Mapping[Any, Callable[[float], Seconds]]) -> None:
    for name in found.close:
        found.add(name, timers[name](found.of_interest()))


@contextlib.contextmanager
def _timers(subjects: Mapping[Any, Subject], one_by_one: bool) -> Iterator[Dict[Any, Callable[[float], Seconds]]]:
    if one_by_one:
        yield {name: functools.partial(_alone, subject) for name, subject in subjects.items()}
        return
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(prepared(subject)) for name, subject in subjects.items()}


def _alone(subject: Subject, of_interest: float) -> Seconds:
    with prepared(subject) as timer:
        return timer(of_interest)


_remembering: List[Any] = []
_known: List[Any] = []


def remembered(function: Callable[..., Any]) -> Any:
    """A function that times candidates, which does so once for the same arguments and threads, until `forget`."""

    @functools.lru_cache(maxsize=REMEMBERED)
    def cached(_: Any, *arguments: Any) -> Any:
        return function(*arguments)

    @functools.wraps(function)
    def remembering(*arguments: Any) -> Any:
        return cached((are_wanted(), threads.settings()), *arguments)

    _remembering.append(cached)
    return remembering


def known(function: Callable[..., Any]) -> Any:
    """A function that finds out what operators make here, timed or not, once for the same arguments and threads, until
    `forget`.
    """

    @functools.lru_cache(maxsize=REMEMBERED)
    def cached(_: Any, *arguments: Any) -> Any:
        # What they are made of may be chosen by the clock elsewhere, for other sizes than those that it has here.
        with trying(False):
            return function(*arguments)

    @functools.wraps(function)
    def remembering(*arguments: Any) -> Any:
        return cached(threads.settings(), *arguments)

    _known.append(cached)
    return remembering


def forget() -> None:
    """Let all be tried again, as if nothing had been."""
    forget_times()
    for cached in _known:
        cached.cache_clear()


def forget_times() -> None:
    """Let all be timed again; what operators make is still known."""
    for cached in _remembering:
        cached.cache_clear()


def rows_to_try(rows: int, inner: int, outer: int, enough: float) -> int:
    """As many of `rows` rows as make `enough` multiplications with `[inner, outer]`; time is in proportion to them."""
    return min(rows, max(1, int(enough / (inner * outer))))


def lone_loop(names: Iterable[str], weights: Iterable[str] = (), may_keep: Keeping = Keeping.NOTHING) -> Loop:
    """A loop of nothing, to have operators put in; its blobs are called by none of `names`, of which the first is its
    sequence. What it `may_keep` is made of `weights`, or of some of these.
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
        surroundings=Surroundings(fed=frozenset(weights)),
        may_keep=may_keep,
    )
