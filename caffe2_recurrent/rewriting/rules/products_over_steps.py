"""Products over all steps, outside of the loop, by oneDNN, where that is faster than MKL's; it is tried out."""

import functools
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.rewriting.products import (
    gradients_apart,
    net_products,
    onednn,
    onednn_over_steps,
    separate_rows,
    shared_gradients,
)
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, PRODUCT
from caffe2_recurrent.rewriting.products.onednn_convolutions import keeps_plans
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout, Shared, layouts
from caffe2_recurrent.rewriting.products.step_products import GAIN
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

# Multiplications in a trial.
ENOUGH = 7e9
# A gradient by MKL in parts does not take less than such a share of the whole, unless it is of weighted sums.
LEAST_SHARE = 0.5


class Size(NamedTuple):
    """An operator `kind` over `rows` rows of `inner` elements, with weights `[outer, inner]`, that makes `results`.

    `has_bias` and `has_columns`: what a gradient by MKL has from another one, see `gradients_apart.Shared`.
    `keeps_plans`: whether oneDNN's plans may depend on the number of threads.
    """

    kind: str
    rows: int
    inner: int
    outer: int
    results: int
    has_bias: bool = False
    has_columns: bool = False
    keeps_plans: bool = False


class ProductsOverSteps(Rule):
    """before or after the loop: Y = FC(X, W, b),    dW, db, dX = FCGradient(X, W, dY)

    =>  the inputs copied to oneDNN's memory, the product there, the outputs copied back

    It is about products that another rule has moved out of the loop, and those of the net whose result is a sequence of
    the loop or read by each step, as what attention makes of what is encoded. A gradient may be had in parts and from
    larger operands, and both as convolutions; see `onednn_over_steps.py`.
    """

    name = "products_over_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        return net_products.sites(loop, (PRODUCT, GRADIENT))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        reason = onednn.why_not()
        if reason is not None:
            return reason
        operators, position = site.where
        operator = operators[position]
        reason = net_products.why_not(loop, operator, sizes)
        if reason is not None:
            return reason
        outer, inner = net_products.weights_of(loop, operator, sizes)
        if _safe(operator.type, inner, outer, keeps_plans(loop)):
            return None
        return separate_rows.why_not(inner, outer)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        size = _size(loop, site, sizes)
        if size is None:
            return "the numbers of steps and sequences are not known; give shapes"
        if GAIN * share(size) > 1:
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {0.outer}] oneDNN is not faster".format(size)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        size = _size(loop, site, sizes)
        outer, inner = net_products.weights_of(loop, operator, sizes)
        safe = _safe(operator.type, inner, outer, keeps_plans(loop))
        layout = safe[0] if size is None else fastest(size)
        rows = None if size is None else size.rows
        shared = self._shared(loop, site, layout, sizes)
        made = onednn_over_steps.in_a_net(loop, operator, Layout(inner, outer), layout, rows, shared)
        operators[position : position + 1] = made

    def _shared(self, loop: Loop, site: Site, layout: Layout, sizes: Sizes) -> Optional[Shared]:
        """The copy of the sequence's gradient that the first of two gradients makes, and the second finds there."""
        operators, position = site.where
        operator, key = operators[position], ("onednn", "copy of the gradient", layout.outer)
        if net_products.is_sink(loop, operators):
            return Shared(loop.made[key], True) if key in loop.made else None
        if operators is not loop.after_gradient or operator.type != GRADIENT:
            return None
        assert loop.gradient is not None
        second = net_products.at_sink(loop)
        if second is None or operator.input[2] != loop.gradient.sequence or key in loop.made:
            return None
        if self.refusal(loop, second, sizes) is not None or self.loss(loop, second, sizes) is not None:
            return None
        size, of_second = _size(loop, site, sizes), _size(loop, second, sizes)
        assert size is not None and of_second is not None
        if fastest(of_second).outer != layout.outer:
            return None
        shared = onednn_over_steps.to_share(loop, operator)
        loop.made[key] = shared.blob
        return shared


def _size(loop: Loop, site: Site, sizes: Sizes) -> Optional[Size]:
    operators, position = site.where
    operator = operators[position]
    found = net_products.dimensions(loop, operator, sizes)
    if found is None:
        return None
    size = Size(operator.type, *found, len(operator.output), keeps_plans=keeps_plans(loop))
    if operator.type == PRODUCT:
        return size
    apart = shared_gradients.size_of(loop, operators, operator, sizes)
    assert apart is not None
    return size._replace(has_bias=apart.has_bias, has_columns=apart.has_columns)


def _safe(kind: str, inner: int, outer: int, keeps_plans: bool) -> List[Layout]:
    """The layouts in which what is no number stays in its row; the gradients of what may be none are 0."""
    found = layouts(kind, inner, outer, keeps_plans)
    return [layout for layout in found if kind == GRADIENT or separate_rows.over_steps(layout)]


def _safe_for(size: Size) -> List[Layout]:
    return _safe(size.kind, size.inner, size.outer, size.keeps_plans)


def fastest(size: Size) -> Layout:
    return min(_safe_for(size), key=lambda layout: seconds(size, layout))


def share(size: Size) -> float:
    """The time of such a product by oneDNN, as a share of that of MKL's."""
    return seconds(size, fastest(size)) / seconds(size, None)


def seconds(size: Size, layout: Optional[Layout]) -> float:
    """The time of such a product by itself: in a layout of oneDNN's, or by MKL if that is None."""
    rows = trial.rows_to_try(size.rows, size.inner, size.outer, ENOUGH)
    safe = tuple(_safe_for(size))
    # What others have left there is for MKL in parts alone.
    found: Dict[Optional[Layout], Seconds] = _tried(size._replace(rows=rows, has_bias=False, has_columns=False), safe)
    taken = found[layout].step
    if layout is None and size.kind == GRADIENT:
        return taken * _share_in_parts(size, taken, min(found[other].step for other in safe))
    return taken


def _share_in_parts(size: Size, by_mkl: float, by_onednn: float) -> float:
    """What a gradient by MKL takes in parts, as a share of what it takes as it is; 1 if that cannot matter."""
    weights = gradients_apart.Weights(size.outer, size.inner)
    apart = gradients_apart.Size(size.rows, weights, size.results, size.has_bias, size.has_columns)
    if LEAST_SHARE * by_mkl > by_onednn and not gradients_apart.may_be_sums(apart):
        return 1.0
    found = gradients_apart.seconds(apart)
    return min(found.values()) / found[None]


@trial.remembered
def _tried(size: Size, safe: Tuple[Layout, ...]) -> Dict[Optional[Layout], Seconds]:
    return trial.in_turn({layout: functools.partial(_subject, size, layout) for layout in (None, *safe)})


def _subject(size: Size, layout: Optional[Layout]) -> Subject:
    third: Dict[str, Shape] = {"b": (size.outer,)} if size.kind == PRODUCT else {"dy": (size.rows, size.outer)}
    shapes: Dict[str, Shape] = {"x": (size.rows, size.inner), "w": (size.outer, size.inner), **third}
    outputs = ["y"] if size.kind == PRODUCT else ["dw", "db", "dx"][: size.results]
    operator = caffe2_pb2.OperatorDef(type=size.kind, input=list(shapes), output=outputs)
    if layout is None:
        return Subject([operator], shapes)
    loop = trial.lone_loop([*shapes, *outputs])
    plain = Layout(size.inner, size.outer)
    return Subject(onednn_over_steps.in_a_net(loop, operator, plain, layout, size.rows), shapes)
