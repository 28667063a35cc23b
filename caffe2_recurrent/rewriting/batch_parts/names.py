"""What the blobs of a part are called: by the names that those of the whole batch have, behind a prefix.

A prefix, as the engine and Caffe2 make the names of gradients by endings.
"""

from typing import Collection, Iterable, List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.operators import renamed


def new_prefixes(parts: int, used: Iterable[str]) -> List[str]:
    """One for each part, with which no name begins that is in use."""
    names, number = list(used), 0
    while True:
        ending = "_{}/".format(number) if number else "/"
        found = ["part_{}{}".format(part, ending) for part in range(parts)]
        if not any(name.startswith(tuple(found)) for name in names):
            return found
        number += 1


def prefixed(operator: caffe2_pb2.OperatorDef, prefix: str, whole: Collection[str]) -> caffe2_pb2.OperatorDef:
    """A copy of an operator between blobs of a part; those that are `whole` are the same for all parts."""

    def own(blob: str) -> str:
        return blob if not blob or blob in whole else prefix + blob

    return renamed(operator, {blob: own(blob) for blob in names_of(operator)})
