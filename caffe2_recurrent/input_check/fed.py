"""What the workspace holds under a name, without a copy of it."""

from typing import NamedTuple, Optional

import numpy as np
from caffe2.python import workspace

from caffe2_recurrent.sizes import Shape


class Fed(NamedTuple):
    """A tensor in the workspace; `kind` is None where numpy cannot look at it, as on a GPU."""

    shape: Shape
    kind: Optional[np.dtype]

    @property
    def text(self) -> str:
        return str(self.shape) if self.kind is None else "{} {}".format(self.kind, self.shape)


def read_fed(blob: str) -> Optional[Fed]:
    """None if the workspace has no such tensor."""
    found = workspace.C.Workspace.current.blobs.get(blob)
    if found is None or not found.is_tensor():
        return None
    tensor = found.tensor()
    try:
        kind = tensor.data.dtype
    except RuntimeError:
        kind = None
    return Fed(tuple(int(size) for size in tensor.shape), kind)


def is_there(blob: str) -> bool:
    """Whether the workspace has something of that name, be it no tensor: a name alone, that nothing filled, is none."""
    if not workspace.HasBlob(blob):
        return False
    return read_fed(blob) is not None or b"(uninitialized)" not in bytes(workspace.FetchBlob(blob))
