"""The blobs that the steps of a loop keep, copied out of their workspaces for as long as they are looked at."""

import contextlib
import itertools
from typing import FrozenSet, Iterator, List, NamedTuple

import numpy as np
from caffe2.python import workspace

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.step_workspaces import copy_step_blobs, has_run, steps_of_last_run


class StepBlobs(NamedTuple):
    """Copies in the current workspace; blob `b` of step `t` is `<prefix>_b<t>`. `steps` is T of the last run."""

    prefix: str
    found: FrozenSet[str]
    timestep: str
    steps: int

    def has(self, blob: str) -> bool:
        """Whether each step of the last run has such a blob."""
        return all(self._name(blob, step) in self.found for step in range(self.steps))

    def arrays(self, blob: str) -> List[np.ndarray]:
        return [workspace.FetchBlob(self._name(blob, step)) for step in range(self.steps)]

    def workspaces(self) -> int:
        """How many step workspaces there are: an earlier run over a longer sequence leaves its own."""
        return next(step for step in itertools.count() if self._name(self.timestep, step) not in self.found)

    def _name(self, blob: str, step: int) -> str:
        # The executor has the number of each step in a blob of its own.
        of_executor = "{}_{}_rnnexec_t{step}{step}".format(self.prefix, blob, step=step)
        if blob == self.timestep and of_executor in self.found:
            return of_executor
        return "{}_{}{}".format(self.prefix, blob, step)


@contextlib.contextmanager
def step_blobs(caller: str, loop: Loop) -> Iterator[StepBlobs]:
    """Copies of what the steps of `loop` keep since its last run; afterwards the workspace is as it was.

    Raises `ValueError`, in the name of `caller`, if the loop has not run or its steps keep nothing.
    """
    problems = Problems(caller)
    if not loop.has_backward_step:
        problems.add(
            "loop '{}' is forward only: its steps take turns in a few workspaces, and overwrite what the ones before "
            "have computed; to look into its steps, build it without forward_only, or optimize it without the rule "
            "'backward_loop'",
            loop.name,
        )
    elif not has_run(loop):
        problems.add("loop '{}' has not run to its end in this workspace", loop.name)
    elif steps_of_last_run(loop) == 0:
        problems.add("loop '{}' ran over a sequence of no steps", loop.name)
    problems.raise_if_any()
    prefix = _unused_prefix(caller)
    try:
        # Of names that two blobs share: whether it matters depends on which are asked for.
        found, _ = copy_step_blobs(caller, [loop], prefix)
        yield StepBlobs(prefix, frozenset(map(bytes.decode, found)), loop.timestep, steps_of_last_run(loop))
    finally:
        for blob in workspace.Blobs():
            if blob.startswith(prefix):
                workspace.C.Workspace.current.remove_blob(blob)


def _unused_prefix(name: str) -> str:
    taken = workspace.Blobs()
    candidates = itertools.chain([name], ("{}_{}".format(name, number) for number in itertools.count(1)))
    return next(prefix for prefix in candidates if not any(blob.startswith(prefix) for blob in taken))
