"""What a sequence is made of, beside the state, in one product of the step; it is tried out."""

import functools
from typing import Dict, Iterable, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operators import SUM, as_bytes, new_operator
from caffe2_recurrent.rewriting import passes
from caffe2_recurrent.rewriting.elementwise import only_floats
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import sigmoids, step_products
from caffe2_recurrent.rewriting.products.step_products import (
    COLUMNS,
    MULTIPLICATION,
    ROWS,
    TRANSPOSED_ROWS,
    weights_shape,
)
from caffe2_recurrent.rewriting.products.step_subject import subject_of
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.packed_products import PackedProducts, what_may_be_kept
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps
from caffe2_recurrent.rewriting.rules.sequence_bias import SequenceBias
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS, FEATURES, has_rows
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject
from caffe2_recurrent.wiring import Link

# The product of a trial.
RESULT = "y"
# It must be faster by this factor, in the step and in what is done before the loop.
GAIN = 1.02


class JoinedSequence(Rule):
    """before the loop: X = FC(x, V, c)
    step: Y = BatchMatMul(h, W);  Y = Sum(Y, X_t)

    =>  before the loop: [W, V, c]
        step: Y = BatchMatMul([h, x_t, 1], [W, V, c])

    The product over all steps is gone, and the sum. It is for sequences that `sequence_bias` has made. The gradient
    operator, which wants to see the shape of X, sees that of a blob of one byte an element.
    """

    name = "joined_sequence"

    def sites(self, loop: Loop) -> Iterable[Site]:
        sequence = loop.inputs[0]
        if sequence != loop.made.get(SequenceBias.name):
            return
        for position, operator in enumerate(loop.operators):
            for link in loop.links:
                if link.outer == sequence and operator.type == SUM and link.inner in operator.input:
                    yield Site("Sum -> '{}'".format(operator.output[0]), (position, link))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        position, _ = site.where
        multiplying = product_at(loop, position)
        if multiplying is None:
            return "the sum does not take the place of a product with weights that are the same in all steps"
        product = loop.operators[multiplying]
        if not step_products.is_plain(product) or not has_rows(loop, product.input[0], sizes):
            return "'{}' is not known to have one row for each sequence".format(product.input[0])
        x, weights, bias = source_of(loop).input
        written = {blob for step in loop.steps for operator in step for blob in operator.output}
        if x in written.union(link.inner for link in loop.all_links):
            return "'{}' is what a blob of the step is called too".format(x)
        dimensions = {x: 3, product.input[1]: 2, weights: 2, bias: 1}
        shapes = {blob: weights_shape(loop, blob, sizes) for blob in dimensions}
        unknown = [blob for blob, shape in shapes.items() if shape is None]
        if unknown:
            return "the size of '{}' is not known; give shapes".format("' and '".join(unknown))
        for blob, shape in shapes.items():
            assert shape is not None
            if len(shape) != dimensions[blob]:
                return "'{}' has {} dimensions".format(blob, len(shape))
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        size = _size(loop, site, sizes)
        if size is None:
            return "the numbers of steps and sequences are not known; give shapes"
        found: Dict[bool, Seconds] = _tried(size)
        if GAIN * found[True].of_step(size.steps) > found[False].of_step(size.steps):
            return "for [{0.rows}, {0.inner} + {0.of_sequence}] x [.., {0.outer}] it is not faster".format(size)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        position, link = site.where
        multiplying, source = product_at(loop, position), source_of(loop)
        assert multiplying is not None
        adding, product = loop.operators[position], loop.operators[multiplying]
        x, weights, bias = source.input
        slice_, ones = loop.new_blob("x_t"), _ones(loop, x)
        emitter = Emitter(loop, product, product.output[0])
        joined = emitter.concat([product.input[0], slice_, ones], "rows", FEATURES)
        of_state = product.input[1]
        all_weights = _weights(loop, product, weights, bias)
        for outer in (ones, all_weights, _is_of_floats(loop, x)):
            loop.add_reference(outer)
        product.input[:] = [joined, all_weights]
        step_products.drop_transposed(loop, of_state)
        adding.input.remove(link.inner)
        if len(adding.input) == 1:
            del loop.operators[position]
        loop.operators[multiplying:multiplying] = emitter.operators
        loop.known.rows |= {joined, slice_}
        like = None
        if loop.gradient is not None:
            like = _like(loop, x, bias)
            sizes.add(like, source.output[0])
        loop.before[:] = [operator for operator in loop.before if operator is not source]
        loop.replace_first_sequence(x, slice_, like=like)


def product_at(loop: Loop, adding: int) -> Optional[int]:
    """The position of the product in whose place a sum with it is put, if nothing else reads the product."""
    total = loop.operators[adding].output[0]
    found = dataflow.writer(loop.operators, total, adding)
    if found is None or loop.operators[adding].input[0] != total:
        return None
    product = loop.operators[found]
    is_product = product.type == MULTIPLICATION and step_products.is_with_weights(loop, product)
    return found if is_product and dataflow.readers(loop.operators, total, found) == [adding] else None


def source_of(loop: Loop) -> caffe2_pb2.OperatorDef:
    return next(operator for operator in loop.before if loop.inputs[0] in operator.output)


def _ones(loop: Loop, x: str) -> str:
    """`[1, N, 1]`."""
    one = loop.add_before("GivenTensorInt64Fill", [], "one", shape=[1], values=[1])
    batch = loop.add_before("Shape", [x], "batch", axes=[1])
    shape = loop.add_columns([one, batch, one], "ones_shape")
    return loop.add_before("ConstantFill", [shape], "ones", input_as_shape=1, value=1.0)


def _is_of_floats(loop: Loop, x: str) -> str:
    """What is there if it is; the product that was in front of the loop has refused anything else."""
    emitter = Emitter(loop, loop.forward, x)
    found = only_floats.emit(emitter, x, DIMENSIONS)
    loop.before += emitter.operators
    return found


def _like(loop: Loop, x: str, bias: str) -> str:
    """`[T, N, M]`."""
    rows = loop.add_before("Shape", [x], "rows", axes=[0, 1])
    columns = loop.add_before("Shape", [bias], "columns")
    shape = loop.add_columns([rows, columns], "sequence_shape")
    return loop.add_before(
        "ConstantFill", [shape], "like_sequence", input_as_shape=1, dtype=core.DataType.BOOL, value=False
    )


def _weights(loop: Loop, product: caffe2_pb2.OperatorDef, of_x: str, bias: str) -> str:
    """W, V and c one behind the other; W that has been transposed before the loop is joined first and transposed then.

    So others still find the rows.
    """
    of_state = product.input[1]
    rows = of_state if step_products.has_weights_in_rows(product) else step_products.rows_of(loop, of_state)
    if rows is None:
        return _joined(loop, of_state, loop.add_before("Transpose", [of_x], of_x + "_transposed"), bias, 0)
    joined = _joined(loop, rows, of_x, bias, 1)
    return joined if rows == of_state else loop.add_before("Transpose", [joined], joined + "_transposed")


def _joined(loop: Loop, of_state: str, of_x: str, bias: str, axis: int) -> str:
    column = loop.add_before("ExpandDims", [bias], bias + "_column", dims=[axis])
    joined, widths = loop.new_blob(of_state + "_joined"), loop.new_blob(of_state + "_joined_sizes")
    loop.before.append(new_operator("Concat", [of_state, of_x, column], [joined, widths], loop.forward, axis=axis))
    return joined


# ---------------------------------------------------------------------------------------------------------- the trial


class Size(NamedTuple):
    """`steps` steps with `rows` rows of `inner` numbers and `of_sequence` of the sequence, that make rows of `outer`.

    `sigmoid` is the operator that takes the sigmoid of that, serialised, or empty. `may_keep` as loops have it.
    """

    steps: int
    rows: int
    inner: int
    of_sequence: int
    outer: int
    layout: str
    sigmoid: bytes
    may_keep: Keeping = Keeping.NOTHING


def _size(loop: Loop, site: Site, sizes: Sizes) -> Optional[Size]:
    position, _ = site.where
    steps, batch = sizes.steps(loop), sizes.batch(loop)
    x, multiplying = sizes.shape(source_of(loop).input[0]), product_at(loop, position)
    assert multiplying is not None and x is not None
    product = step_products.read_product(loop, loop.operators[multiplying], sizes, batch)
    if steps is None or batch is None:
        return None
    taking = sigmoids.sigmoid_of(loop, loop.operators, position)
    sigmoid = b"" if taking is None else as_bytes(loop.operators[taking], [RESULT], ["s"])
    layout = step_products.layout(loop, loop.operators[multiplying])
    return Size(steps, batch, product.inner, x[-1], product.outer, layout, sigmoid, what_may_be_kept(loop, sizes))


@trial.remembered
def _tried(size: Size) -> Dict[bool, Seconds]:
    """Joined or apart."""
    candidates = {is_joined: functools.partial(_subject, size, is_joined) for is_joined in (False, True)}
    return trial.in_turn(candidates, size.steps)


def _subject(size: Size, is_joined: bool) -> Subject:
    """The product in a step, by whatever is fastest, and what is done before the loop."""
    loop, shapes = lone_product(
        size.steps, size.rows, size.inner, size.of_sequence, size.outer, size.layout, may_keep=size.may_keep
    )
    if size.sigmoid:
        loop.operators.append(caffe2_pb2.OperatorDef.FromString(size.sigmoid))
    sizes = Sizes(shapes, loop.surroundings.fed)
    if is_joined:
        passes.apply(JoinedSequence(), loop, sizes, even_if_slower=True)
    for rule in (PackedProducts(), ProductsOverSteps()):
        passes.apply(rule, loop, sizes)
    return subject_of_product(loop, shapes)


def lone_product(
    steps: int,
    rows: int,
    inner: int,
    of_sequence: Optional[int],
    outer: int,
    layout: str,
    scaled: bool = False,
    may_keep: Keeping = Keeping.NOTHING,
) -> Tuple[Loop, Dict[str, Shape]]:
    """A loop of a product `RESULT` and, with `of_sequence`, of a sequence that is added to it; and its shapes.

    All weights are `scaled` before the loop, if so. What is made of them it `may_keep`, or some of that.
    """
    weights: Shape = (inner, outer) if layout == COLUMNS else (outer, inner)
    shapes: Dict[str, Shape] = {"sequence": (steps, rows, outer), "h": (1, rows, inner), "w": weights}
    if of_sequence is not None:
        shapes.update(x=(steps, rows, of_sequence), v=(outer, of_sequence), c=(outer,))
    if scaled:
        shapes["scale"] = (outer,)
    given = [blob for blob in ("w", "v", "c", "scale") if blob in shapes]
    loop = trial.lone_loop([*shapes, "x_t", RESULT, "s"], given, may_keep)
    beside, in_rows = loop.forward, int(layout == ROWS)

    def of_weights(blob: str, axis: int) -> str:
        return loop.add_before("Mul", [blob, "scale"], blob + "_scaled", broadcast=1, axis=axis) if scaled else blob

    weights_of_h = of_weights("w", int(layout == COLUMNS))
    if layout == TRANSPOSED_ROWS:
        weights_of_h = loop.add_before("Transpose", [weights_of_h], "w_transposed")
    read = ["h", weights_of_h]
    loop.operators.append(new_operator(MULTIPLICATION, read, [RESULT], beside, broadcast=1, trans_b=in_rows))
    if of_sequence is not None:
        loop.links.append(Link("x_t", "sequence", 0))
        loop.made[SequenceBias.name] = "sequence"
        loop.before.append(new_operator("FC", ["x", of_weights("v", 0), "c"], ["sequence"], beside, axis=FEATURES))
        loop.operators.append(new_operator(SUM, [RESULT, "x_t"], [RESULT], beside))
    loop.known.rows.update(["h", "x_t"])
    return loop, shapes


def subject_of_product(loop: Loop, shapes: Dict[str, Shape]) -> Subject:
    """A step of such a loop, and what is done before, once rules have been applied to it."""
    slices = {link.inner: (1, *shapes[link.outer][1:]) for link in loop.links}
    # The sequence itself, large as it is, is made before the loop, if at all.
    given = {blob: shape for blob, shape in shapes.items() if blob != "sequence"}
    steps, *_ = shapes[loop.inputs[0]]
    return subject_of(loop, loop.operators, {**given, **slices}, slices, steps)
