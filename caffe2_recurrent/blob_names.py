"""The names in use in a net, and new ones beside them."""

from typing import Iterable, List, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import RENAMED, TIMESTEP, nets_of

# What ends the names of blobs of a step that would otherwise have those of others in another kind of memory: shared by
# all steps, kept by each, linked to a slice of an outer blob, or a view of another blob.
SHARED, KEPT, LINKED, VIEW = "_shared", "_kept", "_linked", "_view"


class Names:
    """The names in use in a net and its step nets, so that a new blob gets one of its own."""

    def __init__(self, used: Iterable[str]) -> None:
        self._used: Set[str] = set(used)

    def new(self, name: str) -> str:
        (found,) = self.new_with(name, [""])
        return found

    def new_with(self, name: str, endings: Sequence[str]) -> List[str]:
        """New names, one with each of the `endings`, that are the same in front of these."""
        candidate, number = name, 0
        while not self._used.isdisjoint(candidate + ending for ending in endings):
            number += 1
            candidate = "{}_{}".format(name, number)
        found = [candidate + ending for ending in endings]
        self._used.update(found)
        return found


def all_names(net: caffe2_pb2.NetDef) -> List[str]:
    """Whatever may be the name of a blob in `net` and the nets of its operators; some more than once."""
    found = [*net.external_input, *net.external_output]
    for operator in net.op:
        found += names_of(operator)
    return found


def names_of(operator: caffe2_pb2.OperatorDef) -> List[str]:
    """Likewise, of one operator."""
    found = [*operator.input, *operator.output, *operator.control_input]
    for given in operator.arg:
        found += [value.decode(errors="replace") for value in given.strings]
        if given.name.endswith(RENAMED):
            found += [given.name[: -len(RENAMED)], given.s.decode()]
        elif given.name == TIMESTEP:
            found.append(given.s.decode())
    for net in nets_of(operator):
        found += all_names(net)
    return found
