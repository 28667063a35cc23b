"""The blobs that a caller of `cudnn_LSTM` gives for the gates: `{name: {layer: blob}}` for each side."""

import collections.abc
from typing import Any, Dict, Mapping, Union

from caffe2_recurrent.arguments import Blob, is_blob
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.problems import given
from caffe2_recurrent.weights import check_gate_names

Given = Mapping[str, Union[Blob, Mapping[int, Blob]]]
# [side][name][layer]
GateBlobs = Dict[str, Dict[str, Dict[int, Blob]]]


def read_gate_blobs(given_blobs: Mapping[str, Any], num_layers: int, checks: Checks) -> GateBlobs:
    """The blobs for the gates, [side][name][layer]; a side without any is left out."""
    found: GateBlobs = {}
    for side, blobs in given_blobs.items():
        role = side + "_params"
        if isinstance(blobs, collections.abc.Mapping):
            check_gate_names(role, blobs, checks.values)
            found[side] = {
                name: _read_layers("{}['{}']".format(role, name), entry, num_layers, checks)
                for name, entry in blobs.items()
            }
        elif blobs is not None:
            checks.types.add("{} must be a dict of blobs or None; got {}", role, given(blobs))
    return found


def _read_layers(role: str, entry: Any, num_layers: int, checks: Checks) -> Dict[int, Blob]:
    if is_blob(entry) and num_layers > 1:
        checks.values.add("{} must be a dict {{layer: blob}}, as there are {} layers", role, num_layers)
        return {}
    by_layer = {0: entry} if is_blob(entry) else entry
    if not isinstance(by_layer, collections.abc.Mapping) or not all(map(is_blob, by_layer.values())):
        checks.types.add("{} must be a blob, its name, or a dict {{layer: blob}}; got {}", role, given(entry))
        return {}
    # That a number below 1 is none has been noted.
    if num_layers > 0 and set(by_layer) != set(range(num_layers)):
        checks.values.add("{} has blobs for layers {}; there are {}", role, list(by_layer), list(range(num_layers)))
    return dict(by_layer)
