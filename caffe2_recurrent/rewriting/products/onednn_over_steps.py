"""FC and FCGradient over all steps, by oneDNN.

oneDNN's kernel for the gradient of weights `[M, K]` takes K in blocks of 16 and M in blocks of 64; for other sizes
there is another one, which takes about twice as long. And with many rows and columns it gets slower, as if nothing
stayed in the caches. Therefore the gradient may be had from operands with zeros behind their last columns, and in
parts of the columns of X and W:

    dW, db, dX = FCGradient(X, W, dY)

    dY' = [dY, 0]
    for X_i, W_i in parts of [X, 0], [[W, 0], [0, 0]]:    dW_i, db, dX_i = FCGradient(X_i, W_i, dY')
    dW, dX = the parts beside each other, without what is there of the zeros

Or all of it is had from convolutions, and so are products; see `onednn_convolutions.py`.

What a loop's products have in common with oneDNN, Y or dY, stays there, unless it is much and glibc's malloc may hold
on to it once it is freed. What is large it gets from the system each time. Of what is little it gives the end of the
heap back, where that is more than twice the largest piece that came from the system so far: dY, what oneDNN makes of
it, and what else is freed with them may be so much, by what the process did before. Pages that are new cost more than
what is copied into them. Two gradients with one dY may share its copy.

Source: caffe2/ideep/operators/fully_connected_op.cc, and brgemm_bwd_w among oneDNN's inner products; M_MMAP_THRESHOLD
and M_TRIM_THRESHOLD of glibc's mallopt.
"""

from typing import List, NamedTuple, Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.elementwise import only_floats
from caffe2_recurrent.rewriting.emit import Emitter, aten_is_missing
from caffe2_recurrent.rewriting.products import onednn, onednn_convolutions
from caffe2_recurrent.rewriting.products.gradient import Gradient, Rows
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, PRODUCT
from caffe2_recurrent.rewriting.products.onednn_copies import as_rows, copy_back, copy_there, shape_of_result

INNER_BLOCK, OUTER_BLOCK = 16, 64
PARTS = (1, 2, 4)
# Narrower parts were slower where they were measured.
NARROWEST = 128
# What FCGradient makes, in its order.
RESULTS = ("of_weights", "of_bias", "of_rows")
# To Slice, the end of a dimension.
ALL = -1
# Bytes up to which memory that stays is little beside what else the loop has, and those from which on glibc's malloc
# always gives memory back to the system.
LITTLE, LARGE = 16 * 2**20, 32 * 2**20
FLOAT = 4

Operators = List[caffe2_pb2.OperatorDef]


class Layout(NamedTuple):
    """`inner` columns of X and `outer` ones of dY, zeros among them; X in `parts`. Or `convolved`, without either: in
    one of the ways of `onednn_convolutions`.
    """

    inner: int
    outer: int
    parts: int = 1
    convolved: Optional[str] = None

    @property
    def widths(self) -> List[int]:
        """The columns of each part; whole blocks, but for the last if `inner` is no multiple of them."""
        blocks = -(-self.inner // INNER_BLOCK)
        ends = [blocks * part // self.parts * INNER_BLOCK for part in range(1, self.parts)] + [self.inner]
        return [end - start for start, end in zip([0, *ends], ends)]


def layouts(kind: str, inner: int, outer: int, keeps_plans: bool = True) -> List[Layout]:
    """The layouts that an operator of `kind` can be had in; the first is without zeros and parts."""
    plain = Layout(inner, outer)
    # With an image of one channel, as dX of one column has it, oneDNN leaves the result in another order than it says.
    can_convolve = onednn.CONVOLUTION in onednn.ways() and outer > 1
    convolved = [plain._replace(convolved=onednn_convolutions.IN_BLOCKS)] if can_convolve else []
    if kind == PRODUCT:
        if can_convolve and keeps_plans and onednn_convolutions.rows_stay_where_they_lie(inner, outer):
            convolved.append(plain._replace(convolved=onednn_convolutions.IN_ROWS))
        return [plain, *convolved]
    full = Layout(_whole_blocks(inner, INNER_BLOCK), _whole_blocks(outer, OUTER_BLOCK))
    if full != plain and aten_is_missing():
        # It is ATen that puts zeros behind columns.
        full = plain
    if can_convolve and keeps_plans and onednn_convolutions.transposed_are_right():
        transposed = (onednn_convolutions.TRANSPOSED, onednn_convolutions.ROWS_TRANSPOSED)
        convolved += [plain._replace(convolved=way) for way in transposed]
    in_parts = [full._replace(parts=parts) for parts in PARTS if parts == 1 or full.inner >= parts * NARROWEST]
    return list(dict.fromkeys([plain, *in_parts, *convolved]))


class Shared(NamedTuple):
    """oneDNN's copy of dY, for two gradients; `is_there`: whether the first of them has made it."""

    blob: str
    is_there: bool


def in_a_net(
    loop: Loop,
    operator: caffe2_pb2.OperatorDef,
    plain: Layout,
    layout: Layout,
    rows: Optional[int] = None,
    shared: Optional[Shared] = None,
) -> Operators:
    """Operators of the outer net in place of `operator`, over `rows` rows, if known; `plain` has no zeros and parts."""
    emitter = Emitter(loop, operator, operator.output[0])
    is_to_stay = stays(operator.type, layout, rows)
    results = shared.blob if shared is not None else _results(emitter, operator.type, layout, is_to_stay)
    is_there = shared is not None and shared.is_there
    if operator.type == PRODUCT:
        left, weights, bias = operator.input
        for blob, dimensions in ((as_rows(emitter, left, plain.inner), 2), (weights, 2), (bias, 1)):
            only_floats.emit(emitter, blob, dimensions)
        emit_product = _PRODUCTS[layout.convolved]
        emit_product(emitter, operator, layout.inner, layout.outer, results)
    else:
        gradient = Gradient.of(operator, plain.inner, plain.outer)
        if not is_there:
            copy_gradient_there(emitter, gradient, layout, results)
        emit_gradient(emitter, gradient, layout, results)
    # Nets that run operators side by side have to know who writes what stays.
    made = list(operator.output) + ([results] if (is_to_stay or shared is not None) and not is_there else [])
    kept = [results] if is_to_stay else []
    spent = [results] if is_there and not is_to_stay else []
    # Without rows there is nothing that oneDNN could convolve.
    return onednn.in_a_net(emitter.operators, made, loop, kept, spent, otherwise=[operator])


def to_share(loop: Loop, operator: caffe2_pb2.OperatorDef) -> Shared:
    """A blob for the copy of dY that `operator` is to leave for another gradient, and that nothing else writes to."""
    return Shared(Emitter(loop, operator, operator.output[0]).blob("results_to_share"), False)


def stays(kind: str, layout: Layout, rows: Optional[int]) -> bool:
    """Whether Y or dY stays in oneDNN's memory: not what is in blocks, as the result of a convolution is."""
    in_blocks = kind == PRODUCT and layout.convolved == onednn_convolutions.IN_BLOCKS
    size = (rows or 0) * layout.outer * FLOAT
    return bool(size) and not LITTLE < size < LARGE and not in_blocks


def _results(emitter: Emitter, kind: str, layout: Layout, is_to_stay: bool) -> str:
    """The blob of oneDNN for Y or dY; if it stays, the same one for all products of the loop, if it is laid out so."""
    if not is_to_stay:
        return emitter.blob("results")
    in_rows = kind == PRODUCT and layout.convolved == onednn_convolutions.IN_ROWS
    key = ("onednn", "results", layout.outer, in_rows)
    made = emitter.loop.made
    if key not in made:
        made[key] = emitter.blob("results_in_rows" if in_rows else "results_to_keep")
    return made[key]


def _whole_blocks(size: int, block: int) -> int:
    return -(-size // block) * block


def copy_gradient_there(emitter: Emitter, gradient: Gradient, layout: Layout, results: str) -> None:
    """dY in oneDNN's memory."""
    # As rows before it is copied: a blob of oneDNN keeps its memory for what has the same shape.
    of_result = as_rows(emitter, gradient.of_result, gradient.outer)
    below = layout.outer - gradient.outer
    if below:
        of_result = _with_zeros(emitter, of_result, [0, below])
    copy_there(emitter, of_result, results)


def emit_gradient(emitter: Emitter, gradient: Gradient, layout: Layout, results: str) -> None:
    """The gradients in a layout; `results` is dY in oneDNN's memory."""
    if layout.convolved:
        emit = _GRADIENTS[layout.convolved]
        emit(emitter, gradient, results)
    else:
        _emit_gradient(emitter, gradient, layout, results)


def _emit_product(emitter: Emitter, operator: caffe2_pb2.OperatorDef, inner: int, outer: int, results: str) -> None:
    rows, weights, bias = operator.input
    shape = shape_of_result(emitter, operator, outer)
    inputs = [
        copy_there(emitter, rows, emitter.blob("rows"), [-1, inner]),
        copy_there(emitter, weights, emitter.blob("weights")),
        copy_there(emitter, bias, emitter.blob("bias")),
    ]
    onednn.add(emitter, "FC", inputs, [results], training_mode=1)
    copy_back(emitter, results, operator.output[0], shape)


_PRODUCTS = {
    None: _emit_product,
    onednn_convolutions.IN_BLOCKS: onednn_convolutions.emit_product,
    onednn_convolutions.IN_ROWS: onednn_convolutions.emit_product_in_rows,
}
_GRADIENTS = {
    onednn_convolutions.IN_BLOCKS: onednn_convolutions.emit_gradient,
    onednn_convolutions.TRANSPOSED: onednn_convolutions.emit_gradient_transposed,
    onednn_convolutions.ROWS_TRANSPOSED: onednn_convolutions.emit_gradient_of_filters,
}


def _emit_gradient(emitter: Emitter, gradient: Gradient, layout: Layout, results: str) -> None:
    inner, outer, of_rows = gradient.inner, gradient.outer, gradient.of_rows
    shape = None if of_rows is None else emitter.new("Shape", [gradient.rows[0].blob], "shape_of_rows")
    beside, below = layout.inner - inner, layout.outer - outer
    rows = _beside(emitter, gradient.rows)
    if beside:
        rows = _with_zeros(emitter, as_rows(emitter, rows, inner), [0, beside])
    weights = gradient.weights
    if weights is None:
        # The operator wants to see their shape.
        weights = emitter.new("ConstantFill", [], "like_weights", shape=[layout.outer, layout.inner], value=0.0)
    elif beside or below:
        weights = _with_zeros(emitter, weights, [0, beside, 0, below])
    parts = zip(
        _parts(emitter, copy_there(emitter, rows, emitter.blob("rows"), [-1, layout.inner]), layout),
        _parts(emitter, copy_there(emitter, weights, emitter.blob("weights")), layout),
    )
    made = []
    for part_of_rows, part_of_weights in parts:
        made.append([emitter.blob(role) for role in RESULTS[: 2 if of_rows is None else 3]])
        onednn.add(emitter, GRADIENT, [part_of_rows, part_of_weights, results], made[-1])
        onednn.free(emitter, [part_of_rows, part_of_weights])

    shares = list(zip(*made))
    last_row = outer if below else ALL
    last_column = inner if beside else ALL
    _bring_weights_back(emitter, shares[0], gradient, [last_row, last_column])
    # Every part has the whole of it.
    _bring_back(emitter, shares[1][:1], gradient.of_bias, [last_row])
    if of_rows is not None:
        _bring_back(emitter, shares[2], of_rows, [ALL, last_column])
        assert shape is not None
        emitter.reshape_in_place_like(of_rows, shape)


def _beside(emitter: Emitter, rows: Sequence[Rows]) -> str:
    """Rows beside each other; one of them as it is."""
    if len(rows) == 1:
        return rows[0].blob
    return emitter.concat([as_rows(emitter, blob, width) for blob, width in rows], "beside", 1)


def _bring_weights_back(emitter: Emitter, parts: Sequence[str], gradient: Gradient, ends: Sequence[int]) -> None:
    """The gradients of the weights of parts of columns that oneDNN has."""
    if len(gradient.of_weights) == 1:
        _bring_back(emitter, parts, gradient.of_weights[0], ends)
        return
    joined = emitter.blob("of_all_weights")
    _bring_back(emitter, parts, joined, ends)
    emitter.split_into(joined, list(gradient.of_weights), axis=1, split=gradient.widths)


def _parts(emitter: Emitter, blob: str, layout: Layout) -> List[str]:
    """Parts of the columns of what oneDNN has."""
    if layout.parts == 1:
        return [blob]
    parts = [emitter.blob("part") for _ in layout.widths]
    onednn.add(emitter, "Split", [blob], parts, axis=1, split=layout.widths)
    onednn.free(emitter, [blob])
    return parts


def _bring_back(emitter: Emitter, parts: Sequence[str], blob: str, ends: Sequence[int]) -> None:
    """`blob` of parts of columns that oneDNN has, up to `ends` of each dimension."""
    joined = parts[0]
    if len(parts) > 1:
        outputs = [emitter.blob("joined"), emitter.blob("joined_sizes")]
        joined = onednn.add(emitter, "Concat", parts, outputs, axis=1)
    onednn.add(emitter, onednn.FROM, [joined], [emitter.blob("copied")])
    for dimension, end in enumerate(ends):
        # Slice cuts one dimension at a time.
        if end != ALL:
            only_there = [end if other == dimension else ALL for other in range(len(ends))]
            emitter.new("Slice", emitter.operators[-1].output[:1], "cut", starts=[0] * len(ends), ends=only_there)
    emitter.operators[-1].output[0] = blob


def _with_zeros(emitter: Emitter, blob: str, pads: Sequence[int]) -> str:
    """`pads`: how many go in front of and behind the columns, and perhaps the rows."""
    return emitter.aten("constant_pad_nd", [blob], "with_zeros", pad=pads)
