"""Slices 0..T-1 or 1..T of a blob `[T + 1, N, D]`: a view, where this Caffe2 has one of ATen's for it, or else a copy.

Of ATen's, older Caffe2s know `slice`, and newer ones, since its ends have been optional, `tensor_split`.
"""

from typing import Callable, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import ATEN, aten_is_missing
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import result

Way = Callable[[Loop, str, str, int], caffe2_pb2.OperatorDef]


def operator(loop: Loop, source: str, target: str, first: int) -> caffe2_pb2.OperatorDef:
    """`target` is what `source` has from slice `first` on: 0, without the last one, or 1."""
    way: Way = _by_copy if aten_is_missing() else _first_that_runs()
    return way(loop, source, target, first)


def _by_tensor_split(loop: Loop, source: str, target: str, first: int) -> caffe2_pb2.OperatorDef:
    rest = loop.new_blob(target + "_rest")
    outputs, end = ([target, rest], -1) if first == 0 else ([rest, target], 1)
    return new_operator(ATEN, [source], outputs, loop.forward, operator="tensor_split", indices=[end], dim=0)


def _by_slice(loop: Loop, source: str, target: str, first: int) -> caffe2_pb2.OperatorDef:
    # The end is excluded, and that of the last slice is beyond any.
    end = -1 if first == 0 else np.iinfo(np.int64).max
    return new_operator(
        ATEN, [source], [target], loop.forward, operator="slice", dim=0, start=first, end=int(end), step=1
    )


def _by_copy(loop: Loop, source: str, target: str, first: int) -> caffe2_pb2.OperatorDef:
    # To Slice, -1 is the end and -2 one before it.
    starts, ends = [first, 0, 0], [first - 2, -1, -1]
    return new_operator("Slice", [source], [target], loop.forward, starts=starts, ends=ends)


WAYS: Tuple[Way, ...] = (_by_tensor_split, _by_slice, _by_copy)


@trial.known
def _first_that_runs() -> Way:
    return next(way for way in WAYS if _runs(way))


def _runs(way: Way) -> bool:
    whole = np.zeros((3, 1, 1), np.float32)
    try:
        result([way(trial.lone_loop(["s", "t"]), "s", "t", 1)], {"s": whole}, "t")
    except RuntimeError:
        # There is no list of the operators of ATen that Caffe2 knows.
        return False
    return True
