"""The values that a blob of a step has in turn, since operators may write it anew or in place.

An operator that is taken out of a step leaves its value under another name; what read it has to be told, in both
steps, and an operator of the backward step that computes the value again goes too.
"""

from typing import List, NamedTuple, Optional, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import ALONG_FEATURES, BINARY, ELEMENTWISE

# They may write to a blob of its own where they have worked in place.
NOT_IN_PLACE = ELEMENTWISE | BINARY | ALONG_FEATURES | frozenset(["Concat", "ExpandDims", "Reshape", "Squeeze"])


class Version(NamedTuple):
    """One value of a blob: the operators of both steps that read it, and the copy of its operator, if there is one."""

    readers: List[caffe2_pb2.OperatorDef]
    copy: Optional[caffe2_pb2.OperatorDef]


def of_step(loop: Loop, position: int, blob: str) -> Union[Version, str]:
    """The value of `blob` that the step's operator at `position` writes, or why it cannot be told from others."""
    backward = loop.gradient.operators if loop.gradient is not None else []
    return _version(loop.operators, position, blob, backward)


def of_backward_step(loop: Loop, position: int, blob: str) -> Union[Version, str]:
    """As `of_step`, for an operator of the backward step."""
    assert loop.gradient is not None
    if dataflow.reads(loop.operators, blob) or dataflow.writers(loop.operators, blob):
        return "the forward step uses '{}' too".format(blob)
    return _version(loop.gradient.operators, position, blob, [])


def rename(version: Version, old: str, new: str) -> None:
    """Let the readers of a value find it in `new`."""
    for reader in version.readers:
        reader.input[:] = [new if blob == old else blob for blob in reader.input]


def remove(operators: List[caffe2_pb2.OperatorDef], spent: List[caffe2_pb2.OperatorDef]) -> None:
    """Take these very operators out of the list; others may be equal to them."""
    operators[:] = [operator for operator in operators if all(operator is not other for other in spent)]


def _version(
    operators: List[caffe2_pb2.OperatorDef], position: int, blob: str, others: List[caffe2_pb2.OperatorDef]
) -> Union[Version, str]:
    if dataflow.reads(operators[:position], blob) and dataflow.writer(operators, blob, position) is None:
        return "'{}' is read before it is written".format(blob)
    readers = [operators[index] for index in dataflow.readers(operators, blob, position)]
    for reader in readers:
        if blob in reader.output and reader.type not in NOT_IN_PLACE:
            return "{} works in place on '{}'".format(reader.type, blob)
    written, again = dataflow.writers(operators, blob), dataflow.writers(others, blob)
    if not again:
        # The other step sees what is there in the end.
        seeing = [other for other in others if blob in other.input] if position == written[-1] else []
        return Version(readers + seeing, None)
    if [others[index] for index in again] != [operators[index] for index in written] or dataflow.reads(
        others[: again[0]], blob
    ):
        return "the backward step writes '{}' too".format(blob)
    copied = again[written.index(position)]
    readers += [others[index] for index in dataflow.readers(others, blob, copied)]
    return Version(readers, others[copied])
