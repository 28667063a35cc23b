"""Products with weights by oneDNN, where that is faster than MKL's; it is tried out."""

import functools
from typing import Dict, Iterable, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer, set_arguments
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting import onednn, trial
from caffe2_recurrent.rewriting.overlap import ENABLE, THREADS, why_steps_may_overlap
from caffe2_recurrent.rewriting.rows import FEATURES, with_rows
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

MULTIPLICATION = "BatchMatMul"
PRODUCTS = frozenset(["FC", "FCTransposed", MULTIPLICATION])
# A product must become faster by this factor: less is within the error of the trial.
GAIN = 1.1


class PackedProducts(Rule):
    """step: Y = FC(X, W, b)

    =>  before the loop: W laid out for oneDNN
        step: X copied to oneDNN's memory, the product there, Y copied back

    FCTransposed, and BatchMatMul with weights, likewise; in both steps. W must be the same in all steps, and X `[1, N,
    K]`. Two ways to have the product are tried at the sizes given, and the faster one is taken. The RNN executor goes
    off.
    """

    name = "packed_products"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                if operator.type in PRODUCTS and _is_with_weights(loop, operator):
                    yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if onednn.is_missing():
            return "this Caffe2 has no oneDNN"
        operators, position = site.where
        operator = operators[position]
        if integer(loop.forward, ENABLE, 0) and argument(loop.forward, THREADS) is not None:
            return "the RNN executor has been given threads of its own, and oneDNN would start some in each of them"
        weights = operator.input[1]
        shape = sizes.shape(weights) or _made_shape(loop, weights, sizes)
        if shape is None:
            return "the size of its weights '{}' is not known; give shapes".format(weights)
        if len(shape) != 2 or not _is_plain(operator):
            return "its weights '{}' are laid out in another way".format(weights)
        if operator.input[0] not in with_rows(loop, sizes) | loop.gradients_with_rows:
            return "'{}' is not known to have one row for each sequence".format(operator.input[0])
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        batch, steps = sizes.batch(loop), sizes.steps(loop)
        reason = why_steps_may_overlap(loop) if integer(loop.forward, ENABLE, 0) else None
        if reason is not None:
            return "it would take the RNN executor off: {}".format(reason)
        if batch is None:
            return "the batch size is not known; give shapes"
        operators, position = site.where
        operator = operators[position]
        product = _product(loop, operator, sizes)
        has_bias = product.bias is not None
        as_it_is = _tried(operator.type, None, batch, product.inner, product.outer, has_bias).step
        _, best = _fastest(operator.type, batch, product, steps)
        if best * GAIN > as_it_is:
            return "with {} rows of {} by {} oneDNN is not faster".format(batch, product.inner, product.outer)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        product = _product(loop, operator, sizes)
        batch = sizes.batch(loop)
        way = onednn.INNER_PRODUCT
        if batch is not None:
            way, _ = _fastest(operator.type, batch, product, sizes.steps(loop))
        emitter = onednn.emit(way, loop, product, operator)
        operators[position : position + 1] = emitter.operators
        # The steps share oneDNN's tensors, which nothing else can look at.
        loop.shared += emitter.made if operators is loop.operators else []
        _switch_executor_off(loop)


def _switch_executor_off(loop: Loop) -> None:
    """Its threads bring threads of OpenMP, and so of oneDNN, of their own."""
    for operator in [loop.forward] + ([loop.gradient.operator] if loop.gradient is not None else []):
        enabled = argument(operator, ENABLE)
        if enabled is not None:
            enabled.i = 0


def _is_with_weights(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.input[1] in loop.references and not is_on_onednn(operator)


def _is_plain(operator: caffe2_pb2.OperatorDef) -> bool:
    if operator.type == MULTIPLICATION:
        return bool(integer(operator, "broadcast", 0)) and not (
            integer(operator, "trans_a", 0) or integer(operator, "trans_b", 0)
        )
    return integer(operator, "axis", 1) == FEATURES and integer(operator, "axis_w", 1) == 1


def _made_shape(loop: Loop, blob: str, sizes: Sizes) -> Optional[Tuple[int, ...]]:
    """The shape of weights that another rule has made before the loop."""
    for operator in loop.before:
        if blob in operator.output:
            shape = sizes.shape(operator.input[0]) or _made_shape(loop, operator.input[0], sizes)
            if shape is not None and operator.type in ("Transpose", "Mul"):
                return shape[::-1] if operator.type == "Transpose" else shape
    return None


def _product(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> onednn.Product:
    weights = operator.input[1]
    shape = sizes.shape(weights) or _made_shape(loop, weights, sizes)
    assert shape is not None
    in_rows = operator.type == "FC"
    inner, outer = shape[::-1] if in_rows else shape
    return onednn.Product(
        input=operator.input[0],
        columns=None if in_rows else weights,
        rows=weights if in_rows else None,
        bias=operator.input[2] if len(operator.input) > 2 else None,
        output=operator.output[0],
        inner=inner,
        outer=outer,
    )


def _fastest(kind: str, batch: int, product: onednn.Product, steps: Optional[int]) -> Tuple[str, float]:
    """The faster way, and its seconds a step with its share of what is done once."""
    times: Dict[str, float] = {}
    for way in onednn.WAYS:
        tried = _tried(kind, way, batch, product.inner, product.outer, product.bias is not None)
        times[way] = tried.step + (tried.once / steps if steps else 0.0)
    way = min(onednn.WAYS, key=lambda way: times[way])
    return way, times[way]


@functools.lru_cache(maxsize=None)
def _tried(kind: str, way: Optional[str], batch: int, inner: int, outer: int, has_bias: bool) -> trial.Seconds:
    """Such a product by itself, as it is or in some way."""
    weights = (outer, inner) if kind == "FC" else (inner, outer)
    shapes = {"x": (1, batch, inner), "w": weights, **({"b": (outer,)} if has_bias else {})}
    operator = caffe2_pb2.OperatorDef(type=kind, input=list(shapes), output=["y"])
    set_arguments(operator, {"broadcast": 1} if kind == MULTIPLICATION else {"axis": FEATURES})
    if way is None:
        return trial.seconds([operator], shapes)
    loop = trial.lone_loop(shapes)
    emitter = onednn.emit(way, loop, _product(loop, operator, Sizes(shapes)), operator)
    return trial.seconds(emitter.operators, shapes, loop.before)
