"""Blobs of the net around a loop, copied to oneDNN's memory and back, in the shapes that products want."""

from typing import Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn


def as_rows(emitter: Emitter, blob: str, width: int) -> str:
    """`blob` `[..., width]` as `[-1, width]`, in its own memory."""
    rows = emitter.new("Alias", [blob], "as_rows")
    emitter.reshape_in_place(rows, [-1, width])
    return rows


def copy_there(emitter: Emitter, blob: str, target: str, shape: Optional[Sequence[int]] = None) -> str:
    """`blob` in oneDNN's memory, of another `shape` if one is given."""
    onednn.add(emitter, onednn.TO, [blob], [target])
    if shape is not None:
        reshape_there(emitter, target, shape)
    return target


def reshape_there(emitter: Emitter, blob: str, shape: Sequence[int]) -> None:
    """What is in oneDNN's memory, in the order of its elements, in place."""
    onednn.add(emitter, "Reshape", [blob], [blob, emitter.blob("old_shape")], shape=shape)


def copy_back(emitter: Emitter, source: str, blob: str, shape: str) -> None:
    """`blob` from oneDNN's memory, in the shape that the blob `shape` says."""
    onednn.add(emitter, onednn.FROM, [source], [blob])
    emitter.reshape_in_place_like(blob, shape)


def shape_of_result(emitter: Emitter, operator: caffe2_pb2.OperatorDef, outer: int) -> str:
    """A blob with the shape of an FC's result: what is in front of the features in that of the rows, and `outer`."""
    leading = emitter.new("Shape", operator.input[:1], "leading", axes=list(range(integer(operator, "axis", 1))))
    last = emitter.new("GivenTensorInt64Fill", [], "last", shape=[1], values=[outer])
    return emitter.concat([leading, last], "shape", 0)
