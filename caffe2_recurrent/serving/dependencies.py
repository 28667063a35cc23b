"""What the operators of a net read and write, and which of them some of its blobs depend on."""

from typing import Dict, Iterable, List, NamedTuple, Sequence, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.reading import read_loops


class Access(NamedTuple):
    """An operator, what it reads of the net around it, and what it writes there."""

    operator: caffe2_pb2.OperatorDef
    reads: List[str]
    writes: List[str]


def accesses_of(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[Access]:
    """Each operator with what it reads and writes; for a loop that is more than its operator lists."""
    listed = list(operators)
    loops = read_loops(caffe2_pb2.NetDef(op=listed))
    found = []
    for position, operator in enumerate(listed):
        reads, writes = list(operator.input), list(operator.output)
        if position in loops:
            loop = loops[position]
            # The engine finds these by their names, among the operator's inputs or not.
            states = [state.outer_states for state in loop.states]
            writes += states
            reads += sorted(loop.references.difference(reads))
            reads += [link.outer for link in loop.links if link.outer not in reads + states]
        found.append(Access(operator, reads, writes))
    return found


def outside_of_gradients(net: caffe2_pb2.NetDef) -> List[caffe2_pb2.OperatorDef]:
    """The operators that are neither of the gradient pass nor read what comes from it, as those of an optimizer do."""
    found = []
    from_gradients: Set[str] = set()
    for operator in net.op:
        if operator.is_gradient_op or from_gradients.intersection(operator.input):
            from_gradients.update(operator.output)
        else:
            from_gradients.difference_update(operator.output)
            found.append(operator)
    return found


def from_outside(accesses: Sequence[Access]) -> List[str]:
    """What the operators read before one of them has written it, in the order in which they do.

    The states of a loop count, if an operator reads one by its name: the engine wants to find them when a net is made.
    """
    written: Set[str] = set()
    found: Dict[str, None] = {}
    for access in accesses:
        found.update(dict.fromkeys(blob for blob in access.reads if blob not in written))
        written.update(access.operator.output)
    return list(found)


def needed_for(accesses: Sequence[Access], fed: Sequence[str], wanted: Sequence[str]) -> List[Access]:
    """The operators that the wanted blobs depend on in this run and in the next one."""
    at_end = set(wanted)
    while True:
        kept = _needed(accesses, set(fed), at_end)
        written = {blob for access in accesses for blob in access.writes}
        carried = written.intersection(from_outside(kept)).difference(fed)
        if carried <= at_end:
            return kept
        at_end |= carried


def _needed(accesses: Sequence[Access], fed: Set[str], at_end: Set[str]) -> List[Access]:
    """The operators that the values of some blobs at the end of a run depend on.

    What is fed is there at the beginning: an operator that writes it anew is needed for its value at the end alone.
    """
    unwritten, needed = set(at_end), set(at_end)
    kept = []
    for access in reversed(accesses):
        in_place = set(access.reads)
        if any(blob in unwritten or blob not in fed or blob in in_place for blob in needed.intersection(access.writes)):
            kept.append(access)
            needed = needed.difference(access.writes).union(access.reads)
            unwritten.difference_update(access.writes)
    return kept[::-1]
