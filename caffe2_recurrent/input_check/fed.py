"""What the workspace holds under a name, without a copy of it."""

from typing import NamedTuple, Optional

import numpy as np
from caffe2.python import workspace

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.loops.sizes import Shape


class Fed(NamedTuple):
    """A tensor in the workspace, and the type of its elements."""

    shape: Shape
    kind: np.dtype

    @property
    def text(self) -> str:
        return "{} {}".format(self.kind, self.shape)


def read_fed(blob: str) -> Optional[Fed]:
    """None if the workspace has no such tensor."""
    shape, kind = workspace_blobs.shape(blob), workspace_blobs.kind(blob)
    return None if shape is None or kind is None else Fed(shape, kind)


def is_there(blob: str) -> bool:
    """Whether the workspace has something of that name, be it no tensor: a name alone, that nothing filled, is none."""
    if not workspace.HasBlob(blob):
        return False
    return workspace_blobs.is_tensor(blob) or b"(uninitialized)" not in bytes(workspace.FetchBlob(blob))
