"""Which operator of a list writes the value that another one reads; blobs may be written more than once."""

from typing import Container, Dict, Iterable, Iterator, List, Optional, Sequence

from caffe2.proto import caffe2_pb2

Operators = Sequence[caffe2_pb2.OperatorDef]


def writer(operators: Operators, blob: str, before: Optional[int] = None) -> Optional[int]:
    """The position of the last operator before position `before` (default: of all) that writes `blob`, or None."""
    for position in reversed(range(len(operators) if before is None else before)):
        if blob in operators[position].output:
            return position
    return None


def writers(operators: Operators, blob: str) -> List[int]:
    return [position for position, operator in enumerate(operators) if blob in operator.output]


def writing(operators: Operators) -> Dict[str, List[caffe2_pb2.OperatorDef]]:
    """By the blob, the operators that write it, in their order."""
    found: Dict[str, List[caffe2_pb2.OperatorDef]] = {}
    for operator in operators:
        for blob in dict.fromkeys(operator.output):
            found.setdefault(blob, []).append(operator)
    return found


def readers(operators: Operators, blob: str, after: int = -1) -> List[int]:
    """The operators behind position `after` that read `blob` before another one writes it anew."""
    return list(_readers(operators, blob, after))


def leading_to(operators: Operators, blobs: Iterable[str], through: Optional[Container[str]] = None) -> List[int]:
    """The positions of the operators whose results `blobs` are, or are made of; by way of `through` alone, if given."""
    needed = set(blobs)
    found: List[int] = []
    for position in reversed(range(len(operators))):
        if not needed.isdisjoint(operators[position].output):
            found.insert(0, position)
            needed.update(blob for blob in operators[position].input if through is None or blob in through)
    return found


def reads(operators: Operators, blob: str) -> bool:
    return any(blob in operator.input for operator in operators)


def _readers(operators: Operators, blob: str, after: int) -> Iterator[int]:
    for position in range(after + 1, len(operators)):
        if blob in operators[position].input:
            yield position
        if blob in operators[position].output:
            return


def rename(operator: caffe2_pb2.OperatorDef, old: str, new: str) -> None:
    """Let `operator` read and write `new` where it read and wrote `old`."""
    for blobs in (operator.input, operator.output):
        for position, blob in enumerate(blobs):
            if blob == old:
                blobs[position] = new
