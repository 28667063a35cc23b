"""The values at which a net is checked: given, drawn for a given shape, or those of the workspace."""

from typing import Any, Dict, Iterable, Mapping, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.arguments import is_blob, is_integer
from caffe2_recurrent.problems import Problems, given, names
from caffe2_recurrent.scratch_workspace import scratch_workspace

WORKSPACE = "caffe2_recurrent_gradcheck"


def read_values(values: Any, problems: Problems) -> Dict[str, Any]:
    """The caller's `values` by name: arrays, float32 in place of float64, and shapes."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        problems.add("values must map blobs to arrays or shapes, like {{'x': (5, 2, 3)}}; got {}", given(values))
        return {}
    read: Dict[str, Any] = {}
    for blob, value in values.items():
        if not is_blob(blob):
            problems.add("values maps blobs or their names; got {}", given(blob))
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
            read[str(blob)] = value.astype(np.float32) if value.dtype.kind == "f" else value
        elif isinstance(value, (tuple, list)) and all(is_integer(size) and size > 0 for size in value):
            read[str(blob)] = tuple(int(size) for size in value)
        else:
            problems.add(
                "values['{}'] must be an array of numbers, or a shape like (5, 2, 3); got {}", blob, given(value)
            )
    return read


def find_values(
    inputs: Sequence[str],
    values: Mapping[str, Any],
    init_net: Optional[caffe2_pb2.NetDef],
    seed: int,
    problems: Problems,
) -> Dict[str, Any]:
    """A value for each input: the caller's, one from the workspace, or what `init_net` makes of it."""
    unknown = [blob for blob in values if blob not in inputs]
    if unknown:
        problems.add("values has {}; the inputs of the net are {}", names(unknown), names(inputs))
    random = np.random.RandomState(seed)
    found: Dict[str, Any] = {}
    for blob in inputs:
        if isinstance(values.get(blob), tuple):
            found[blob] = random.standard_normal(values[blob]).astype(np.float32)
        elif blob in values:
            found[blob] = values[blob]
        elif workspace.HasBlob(blob):
            found[blob] = workspace.FetchBlob(blob)
    found.update(_made(init_net, [blob for blob in inputs if blob not in found]))
    missing = [blob for blob in inputs if blob not in found]
    if missing:
        problems.add("there is no value for {}; give an array or a shape in values", names(missing))
    for blob, value in found.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
            problems.add("'{}' has elements that are not finite", blob)
    return found


def _made(init_net: Optional[caffe2_pb2.NetDef], blobs: Iterable[str]) -> Dict[str, Any]:
    if init_net is None or not list(blobs):
        return {}
    with scratch_workspace(WORKSPACE):
        workspace.RunNetOnce(core.Net(init_net))
        return {blob: workspace.FetchBlob(blob) for blob in blobs if workspace.HasBlob(blob)}
