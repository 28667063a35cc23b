"""Two gradients over all steps with one dY, by oneDNN: those of both weights in one product.

    dW, db = FCGradient(X, W, dY)        =>  [dW, dV], db from [X, Z] and dY, in a layout of `onednn_over_steps`
    dV, dc, dZ = FCGradient(Z, V, dY)        dV, dc copied,  dZ = dY V as the convolution of an image V

The second may be needed later than the first, and dZ is computed there.
"""

from typing import List, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import copied, new_operator
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import onednn, onednn_convolutions, onednn_over_steps
from caffe2_recurrent.rewriting.products.gradient import Gradient, Rows
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, Operators
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout

# How many of the results of an FCGradient are not of the rows.
WITHOUT_ROWS = 2


class Pair(NamedTuple):
    """FCGradients of X and of Z, as wide as `widths`, with the same dY `[.., outer]`; the first is without dX."""

    first: caffe2_pb2.OperatorDef
    second: caffe2_pb2.OperatorDef
    widths: Tuple[int, int]
    outer: int

    @property
    def inner(self) -> int:
        return sum(self.widths)


class Copy(NamedTuple):
    """oneDNN's copy of dY: its blob, whether it stays for the next run, and whether the second gradient needs it."""

    blob: str
    stays: bool
    is_needed_later: bool

    @property
    def kept(self) -> List[str]:
        return [self.blob] if self.stays else []


def layouts(inner: int, outer: int, keeps_plans: bool) -> List[Layout]:
    """Those for both, `inner` columns wide together. The gradient of Z wants dY without zeros beside it."""
    found = onednn_over_steps.layouts(GRADIENT, inner, outer, keeps_plans)
    return [layout for layout in found if layout.outer == outer]


def why_not(pair: Pair) -> Optional[str]:
    """Why this Caffe2 cannot compute the gradient of Z by itself, if it is asked for; None if it can."""
    if len(pair.second.output) == WITHOUT_ROWS:
        return None
    if onednn.CONVOLUTION not in onednn.ways():
        return "this Caffe2 cannot convolve to have '{}' by itself".format(pair.second.output[-1])
    if pair.outer == 1:
        return "'{}' would be of an image of one channel".format(pair.second.output[-1])
    return None


def in_a_net(loop: Loop, pair: Pair, layout: Layout, rows: Optional[int] = None) -> Tuple[Operators, Operators]:
    """Operators of the outer net in place of either gradient, over `rows` rows, if known."""
    left = [loop.new_blob(blob + "_to_share") for blob in pair.second.output[:WITHOUT_ROWS]]
    copies = [new_operator("Copy", [share], [blob], pair.second) for share, blob in zip(left, pair.second.output)]
    there = Copy(
        onednn_over_steps.to_share(loop, pair.first).blob,
        stays=onednn_over_steps.stays(pair.first.type, layout, rows),
        is_needed_later=len(pair.second.output) > WITHOUT_ROWS,
    )
    of_both = _of_both(loop, pair, layout, left, there)
    return of_both, _of_rows(loop, pair, copies, there) if there.is_needed_later else copies


def _of_both(loop: Loop, pair: Pair, layout: Layout, left: List[str], there: Copy) -> Operators:
    """Both gradients of weights, that of the second in blobs that are `left` for it."""
    (of_x, of_bias), (of_z, other_bias) = pair.first.output, left
    emitter = Emitter(loop, pair.first, of_x)
    x, z = (Rows(operator.input[0], width) for operator, width in zip((pair.first, pair.second), pair.widths))
    gradient = Gradient((x, z), None, pair.first.input[2], pair.outer, (of_x, of_z), of_bias)
    onednn_over_steps.copy_gradient_there(emitter, gradient, layout, there.blob)
    onednn_over_steps.emit_gradient(emitter, gradient, layout, there.blob)
    emitter.add("Copy", [of_bias], other_bias)
    made = [of_x, of_bias, *left, *([there.blob] if there.stays or there.is_needed_later else [])]
    other = copied(pair.second)
    # It may know dY by a name that is not there yet.
    other.input[2], other.output[:] = pair.first.input[2], left
    return onednn.in_a_net(emitter.operators, made, loop, there.kept, otherwise=[pair.first, other])


def _of_rows(loop: Loop, pair: Pair, copies: Operators, there: Copy) -> Operators:
    """The copies, and the gradient of the second's rows."""
    emitter = Emitter(loop, pair.second, pair.second.output[0])
    emitter.operators += copies
    onednn_convolutions.emit_gradient_of_rows(emitter, Gradient.of(pair.second, pair.widths[1], pair.outer), there.blob)
    spent = [] if there.stays else [there.blob]
    made = [*pair.second.output, *there.kept]
    return onednn.in_a_net(emitter.operators, made, loop, there.kept, spent, otherwise=[pair.second])
