"""All that the workspace holds, to the last bit."""

from __future__ import annotations

import numpy as np
from caffe2.python import workspace


def contents() -> dict[str, object]:
    """Of each blob the type, the shape and the bytes; what has none of these as Caffe2 shows it."""
    return {blob: exact(workspace.FetchBlob(blob)) for blob in workspace.Blobs()}


def exact(value: object) -> object:
    """What is equal for equal bits only, NaN as well, which is not equal to itself."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)
