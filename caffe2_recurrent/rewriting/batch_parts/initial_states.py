"""Initial states of a batch that is parted, whatever axes a run gives them, as `[1, N, D]`.

    zeros = ConstantFill([1, N, D]);  rows = Add(zeros, initial);  initial_k = Slice(rows, ...) for each part k
    gradient = SumReduceLike(Concat(gradient_0, gradient_1, ...), initial)

`Add` repeats `[D]` for each sequence, and `SumReduceLike` sums the gradients of these.

Source: initializeRecurrentInput in caffe2/operators/rnn/recurrent_network_op.h, which takes any of these.
"""

from typing import Dict, Iterable, Optional

from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.rewriting.batch_parts.bounds import Bounds

ONE_ROW, AXES, BATCH = 1, 3, -2


def has_rows(shape: Optional[Shape], batch: Optional[int]) -> bool:
    """Whether it is the same row for all sequences, or has one for each."""
    if not shape or len(shape) > AXES:
        return False
    return len(shape) == ONE_ROW or shape[BATCH] == batch


def rows_of(initial: Iterable[str], sizes: Sizes, bounds: Bounds) -> Dict[str, str]:
    """Blobs with these initial states as rows, by the names of these, which operators of `bounds` make."""
    zeros: Dict[int, str] = {}
    rows: Dict[str, str] = {}
    for blob in initial:
        width = sizes.known(blob)[-1]
        if width not in zeros:
            shape = bounds.add(
                "Concat", [bounds.filled(1, 1), bounds.batch, bounds.filled(1, width)], "batch_shape", axis=0
            )
            zeros[width] = bounds.add("ConstantFill", [shape], "batch_zeros", value=0.0, input_as_shape=1)
        rows[blob] = bounds.add("Add", [zeros[width], blob], "batch_rows")
    return rows


def shape_of_rows(shape: Shape, batch: int) -> Shape:
    """That of the rows of so many sequences."""
    return (shape[0] if len(shape) == AXES else 1, batch, shape[-1])
