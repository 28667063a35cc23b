"""What a net takes from the nets around it, and what it leaves there."""

from typing import Any, FrozenSet, Iterable, Set, Tuple, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.arguments import Blob, is_blob, is_iterable
from caffe2_recurrent.operators import read_before_written
from caffe2_recurrent.problems import Problems, given, names


def get_external_blob_names(
    net: Union[core.Net, caffe2_pb2.NetDef], lexical_scope: Iterable[Blob]
) -> Tuple[Set[str], Set[str]]:
    """The outer blobs that a net reads and writes, as an operator that runs the net has to list them.

    Args:
        net: the net that another one is to run, as the branch of an `If` or the body of a `While`.
        lexical_scope: all blobs that exist around it: a set, list or dict of blobs or full names.

    Returns:
        input_names: blobs that the net reads before it writes them, and its declared external inputs.
        output_names: its declared external outputs, and the blobs it writes that are in the scope. Whatever else it
            writes is its own.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: all blobs that the net reads but neither it nor the scope knows.
    """
    proto, visible = _read(net, lexical_scope)
    read_first, written = _reads_and_writes(proto)
    unknown = read_first - visible - set(proto.external_input)
    if unknown:
        problems = Problems("get_external_blob_names")
        problems.add(
            "net '{}' reads {} before it writes them, but neither the lexical scope nor the net's external inputs "
            "have them",
            proto.name,
            names(sorted(unknown)),
        )
        problems.raise_if_any()
    return read_first.union(proto.external_input), (written & visible).union(proto.external_output)


def _reads_and_writes(proto: caffe2_pb2.NetDef) -> Tuple[Set[str], Set[str]]:
    """The blobs that some operator reads and none before it has written; and all that are written."""
    return {*read_before_written(proto.op)}, {blob for operator in proto.op for blob in operator.output}


def _read(net: Any, lexical_scope: Any) -> Tuple[caffe2_pb2.NetDef, FrozenSet[str]]:
    problems = Problems("get_external_blob_names")
    if not isinstance(net, (core.Net, caffe2_pb2.NetDef)):
        problems.add("net must be a core.Net or a NetDef; got {}", given(net))
    visible: FrozenSet[str] = frozenset()
    # A name alone would pass for a list of its letters.
    if is_blob(lexical_scope) or not is_iterable(lexical_scope):
        problems.add("lexical_scope must be a set, list or dict of blobs; got {}", given(lexical_scope))
    else:
        blobs = list(lexical_scope)
        for blob in blobs:
            if not is_blob(blob):
                problems.add("lexical_scope takes blobs or their names; got {}", given(blob))
        visible = frozenset(map(str, blobs))
    problems.raise_if_any(TypeError)
    return (net.Proto() if isinstance(net, core.Net) else net), visible
