"""Where the parts of a batch begin and end, as each run finds it: operators for the inputs of `Slice`.

Part k of P has the sequences from N k // P on.
"""

from typing import Dict, Iterable, List, NamedTuple, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import Names
from caffe2_recurrent.operators import new_operator

# What `Slice` takes for the end of an axis.
END = -1

Operators = List[caffe2_pb2.OperatorDef]


class Layout(NamedTuple):
    """How many axes a blob has, and which of them is that of the batch."""

    axes: int
    batch: int


class Bounds:
    """Blobs that say where each part begins and ends in blobs of each of the `layouts`; `operators` make them.

    N is that of `sequence`, `[T, N, I]`, and in `batch`. `enough` says whether no part is empty.
    """

    def __init__(self, sequence: str, layouts: Iterable[Layout], parts: int, names: Names) -> None:
        self.operators: Operators = []
        self._names = names
        self._made: Dict[Tuple[int, ...], str] = {}
        self.batch = self.add("Shape", [sequence], "batch_size", axes=[1])
        self.enough = self.add("GE", [self.batch, self.filled(1, parts)], "batch_is_large_enough")
        inner = [self._quotient(part, parts) for part in range(1, parts)]
        self._bounds = {
            layout: [
                (
                    self.filled(layout.axes, 0) if part == 0 else self._at(inner[part - 1], layout, 0),
                    self.filled(layout.axes, END) if part == parts - 1 else self._at(inner[part], layout, END),
                )
                for part in range(parts)
            ]
            for layout in dict.fromkeys(layouts)
        }

    def slicing(self, blob: str, part: str, layout: Layout, number: int) -> caffe2_pb2.OperatorDef:
        """The operator that makes `part`, the one of that number, of `blob`."""
        return new_operator("Slice", [blob, *self._bounds[layout][number]], [part], _PLAIN)

    def _quotient(self, part: int, parts: int) -> str:
        times = self.batch if part == 1 else self.add("Mul", [self.batch, self.filled(1, part)], "batch_times")
        return self.add("Div", [times, self.filled(1, parts)], "batch_bound")

    def _at(self, bound: str, layout: Layout, elsewhere: int) -> str:
        """The bound on the axis of the batch, and that on all others."""
        before, behind = layout.batch, layout.axes - layout.batch - 1
        found = [self.filled(count, elsewhere) if count else None for count in (before, behind)]
        parts = [blob for blob in (found[0], bound, found[1]) if blob is not None]
        return self.add("Concat", parts, "batch_bounds", axis=0) if len(parts) > 1 else bound

    def filled(self, count: int, value: int) -> str:
        """So many times that number."""
        key = (count, value)
        if key not in self._made:
            self._made[key] = self.add("GivenTensorInt64Fill", [], "batch_fill", shape=[count], values=[value] * count)
        return self._made[key]

    def add(self, kind: str, inputs: List[str], name: str, **arguments: object) -> str:
        """What a new operator makes, called `name` or nearly so."""
        made = self._names.new(name)
        outputs = [made, self._names.new(name + "_sizes")] if kind == "Concat" else [made]
        self.operators.append(new_operator(kind, inputs, outputs, _PLAIN, **arguments))
        return made


_PLAIN = caffe2_pb2.OperatorDef()
