"""Which blobs of a step have one row for each sequence of the batch: `[1, N, k]`, rows computed one by one.

What such a blob holds over all steps is `[T, N, k]`, and an operator over rows may run over all of them at once.
"""

import functools
from typing import Callable, List, Mapping, Optional, Set

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer

FEATURES = 2
DIMENSIONS = 3
# Each element from the elements in its place.
ELEMENTWISE = frozenset(["Copy", "Negative", "Relu", "Scale", "Sigmoid", "Sum", "StopGradient", "Tanh"])
# They repeat the smaller input, so both need rows, or one of them is the same in all steps and repeated.
BINARY = frozenset(["Add", "Div", "Mul", "Sub"])
# Rows from rows, if they work on the last axis; only the first input has rows.
ALONG_FEATURES = frozenset(["ElementwiseLinear", "FC", "FCTransposed", "Softmax", "Split"])
UNITS = frozenset(["GRUUnit", "LSTMUnit"])
UNITS_AND_GRADIENTS = UNITS.union(unit + "Gradient" for unit in UNITS)


def with_rows(loop: Loop, sizes: Sizes) -> Set[str]:
    """The blobs of the step that are known to have rows; what no rule below speaks of is left out."""
    rows = {link.inner for link in loop.links if len(sizes.shape(link.outer) or range(DIMENSIONS)) == DIMENSIONS}

    references, always_rows = loop.references, set(loop.known.always_rows)

    @functools.lru_cache(maxsize=None)
    def fixed() -> Mapping[str, Shape]:
        return sizes.when_larger().made_by(loop.before)

    for operator in loop.operators:
        outputs = _outputs_with_rows(operator, rows, always_rows, references, fixed)
        rows.difference_update(operator.output)
        rows.update(outputs)
    return rows


def has_rows(loop: Loop, blob: str, sizes: Sizes) -> bool:
    """Whether the blob of the step has rows, as the step shows or rules know of it."""
    return blob in loop.known.rows or blob in with_rows(loop, sizes)


def repeats(shape: Shape, rows: Shape) -> bool:
    """Whether a blob of that shape fits `rows` `[1, N, k]`, number by number, and has k columns itself."""
    leading = zip(shape[-2::-1], rows[-2::-1])
    return len(shape) <= len(rows) and shape[-1] == rows[-1] and all(own in (1, other) for own, other in leading)


def _outputs_with_rows(
    operator: caffe2_pb2.OperatorDef,
    rows: Set[str],
    always_rows: Set[str],
    references: Set[str],
    shapes: Callable[[], Mapping[str, Shape]],
) -> List[str]:
    if operator.type in ELEMENTWISE:
        found = (rows | always_rows).issuperset(operator.input) and not rows.isdisjoint(operator.input)
    elif operator.type in BINARY:
        others = {blob for blob in operator.input if blob not in rows}
        is_with_rows = len(others) < len(set(operator.input)) and references.issuperset(others)
        found = is_with_rows and all(_is_one_row(shapes().get(blob)) for blob in others)
    elif operator.type in ALONG_FEATURES:
        found = operator.input[0] in rows and integer(operator, "axis", 1) == FEATURES
    elif operator.type == "Concat":
        # Its second output holds sizes.
        found = rows.issuperset(operator.input) and integer(operator, "axis", 1) == FEATURES
        return list(operator.output[:1]) if found else []
    elif operator.type in UNITS:
        found = operator.input[0] in rows
    else:
        found = False
    return list(operator.output) if found else []


def _is_one_row(shape: Optional[Shape]) -> bool:
    """Whether the result is `[1, N, k]` if a blob of that shape is put together with one of `[1, N, k]`."""
    return shape is not None and len(shape) <= DIMENSIONS and all(size == 1 for size in shape[:-1])
