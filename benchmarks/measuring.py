"""Timing several subjects in turn, and what is made of the times."""

import contextlib
import ctypes
import gc
import math
import os
import statistics
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from other_interpreter import calm_down, first_line

# A shorter one says more about the clock and who ran before than about the subject.
MINIMUM = 0.02
REPEATS_AT_MOST = 10000
# What is fast is measured more often, up to so many times the rounds.
MORE_ROUNDS = 8
# Where these may be: newer versions have the first.
SETTERS = ("MKL_Set_Num_Threads", "omp_set_num_threads", "MKL_Set_Dynamic")
LIBRARIES = [os.path.join(os.path.dirname(torch.__file__), "lib", name) for name in ("libtorch_cpu.so", "libtorch.so")]


class Subject(NamedTuple):
    """`run(repeats)` does the same thing so many times, and returns the seconds that it took."""

    name: str
    run: Callable[[int], float]


class Measured(NamedTuple):
    """Seconds of each round for one repeat, by subject, and what went wrong with those that are left out."""

    seconds: Dict[str, List[float]]
    failures: Dict[str, str]


def set_threads(threads: int) -> None:
    """The number of threads of both torch and Caffe2, which are one library here: MKL's and OpenMP's.

    As Caffe2's `GlobalInit` sets it, which does so but once: MKL may use fewer where there is little to do. It may in
    torch too, until somebody calls `torch.set_num_threads`. The RNN executor has threads of its own, and their number
    is set in the operators.
    """
    library = _library()
    if library is not None:
        library.omp_set_num_threads(threads)
    if current_threads() != threads:
        # Torch has an OpenMP of its own.
        torch.set_num_threads(threads)
    if library is None:
        return
    library.MKL_Set_Num_Threads(threads)
    # What `torch.set_num_threads` may have said: to all, and since some version to the thread that called it.
    library.MKL_Set_Dynamic(1)
    if hasattr(library, "MKL_Set_Num_Threads_Local"):
        library.MKL_Set_Num_Threads_Local(0)


def _library() -> Optional[ctypes.CDLL]:
    """What has MKL in it and knows where OpenMP is; None if it cannot be found."""
    for path in LIBRARIES:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            if all(hasattr(library, name) for name in SETTERS):
                return library
    return None


def current_threads() -> int:
    return int(torch.get_num_threads())


def measure(
    subjects: Sequence[Subject],
    rounds: int,
    enough: float = 0.0,
    minimum: float = MINIMUM,
) -> Measured:
    """Time all subjects in turn; a subject that raises an error is left out from then on.

    That is done `rounds` times, and up to `MORE_ROUNDS` times as often while less than `enough` seconds have passed.
    """
    failures: Dict[str, str] = {}
    repeats: Dict[str, int] = {}
    seconds: Dict[str, List[float]] = {}

    def attempt(subject: Subject, count: int) -> Optional[float]:
        try:
            return subject.run(count)
        except Exception as error:
            failures[subject.name] = first_line(error)
            seconds.pop(subject.name, None)
            return None

    def look(subject: Subject) -> Optional[int]:
        """How often it has to run to take long enough, once what it needs is allocated and warm."""
        count = 1
        for is_first in (True, False, False):
            elapsed = attempt(subject, count)
            if elapsed is None:
                return None
            if not is_first:
                count = _repeats(elapsed / count, minimum)
                if count == 1:
                    break
        return count

    for subject in subjects:
        count = look(subject)
        if count is not None:
            repeats[subject.name], seconds[subject.name] = count, []
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for round_ in range(MORE_ROUNDS * rounds):
            if round_ >= rounds and time.perf_counter() - start > enough:
                break
            # Who goes first finds other caches than who goes second.
            for subject in subjects if round_ % 2 == 0 else reversed(subjects):
                if subject.name in seconds:
                    count = repeats[subject.name]
                    calm_down()
                    elapsed = attempt(subject, count)
                    if elapsed is not None:
                        seconds[subject.name].append(elapsed / count)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return Measured(seconds, failures)


def _repeats(once: float, minimum: float) -> int:
    return max(1, min(REPEATS_AT_MOST, math.ceil(minimum / max(once, 1e-9))))


def faster(variants: Dict[str, List[float]]) -> Optional[str]:
    """The name of the variant with the smallest time; None if there is none."""
    return min(variants, key=lambda name: min(variants[name])) if variants else None


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median of theirs / ours, each taken within one round."""
    return statistics.median(their / our for their, our in zip(theirs, ours))


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> Optional[float]:
    """e in `seconds ~ sizes ** e`: the slope of both as logarithms; None for less than two points."""
    if len(set(sizes)) < 2:
        return None
    points = [(math.log(size), math.log(time_)) for size, time_ in zip(sizes, seconds)]
    mean_x, mean_y = (statistics.mean(values) for values in zip(*points))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
