"""What each step of a loop computed, blob by blob.

    step workspaces -> copies named <blob><step> (step_blobs.py) -> one array for each blob

What no step keeps for itself is refused, with the reason: a number that looks like a step's value and is another's
would be worse than none.
"""

from typing import Dict, FrozenSet, Iterable, List, Optional, Union

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import Blob, is_blob, known_name, read_blobs
from caffe2_recurrent.blob_names import LINKED, SHARED
from caffe2_recurrent.debugging.step_blobs import StepBlobs, step_blobs
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.selection import AnyLoop, choose_loop
from caffe2_recurrent.nets import AnyNet
from caffe2_recurrent.problems import Problems, names

CALLER = "step_values"
WANTED = "a blob of the step net, a list of them, or None for all"


def step_values(
    net: AnyNet, blobs: Union[None, Blob, Iterable[Blob]] = None, loop: AnyLoop = None
) -> Union[np.ndarray, Dict[str, np.ndarray]]:
    """What the steps of a loop computed when `net` ran last; the workspace stays as it is.

    Args:
        net: the net that has run in the current workspace, with a backward step: a `ModelHelper`, a `core.Net` or a
            `NetDef`.
        blobs: names in the step net: of what its operators write, of slices of sequences and states, of the step
            number (int32). One, a list, or None for all that can be had. A string means the name as written, or else
            the one under the current `NameScope`.
        loop: which loop, if the net has several: its position among them, from 0 on, or one of its outputs.

    Returns:
        For one name an array `[T, ...]`: T steps, then the shape within a step, `[1, N, D]` for a slice. Otherwise such
        arrays by name. A blob that a step writes several times has the last value, a slice what its outer blob has now.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: the net has not run; the loop is forward only; blobs that the step net does not have, or that no
            step keeps for itself: all of them, with the reason.

    Source: caffe2/operators/rnn/recurrent_network_blob_fetcher_op.h.
    """
    types, values = Problems(CALLER), Problems(CALLER)
    wanted = None if blobs is None else read_blobs("blobs", blobs, types, WANTED)
    chosen = choose_loop(net, loop, types, values)
    with step_blobs(CALLER, chosen) as steps:
        reader = _Reader(chosen, steps)
        if wanted is None:
            return {blob: np.stack(steps.arrays(blob)) for blob in reader.to_be_had()}
        inner = {blob: known_name(blob, reader.blobs) for blob in wanted}
        for refusal in map(reader.refusal, inner.values()):
            if refusal is not None:
                values.add("{}", refusal)
        values.raise_if_any()
        arrays = {blob: np.stack(steps.arrays(name)) for blob, name in inner.items()}
    return arrays[str(blobs)] if is_blob(blobs) else arrays


class _Reader:
    """Says of the blobs of a step net whether each step has a value of its own, and if not, why."""

    def __init__(self, loop: Loop, steps: StepBlobs) -> None:
        self._loop, self._steps, self._workspaces = loop, steps, steps.workspaces()
        linked = [link.inner for link in loop.links]
        self.blobs = list(dict.fromkeys([loop.timestep, *linked, *_written(loop.operators)]))
        self._overwritten = _overwritten(loop)

    def to_be_had(self) -> List[str]:
        own = (blob for blob in self.blobs if blob not in self._loop.shared)
        return [blob for blob in own if self._reason(blob, blob) is None]

    def refusal(self, asked: str) -> Optional[str]:
        """Why the blob that is asked for has no value of its own in each step, or None."""
        return self._reason(asked, asked) if asked in self.blobs else self._no_blob_of_the_step(asked)

    def _reason(self, blob: str, asked: str) -> Optional[str]:
        """The same of a blob of the step, which the caller calls `asked`."""
        if blob in self._loop.shared:
            return (
                "'{}' lies in memory that all steps share (recompute_blobs_on_backward, or optimize), where only "
                "the last step's value is left; to be had are {}".format(asked, names(self.to_be_had()))
            )
        if blob in self._overwritten:
            return "the backward step has overwritten '{}' in each step".format(asked)
        other = self._confused_with(blob)
        if other is not None:
            return "'{}' cannot be told from '{}' at a later step; rename it in the step net".format(asked, other)
        if not self._steps.has(blob):
            return (
                "no step keeps '{}' for itself; a blob of that name existed outside when the net was created, and all "
                "steps write to it, or what ran is an optimised copy of the net (install(optimize=True))".format(asked)
            )
        if len({array.shape for array in self._steps.arrays(blob)}) > 1:
            return "'{}' has not the same shape in all steps; retrieve_step_blobs gives them one by one".format(asked)
        return None

    def _confused_with(self, blob: str) -> Optional[str]:
        """A blob whose copy of a later step has the name of this one's: `z1` of step 0 is `z` of step 10."""
        for other in self.blobs:
            digits = blob[len(other) :] if blob.startswith(other) else ""
            if digits.isdigit() and not digits.startswith("0") and int(digits + "0") < self._workspaces:
                return other
        return None

    def _no_blob_of_the_step(self, blob: str) -> str:
        loop = self._loop
        if blob in loop.inputs or loop.is_reference(blob):
            return "'{}' is outside of the loop, the same for all steps: FetchBlob('{}')".format(blob, blob)
        gradient = loop.gradient
        if gradient is not None and blob in _written(gradient.operators):
            outer = [link.outer for link in gradient.backward_links if link.inner == blob]
            there = "; what all steps have written is in '{}'".format(outer[0]) if outer else ""
            return "'{}' belongs to the backward step, whose blobs all steps share{}".format(blob, there)
        for ending in (SHARED, LINKED):
            if blob + ending in loop.written:
                return self._reason(blob + ending, blob) or "'{}' is called '{}' here".format(blob, blob + ending)
        return "the step net has no blob '{}'; to be had are {}".format(blob, names(self.to_be_had()))


def _written(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[str]:
    return [blob for operator in operators for blob in operator.output]


def _overwritten(loop: Loop) -> FrozenSet[str]:
    """Blobs of the step in whose place the backward step puts something else."""
    gradient = loop.gradient
    if gradient is None:
        return frozenset()
    # After optimize the gates can lie where their gradient will be.
    buffers = {link.outer for link in gradient.backward_links}
    return frozenset([link.inner for link in loop.links if link.outer in buffers] + _written(gradient.operators))
