"""Which gradients that pass through an operator unchanged need a blob of their own.

For `y = Sum(a, b)` Caffe2 has no gradient operator: it lets `y_grad` stand for the gradients of a and b as well. In a
step net three things can go wrong with that:

    y = Sum(o, b), o an output of the step    o's gradient from outside, `o_grad`, would be replaced by `y_grad`
                                              instead of being added to it
    y = Scale(y); y = Sum(y, a)               the gradient of Scale overwrites `y_grad` before a's producer, or a
                                              link, has read it as a's gradient
    z = Sum(y, b); y = Sum(y, a)              `y_grad`, which stands for the gradient of two values of y, would have to
                                              be added up into itself; Caffe2 refuses
"""

import bisect
import itertools
from typing import Any, Dict, List, Sequence, Set, Tuple

from caffe2.python import core

from caffe2_recurrent.operators import GRADIENT_SUFFIX, gradient_name


class PassedThrough:
    """Answers for one gradient pass, from the versions of blobs that Caffe2's `core.IR` has noted."""

    def __init__(self, ir: core.IR, outputs: frozenset) -> None:
        self._ir = ir
        self._outputs = outputs
        self._producers = {
            (blob, version): index
            for index, operator in enumerate(ir.ssa)
            for blob, version in operator.out_versions.items()
        }
        # What follows is looked up only where a gradient passes through, and then often.
        self._live: Set[int] = set()
        self._read_by: Dict[Tuple[str, int], List[int]] = {}
        self._used: Dict[str, List[int]] = {}
        self._overwritten: Dict[str, List[int]] = {}
        self._writes: Dict[Tuple[Any, ...], bool] = {}

    def needs_own_blob(self, index: int, blob: str, gradient: str) -> bool:
        """Whether the gradient of `blob`, passed through operator `index` under this name, needs a blob of its own."""
        read_version = self._ir.ssa[index].in_versions[blob]
        if blob in self._outputs and read_version == self._ir.frontier[blob]:
            return True
        source = gradient[: -len(GRADIENT_SUFFIX)]
        readers = self._readers(blob, read_version)
        if source == blob:
            return len(readers) > 1
        # The name must keep its value until it is read: where gradients of several readers are added up, if this is the
        # last of them, else at the latest by the producer's gradient. That of an external input is read at the end.
        is_last = index == readers[0] and bool(self._ir.gradient_generators[blob][read_version])
        read_at = self._added_at(blob, read_version) if is_last else self._producers.get((blob, read_version), 0)
        # Only a reader can overwrite; which of them do takes much longer to find out.
        return _any_within(self._usages(source), read_at, index) and _any_within(
            self._overwrites(source), read_at, index
        )

    def _readers(self, blob: str, version: int) -> List[int]:
        # Remembered: a blob that all operators read would be gone through for each of them.
        if (blob, version) not in self._read_by:
            self._live = self._live or self._find_live()
            self._read_by[blob, version] = [
                index for index in self._ir.input_usages[blob][version] if index in self._live
            ]
        return self._read_by[blob, version]

    def _added_at(self, blob: str, version: int) -> int:
        """The operator at which the gradients of several readers are added up: the first, whether it has one or not."""
        return int(self._ir.input_usages[blob][version][0])

    def _usages(self, blob: str) -> List[int]:
        """The operators that read `blob`, in forward order, whichever value of it."""
        if blob not in self._used:
            self._used[blob] = sorted(itertools.chain.from_iterable(self._ir.input_usages[blob].values()))
        return self._used[blob]

    def _find_live(self) -> Set[int]:
        """The operators on which an output depends; no gradient reaches the others."""
        live: Set[int] = set()
        needed = {(blob, self._ir.frontier[blob]) for blob in self._outputs}
        for index in reversed(range(len(self._ir.ssa))):
            _, in_versions, out_versions = self._ir.ssa[index]
            if not needed.isdisjoint(out_versions.items()):
                live.add(index)
                needed.update(in_versions.items())
        return live

    def _overwrites(self, blob: str) -> List[int]:
        """The operators, in forward order, at which the backward pass writes `<blob>_grad`."""
        if blob not in self._overwritten:
            found: Set[int] = set()
            for version in list(self._ir.input_usages[blob]):
                readers = self._readers(blob, version)
                found.update(index for index in readers if self._writes_gradient(index, blob))
                if len(readers) > 1:
                    found.add(self._added_at(blob, version))
            self._overwritten[blob] = sorted(found)
        return self._overwritten[blob]

    def _writes_gradient(self, index: int, blob: str) -> bool:
        """Whether the gradient of this reader of `blob` is computed, not passed through."""
        operator = self._ir.ssa[index].op
        positions = tuple(at for at, name in enumerate(operator.input) if name == blob)
        arguments = tuple(argument.SerializeToString() for argument in operator.arg)
        key = (operator.type, arguments, len(operator.input), positions)
        if key not in self._writes:
            try:
                gradients = [gradient_name(output) for output in operator.output]
                derived, _ = core.GradientRegistry.GetGradientForOp(operator, gradients)
            except Exception:
                # It is reported when its turn comes.
                derived = []
            self._writes[key] = any(gradient_name(blob) in gradient.output for gradient in derived)
        return self._writes[key]


def _any_within(ordered: Sequence[int], start: int, end: int) -> bool:
    """Whether one of the `ordered` numbers is `start` or more and less than `end`."""
    return bisect.bisect_left(ordered, start) < bisect.bisect_left(ordered, end)
