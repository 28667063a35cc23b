"""A product of a step with weights, as a value."""

from typing import NamedTuple, Optional

from caffe2_recurrent.rewriting.products.row_widths import Widths

# Axes, so that each of several matrices is transposed.
LAST_TWO = [0, 2, 1]


class Product(NamedTuple):
    """The blobs of `Y = X W + b + a` in a step: X `[1, N, K]`, Y and a `[1, N, M]`, b `[M]`; a and b may be None.

    `columns` is W stored as `[K, M]`, `rows` W stored as `[M, K]`; one of the two is None. `batch` is N, if known.
    `sigmoid` is the blob of sigmoid(Y), if Y is wanted for nothing else, and the sigmoid is to be taken there too.
    There is an addend only where the way to have the product `adds`. With several `parts` W has as many matrices,
    `[parts, K, M]` or `[parts, M, K]`, and so has Y `[parts, N, M]`: by convolution, and without a bias. `widths` are
    what K comes of, as `row_widths.of_rows` finds it: None if nothing in front of the loop tells.
    """

    input: str
    columns: Optional[str]
    rows: Optional[str]
    bias: Optional[str]
    output: str
    batch: Optional[int]
    inner: int
    outer: int
    sigmoid: Optional[str] = None
    addend: Optional[str] = None
    parts: int = 1
    widths: Optional[Widths] = ()
