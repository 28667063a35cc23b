"""Operators with the engine's clock read between them.

    A; B; C    =>    clock; clock; A; clock; B; clock; C; clock; total += differences; calls += 1

The first difference is that of two readings in a row. What is added up lies outside of the loop, where a step net
writes to a blob of the name that it looks for: backward steps share all other blobs that they write.
"""

from typing import Iterable, List, NamedTuple, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.operators import new_operator

# Nanoseconds since 1970: int64, no dimensions. Source: caffe2/operators/stats_ops.cc.
CLOCK = "WallClockTime"
MICROSECONDS = 1e-3  # in a nanosecond


class Reading(NamedTuple):
    """What has been added up: microseconds for reading the clock, and for each operator `[operators]`; how often."""

    clock: float
    operators: np.ndarray
    calls: int


class Clocked(NamedTuple):
    """`operators` with the clock between them, and the outer blobs that these add to."""

    operators: List[caffe2_pb2.OperatorDef]
    differences: int
    outer_total: str
    outer_calls: str
    outer_one: str

    @property
    def outer(self) -> List[str]:
        return [self.outer_total, self.outer_calls, self.outer_one]

    def start(self) -> None:
        """Set the sums in the current workspace to zero."""
        workspace.FeedBlob(self.outer_total, np.zeros(self.differences, dtype=np.int64))
        workspace.FeedBlob(self.outer_calls, np.zeros(1, dtype=np.int64))
        workspace.FeedBlob(self.outer_one, np.ones(1, dtype=np.int64))

    def read(self) -> Reading:
        """The sums since `start`."""
        clock, *operators = workspace.FetchBlob(self.outer_total) * MICROSECONDS
        return Reading(float(clock), np.array(operators), int(workspace.FetchBlob(self.outer_calls)[0]))


def with_clock(operators: Sequence[caffe2_pb2.OperatorDef], names: Names) -> Clocked:
    """The operators of a step, or of a net, with the clock between them; `names` has names for the blobs."""
    made: List[caffe2_pb2.OperatorDef] = []
    beside = caffe2_pb2.OperatorDef()

    def add(kind: str, inputs: Iterable[str], outputs: Iterable[str], **arguments: int) -> None:
        made.append(new_operator(kind, list(inputs), list(outputs), beside, **arguments))

    times = [names.new("clock") for _ in range(len(operators) + 2)]
    add(CLOCK, [], times[:1])
    add(CLOCK, [], times[1:2])
    for operator, time in zip(operators, times[2:]):
        made.append(operator)
        add(CLOCK, [], [time])
    before, after, elapsed = (names.new("clock_" + name) for name in ("before", "after", "elapsed"))
    total, calls, one = (names.new("clock_" + name) for name in ("total", "calls", "one"))
    add("Concat", times[:-1], [before, names.new("clock_sizes")], axis=0, add_axis=1)
    add("Concat", times[1:], [after, names.new("clock_sizes")], axis=0, add_axis=1)
    add("Sub", [after, before], [elapsed])
    add("Add", [total, elapsed], [total])
    add("Add", [calls, one], [calls])
    return Clocked(made, len(times) - 1, total, calls, one)
