"""Trials in tests whose clock is drawn: what is faster is another thing with each number, and the same for one."""

import contextlib
import zlib

import pytest

from caffe2_recurrent.operators import as_bytes
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds
from made_up_clock import make_up_clock

# Seconds that a step takes at most.
SLOWEST = 1000


@contextlib.contextmanager
def clock_of(number):
    """Trials in the body go by such a clock, and run nothing."""

    def seconds(subject):
        operators = b"".join(map(as_bytes, subject.step))
        shapes = sorted(subject.shapes.values(), key=str)
        return Seconds(0.0, 1.0 + zlib.crc32(operators + repr((number, shapes)).encode()) % SLOWEST)

    with pytest.MonkeyPatch.context() as patch:
        make_up_clock(patch, seconds)
        trial.forget_times()
        try:
            yield
        finally:
            trial.forget_times()
