"""What the current workspace holds, looked at and not copied: a large blob takes a second to fetch.

Source: class Blob in caffe2/python/pybind_state.cc.
"""

from typing import Any, Optional, Tuple

import numpy as np
from caffe2.python import workspace


def is_tensor(blob: str) -> bool:
    return shape(blob) is not None


def shape(blob: str) -> Optional[Tuple[int, ...]]:
    """None where there is no blob, nothing in it yet, or something that is no tensor."""
    found = _tensor(blob)
    return None if found is None else tuple(int(size) for size in found.shape)


def kind(blob: str) -> Optional[np.dtype]:
    """The type of the elements; None where `shape` is, and where numpy has no such type."""
    found = _tensor(blob)
    try:
        # An array that shares the memory of the tensor.
        array = found if found is None or isinstance(found, np.ndarray) else found.data
    except RuntimeError:
        return None
    return None if array is None else array.dtype


def _tensor(blob: str) -> Any:
    """The engine's tensor, a pointer that is good until anything writes to the blob; or a copy as an array, or None."""
    if not workspace.HasBlob(blob):
        return None
    # Gives the one that is there. `blobs` would list the whole workspace, and `tensor()` empty what is not on the CPU.
    held = workspace.C.Workspace.current.create_blob(blob)
    if held.is_tensor() and 0 not in held.as_tensor().shape:
        return held.as_tensor()
    try:
        # What is laid out for oneDNN comes as an array, too. Of what may have no type yet there is little to copy.
        fetched = workspace.FetchBlob(blob)
    except (RuntimeError, TypeError):
        return None
    return fetched if isinstance(fetched, np.ndarray) else None
