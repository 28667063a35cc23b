"""Products of a step with weights, and how long each way to have one takes; see `product_ways.py`."""

import functools
from typing import Dict, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer, integers, set_arguments
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting import calling_thread
from caffe2_recurrent.rewriting.products import onednn, product_ways, thread_numbers
from caffe2_recurrent.rewriting.products.product import LAST_TWO, Product
from caffe2_recurrent.rewriting.products.step_subject import subject_of
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

FC, TRANSPOSED, MULTIPLICATION = "FC", "FCTransposed", "BatchMatMul"
PRODUCTS = frozenset([FC, TRANSPOSED, MULTIPLICATION])
# A product must become faster by this factor: less is within the error of a trial.
GAIN = 1.1
# Seconds that a step takes more which is no chain of operators, as those are not that keep filters for a number of
# threads and are trained (`chained_steps.py`): lines of log for a dozen of them.
LINES = 4e-6
AS_IT_IS = "as it is"
# What they are called in a trial.
WEIGHTS = ("w", "b")
# Weights `[M, K]`; `[K, M]`; or `[K, M]` that are `[M, K]` transposed before the loop.
ROWS, COLUMNS, TRANSPOSED_ROWS = "rows", "columns", "transposed rows"


class Size(NamedTuple):
    """`rows` rows of `inner` numbers, by the operator `kind`, to rows of `outer`; weights `[outer, inner]` or not.

    Where it `is_added`, a Sum with something else belongs to it. With several `parts` there are as many matrices. What
    it `may_keep` of its weights takes no time.
    """

    kind: str
    rows: int
    inner: int
    outer: int
    has_bias: bool
    in_rows: bool
    is_added: bool = False
    parts: int = 1
    may_keep: Keeping = Keeping.NOTHING

    @classmethod
    def of(cls, kind: str, product: Product, is_added: bool = False, may_keep: Keeping = Keeping.NOTHING) -> "Size":
        assert product.batch is not None
        has_bias, in_rows = product.bias is not None, product.rows is not None
        # With weights in rows again.
        kind = FC if kind == TRANSPOSED and in_rows else kind
        size = cls(kind, product.batch, product.inner, product.outer, has_bias, in_rows, is_added, product.parts)
        return size._replace(may_keep=may_keep)


def is_with_weights(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it is a product, not by oneDNN yet, with a blob that is the same in all steps."""
    return operator.type in PRODUCTS and not is_on_onednn(operator) and loop.is_reference(operator.input[1])


def is_plain(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the product is over the last axis of `[1, N, K]`, with weights in their usual layout."""
    if operator.type == MULTIPLICATION:
        return bool(integer(operator, "broadcast", 0)) and not integer(operator, "trans_a", 0)
    return integer(operator, "axis", 1) == FEATURES and integer(operator, "axis_w", 1) == 1


def has_weights_in_rows(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the product's weights are `[M, K]`."""
    return operator.type == FC or bool(integer(operator, "trans_b", 0))


def layout(loop: Loop, operator: caffe2_pb2.OperatorDef) -> str:
    """How the weights of the product lie."""
    if has_weights_in_rows(operator):
        return ROWS
    return COLUMNS if _transposing(loop, operator.input[1]) is None else TRANSPOSED_ROWS


def take_rows(loop: Loop, operator: caffe2_pb2.OperatorDef) -> None:
    """Give a BatchMatMul the rows themselves where it has transposed ones; nothing is transposed for nobody."""
    transposed = operator.input[1]
    rows = rows_of(loop, transposed)
    assert rows is not None
    operator.input[1] = rows
    set_arguments(operator, {"trans_b": 1})
    loop.add_reference(rows)
    drop_transposed(loop, transposed)


def rows_of(loop: Loop, columns: str) -> Optional[str]:
    """The weights `[M, K]` that have been transposed to `columns` before the loop, if that is where these are from.

    Or `[parts, M, K]`, each matrix for itself.
    """
    transposing = _transposing(loop, columns)
    return None if transposing is None else transposing.input[0]


def drop_transposed(loop: Loop, blob: str) -> None:
    """Nothing is transposed before the loop for nobody."""
    if _transposing(loop, blob) is not None:
        loop.drop_unread(blob)


def _transposing(loop: Loop, blob: str) -> Optional[caffe2_pb2.OperatorDef]:
    found = next((operator for operator in loop.before if blob in operator.output), None)
    if found is None or found.type != "Transpose":
        return None
    return found if not found.arg or integers(found, "axes") == LAST_TWO else None


def weights_shape(loop: Loop, blob: str, sizes: Sizes) -> Optional[Shape]:
    """The shape of weights, also of those that another rule has made before the loop."""
    shape = sizes.shape(blob)
    if shape:
        return shape
    # It is asked for often, and what else stands in front of the loop says nothing of it.
    made_of = [loop.before[position] for position in dataflow.leading_to(loop.before, [blob])]
    return sizes.made_by(made_of).get(blob)


def read_product(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes, batch: Optional[int]) -> Product:
    weights = operator.input[1]
    shape = weights_shape(loop, weights, sizes)
    assert shape is not None
    in_rows = has_weights_in_rows(operator)
    *parts, first, second = shape
    inner, outer = (second, first) if in_rows else (first, second)
    return Product(
        input=operator.input[0],
        columns=None if in_rows else weights,
        rows=weights if in_rows else None,
        bias=operator.input[2] if len(operator.input) > 2 else None,
        output=operator.output[0],
        batch=batch,
        inner=inner,
        outer=outer,
        parts=parts[0] if parts else 1,
    )


def seconds_of_step(size: Size, way: str, steps: Optional[int]) -> float:
    """The time of the product in a step, with its share of what has to be done once for all `steps`."""
    found = tried(size, way)
    is_no_chain = way == product_ways.KEPT_FILTERS and thread_numbers.matter() and Keeping.WEIGHTS not in size.may_keep
    lines = LINES if is_no_chain and calling_thread.runs_chains() else 0.0
    return (found.of_step(steps) if steps else found.step) + lines


def tried(size: Size, way: str) -> Seconds:
    """Such a product by itself: as it is, an FC with weights transposed beforehand, or in another way."""
    others = product_ways.ways_of(size.parts, Keeping.FILTERS in size.may_keep)
    ways = (AS_IT_IS, *((TRANSPOSED,) if size.kind == FC else ()), *others)
    found: Dict[str, Seconds] = _tried(size, ways)
    return found[way]


@trial.remembered
def _tried(size: Size, ways: Tuple[str, ...]) -> Dict[str, Seconds]:
    return trial.in_turn({way: functools.partial(_subject, size, way) for way in ways})


def _subject(size: Size, way: str) -> Subject:
    parts: Shape = () if size.parts == 1 else (size.parts,)
    weights: Shape = (*parts, size.outer, size.inner) if size.in_rows else (*parts, size.inner, size.outer)
    bias: Dict[str, Shape] = {"b": (size.outer,)} if size.has_bias else {}
    shapes: Dict[str, Shape] = {"x": (1, size.rows, size.inner), "w": weights, **bias}
    operator = caffe2_pb2.OperatorDef(type=size.kind, input=list(shapes), output=["y"])
    multiplication = {"broadcast": 1, "trans_b": int(size.in_rows)}
    set_arguments(operator, multiplication if size.kind == MULTIPLICATION else {"axis": FEATURES})
    shapes["rows"] = shapes["x"]
    # A core waits for what another one has read, to write to it, and for what another one has written. In a step others
    # write the rows and read the results, by one core.
    writing, reading = (
        caffe2_pb2.OperatorDef(type="Copy", input=[source], output=[target])
        for source, target in (("rows", "x"), ("y", "result"))
    )
    behind = [reading]
    if size.is_added:
        shapes["a"] = (size.parts, size.rows, size.outer)
        behind.insert(0, caffe2_pb2.OperatorDef(type="Sum", input=["y", "a"], output=["y"]))
    if way == AS_IT_IS:
        return Subject([writing, operator, *behind], shapes)
    loop = trial.lone_loop([*shapes, "y", "result"], WEIGHTS, size.may_keep)
    if way == TRANSPOSED:
        operator.type, operator.input[1] = TRANSPOSED, loop.add_before("Transpose", ["w"], "w_transposed")
        return subject_of(loop, [writing, operator, *behind], shapes)
    product = read_product(loop, operator, Sizes(shapes), size.rows)
    if size.is_added and onednn.adds(way):
        product, behind = product._replace(addend="a"), [reading]
    emitter = product_ways.emit(way, loop, product, operator)
    return subject_of(loop, [writing, *emitter.operators, *behind], shapes)
