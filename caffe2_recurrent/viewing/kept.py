"""Where the blobs that a step computes lie, and how much memory they take.

A step has a workspace of its own; around it is one that all steps share, and around that the one of the net. An
operator's output is made in the step's workspace unless one of the others has a blob of its name.
Source: RecurrentNetworkOp in caffe2/operators/rnn/recurrent_network_op.h, Workspace::CreateBlob.
"""

import enum
from dataclasses import dataclass
from typing import Collection, Iterable, List, NamedTuple, Optional, Tuple

from caffe2_recurrent.viewing.loop_sizes import LoopSizes
from caffe2_recurrent.viewing.structure import Structure
from caffe2_recurrent.viewing.tensors import Tensor

# An int32 that says which step it is.
STEP_NUMBER_BYTES = 4


class Place(enum.Enum):
    OWN = "in each step's own workspace"
    SHARED = "in memory that the steps share"
    VIEW = "in a slice of a blob of the net"
    NET = "in the blob of that name that the net has"


class StepBlob(NamedTuple):
    """A blob that the step computes.

    `tensor` is None where its size is not known. `read_back`: the backward step reads it; `computed_again`: the
    backward step writes it anew before that.
    """

    inner: str
    place: Place
    tensor: Optional[Tensor]
    read_back: bool
    computed_again: bool

    @property
    def bytes(self) -> Optional[int]:
        return None if self.tensor is None else self.tensor.bytes


@dataclass(frozen=True)
class Memory:
    """`blobs` are all that a step computes.

    `workspaces` is in how many workspaces the steps keep them, `numbers` how many step numbers these hold; None where
    that depends on an unknown T.
    """

    blobs: Tuple[StepBlob, ...]
    workspaces: Optional[int]
    numbers: Optional[int]

    @property
    def kept(self) -> List[StepBlob]:
        """What each step keeps in its own workspace."""
        return [blob for blob in self.blobs if blob.place is Place.OWN]

    @property
    def bytes_of_kept(self) -> Optional[int]:
        return _sum(blob.bytes for blob in self.kept)

    @property
    def bytes_per_step(self) -> Optional[int]:
        """What a step keeps, with its number; None if a size is unknown."""
        return None if self.bytes_of_kept is None else self.bytes_of_kept + STEP_NUMBER_BYTES

    @property
    def total_bytes(self) -> Optional[int]:
        """What all steps together keep; None if a size is unknown."""
        if self.bytes_of_kept is None or self.workspaces is None or self.numbers is None:
            return None
        return self.workspaces * self.bytes_of_kept + self.numbers * STEP_NUMBER_BYTES


def read_memory(structure: Structure, sizes: LoopSizes, blobs_of_net: Collection[str]) -> Memory:
    """`blobs_of_net` are those that operators of the net around the loop read and write."""
    views = {view.inner for view in (*structure.views, *structure.shown)}
    outer = {*structure.outer_inputs, *structure.outer_outputs, *blobs_of_net}
    read_back, again = set(structure.read_back), set(structure.computed_again)
    blobs = []
    for inner in structure.computed:
        if inner in views:
            place = Place.VIEW
        elif inner in outer:
            place = Place.NET
        else:
            place = Place.SHARED if inner in structure.shared else Place.OWN
        blobs.append(StepBlob(inner, place, sizes.inner.get(inner), inner in read_back, inner in again))
    workspaces = _workspaces(structure, sizes.steps)
    # The executor gives each step's number a blob of its own, in whatever workspace the step runs.
    return Memory(tuple(blobs), workspaces, sizes.steps if structure.executor.enabled else workspaces)


def _workspaces(structure: Structure, steps: Optional[int]) -> Optional[int]:
    if structure.backward is not None:
        return steps
    return None if steps is None else min(structure.workspaces_in_turn, steps)


def _sum(parts: Iterable[Optional[int]]) -> Optional[int]:
    found = list(parts)
    return None if None in found else sum(part for part in found if part is not None)
