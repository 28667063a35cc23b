"""What the blobs of a part are called: by the names that those of the whole batch have, behind a prefix.

A prefix, as the engine and Caffe2 make the names of gradients by endings.
"""

from typing import Callable, Collection, Iterable, List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.operator_arguments import RENAMED, STEP_NETS, set_arguments
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import LOOPS, copied, renamed

TIMESTEP = "timestep"


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

    made = copied(operator)
    if made.type in LOOPS:
        # Of a step net that is text, a copy would be renamed.
        steps = {name: net_argument(made, name) for name in STEP_NETS}
        set_arguments(made, {name: step for name, step in steps.items() if step.op})
        _rename_in_arguments(made, own)
    return renamed(made, {blob: own(blob) for blob in names_of(operator)})


def _rename_in_arguments(operator: caffe2_pb2.OperatorDef, own: Callable[[str], str]) -> None:
    """All strings of a loop are names of blobs, and so are what it renames and those that it renames them to."""
    for given in operator.arg:
        if given.name.endswith(RENAMED):
            given.name = own(given.name[: -len(RENAMED)]) + RENAMED
            given.s = own(given.s.decode()).encode()
        elif given.name == TIMESTEP:
            given.s = own(given.s.decode()).encode()
        given.strings[:] = [own(blob.decode()).encode() for blob in given.strings]
