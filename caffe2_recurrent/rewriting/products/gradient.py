"""The gradients of a product Y = FC(X, W, b) over all steps: what they are of, and the blobs that they are to be in."""

from typing import List, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2


class Rows(NamedTuple):
    """The blob of an X, and how wide it is behind its leading dimensions."""

    blob: str
    width: int


class Gradient(NamedTuple):
    """dW, db, dX = FCGradient(X, W, dY), with W `[outer, inner]`.

    X may be the `rows` of several blobs beside each other. Then W is too, and so is its gradient, in `of_weights`. For
    that alone, without dX, nobody needs to know W.
    """

    rows: Tuple[Rows, ...]
    weights: Optional[str]
    of_result: str
    outer: int
    of_weights: Tuple[str, ...]
    of_bias: str
    of_rows: Optional[str] = None

    @classmethod
    def of(cls, operator: caffe2_pb2.OperatorDef, inner: int, outer: int) -> "Gradient":
        rows, weights, of_result = operator.input
        of_weights, of_bias, *of_rows = operator.output
        return cls(
            (Rows(rows, inner),), weights, of_result, outer, (of_weights,), of_bias, of_rows[0] if of_rows else None
        )

    @property
    def widths(self) -> List[int]:
        return [rows.width for rows in self.rows]

    @property
    def inner(self) -> int:
        return sum(self.widths)
