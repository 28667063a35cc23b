"""The blobs that the steps of a loop keep, copied out of their workspaces for as long as they are looked at."""

import contextlib
import functools
import itertools
import operator
import warnings
from typing import FrozenSet, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
from caffe2.python import core, workspace

from caffe2_recurrent.executor import retrieve_step_blobs
from caffe2_recurrent.loop import Loop
from caffe2_recurrent.problems import Problems


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
    if not _has_backward_step(loop):
        problems.add(
            "loop '{}' is forward only: its steps take turns in a few workspaces, and overwrite what the ones before "
            "have computed; build it without forward_only to look into its steps",
            loop.name,
        )
    elif not _has_run(loop):
        problems.add("loop '{}' has not run to its end in this workspace", loop.name)
    elif _steps(loop) == 0:
        problems.add("loop '{}' ran over a sequence of no steps", loop.name)
    problems.raise_if_any()
    prefix = _unused_prefix(caller)
    try:
        yield StepBlobs(prefix, _copied(caller, loop, prefix), loop.timestep, _steps(loop))
    finally:
        for blob in workspace.Blobs():
            if blob.startswith(prefix):
                workspace.C.Workspace.current.remove_blob(blob)


def _copied(caller: str, loop: Loop, prefix: str) -> FrozenSet[str]:
    net = core.Net(caller)
    net.Proto().op.extend([loop.forward])
    try:
        with warnings.catch_warnings():
            # Of names that two blobs share: whether it matters depends on which are asked for.
            warnings.simplefilter("ignore")
            return frozenset(name.decode() for name in retrieve_step_blobs(net, prefix))
    except RuntimeError as error:
        raise ValueError(
            "{}: the engine cannot copy what the steps of loop '{}' keep: an operator has an output that it does not "
            "write, as Dropout has its mask with is_test=1".format(caller, loop.name)
        ) from error


def _unused_prefix(name: str) -> str:
    taken = workspace.Blobs()
    candidates = itertools.chain([name], ("{}_{}".format(name, number) for number in itertools.count(1)))
    return next(prefix for prefix in candidates if not any(blob.startswith(prefix) for blob in taken))


def _has_backward_step(loop: Loop) -> bool:
    # A net that Caffe2 has cut out of a training net has the argument, emptied.
    return any(given.name == "backward_step_net" and (given.HasField("n") or given.s) for given in loop.forward.arg)


def _has_run(loop: Loop) -> bool:
    """Whether a run came to its end, where the engine sizes the outputs by the states.

    A step that failed can have left the places of later workspaces empty, and the engine crashes where it copies one.
    """
    workspaces = loop.outputs[-1]
    # Fetched, a blob that holds no tensor is a description of its type.
    if not workspace.HasBlob(workspaces) or b"ScratchWorkspaces" not in bytes(workspace.FetchBlob(workspaces)):
        return False
    outputs = [alias for alias in loop.aliases if alias.offset >= 0]
    shapes = [(_shape(alias.outer_states), _shape(alias.outer_output), alias.offset) for alias in outputs]
    return all(
        states is not None
        and output is not None
        and _elements(output) * states[0] == _elements(states) * (states[0] - offset)
        for states, output, offset in shapes
    )


def _steps(loop: Loop) -> int:
    """T of the last run, by the states: the sequence may have been fed anew since."""
    states, initial = (_shape(outer) for outer in loop.states[0])
    assert states is not None
    return states[0] - (initial[0] if initial is not None and len(initial) == 3 else 1)


def _shape(outer: str) -> Optional[Tuple[int, ...]]:
    """None if there is no such tensor. After a failed run its content may be gone, so that is not looked at."""
    blob = workspace.C.Workspace.current.blobs.get(outer)
    return tuple(blob.tensor().shape) if blob is not None and blob.is_tensor() else None


def _elements(shape: Tuple[int, ...]) -> int:
    return functools.reduce(operator.mul, shape, 1)
