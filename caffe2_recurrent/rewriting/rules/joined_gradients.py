"""Gradients of two weights over all steps from one product, by oneDNN, where dY is the same; it is tried out."""

import functools
from typing import Dict, Iterable, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.rewriting.products import joined_gradients, net_products, onednn_over_steps
from caffe2_recurrent.rewriting.products.joined_gradients import WITHOUT_ROWS, Pair
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, Operators
from caffe2_recurrent.rewriting.products.onednn_convolutions import keeps_plans
from caffe2_recurrent.rewriting.products.onednn_over_steps import Layout
from caffe2_recurrent.rewriting.products.step_products import weights_shape
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules import products_over_steps
from caffe2_recurrent.rewriting.rules.products_over_steps import ENOUGH, ProductsOverSteps, Size
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

APART, JOINED = "apart", "joined"
# One product must be faster by this factor.
GAIN = 1.02
# What may be done with either gradient by itself.
BY_ITSELF = ProductsOverSteps()


class JoinedGradients(Rule):
    """after the loop: dW, db = FCGradient(X, W, dY);  later, dV, dc, dZ = FCGradient(Z, V, dY)

    =>  after the loop: [dW, dV], db = FCGradient([X, Z], .., dY), by oneDNN
        later: dV and dc, copied;  dZ = dY V, by oneDNN

    This is how an LSTM has them: X are its states, Z what its sequence is made of. dY is laid out once for both. It is
    for those of which oneDNN's copies are little: of larger ones, two products were faster where it was measured.
    """

    name = "joined_gradients"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for first, second in _pairs(loop):
            (one, other) = (operators[position].output[0] for operators, position in (first.where, second.where))
            yield Site("'{}' and '{}'".format(one, other), (first, second))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        for gradient in site.where:
            reason = BY_ITSELF.refusal(loop, gradient, sizes)
            if reason is not None:
                return reason
        first, second = (_operator(gradient) for gradient in site.where)
        if len(first.output) > WITHOUT_ROWS:
            return "'{}' is computed too".format(first.output[-1])
        if not loop.surroundings.ready >= loop.surroundings.sinks:
            return "'{}' is written to before '{}' is computed".format(second.input[0], second.output[0])
        shapes = [weights_shape(loop, operator.input[1], sizes) for operator in (first, second)]
        heights = [shape[0] for shape in shapes if shape is not None]
        if heights[0] != heights[1]:
            return "'{}' has {} rows and '{}' {}".format(first.input[1], heights[0], second.input[1], heights[1])
        return joined_gradients.why_not(_pair(loop, site, sizes))

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        rows = _rows(loop, site, sizes)
        if rows is None:
            return "the numbers of steps and sequences are not known; give shapes"
        for gradient in site.where:
            reason = BY_ITSELF.loss(loop, gradient, sizes)
            if reason is not None:
                return reason
        pair = _pair(loop, site, sizes)
        if rows * pair.outer * onednn_over_steps.FLOAT > onednn_over_steps.LITTLE:
            return "of [{}, {}] each is faster by itself".format(rows, pair.outer)
        tried = trial.rows_to_try(rows, pair.inner, pair.outer, ENOUGH)
        found: Dict[str, Seconds] = _tried(tried, pair.widths, pair.outer, len(pair.second.output), keeps_plans(loop))
        if GAIN * found[JOINED].step > found[APART].step:
            return "for [{1}, {0}] x [{0}, {2[0]} + {2[1]}] it is not faster".format(rows, pair.outer, pair.widths)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        pair, rows = _pair(loop, site, sizes), _rows(loop, site, sizes)
        layout = _fastest(rows, pair.widths, pair.outer, keeps_plans(loop))
        for gradient, made in zip(site.where, joined_gradients.in_a_net(loop, pair, layout, rows)):
            operators, position = gradient.where
            operators[position : position + 1] = made


def _pairs(loop: Loop) -> Iterable[Tuple[Site, Site]]:
    """Gradients behind the loop with the one that continues from the sequence's, if they are of the same dY."""
    second = net_products.at_sink(loop)
    if second is None:
        return
    assert loop.gradient is not None
    for site in net_products.sites(loop, (GRADIENT,)):
        if site.where[0] is loop.after_gradient and _operator(site).input[2] == loop.gradient.sequence:
            yield site, second


def _operator(site: Site) -> caffe2_pb2.OperatorDef:
    operators, position = site.where
    return operators[position]


def _pair(loop: Loop, site: Site, sizes: Sizes) -> Pair:
    first, second = (_operator(gradient) for gradient in site.where)
    shapes = [weights_shape(loop, operator.input[1], sizes) for operator in (first, second)]
    (outer, width), (_, other) = (shape for shape in shapes if shape is not None)
    return Pair(first, second, (width, other), outer)


def _rows(loop: Loop, site: Site, sizes: Sizes) -> Optional[int]:
    found = net_products.dimensions(loop, _operator(site.where[0]), sizes)
    return None if found is None else found.rows


def _fastest(rows: Optional[int], widths: Tuple[int, int], outer: int, keeps_plans: bool) -> Layout:
    """The layout for both; the plain one if the number of rows is not known."""
    layouts = joined_gradients.layouts(sum(widths), outer, keeps_plans)
    if rows is None:
        return layouts[0]
    size = Size(GRADIENT, rows, sum(widths), outer, WITHOUT_ROWS, keeps_plans=keeps_plans)
    return min(layouts, key=lambda layout: products_over_steps.seconds(size, layout))


@trial.remembered
def _tried(rows: int, widths: Tuple[int, int], outer: int, results: int, keeps_plans: bool) -> Dict[str, Seconds]:
    shapes: Dict[str, Shape] = {"dy": (rows, outer)}
    for blobs, width in zip(("xw", "zv"), widths):
        shapes.update({blobs[0]: (rows, width), blobs[1]: (outer, width)})
    first = caffe2_pb2.OperatorDef(type=GRADIENT, input=["x", "w", "dy"], output=["dw", "db"])
    second = caffe2_pb2.OperatorDef(type=GRADIENT, input=["z", "v", "dy"], output=["dv", "dc", "dz"][:results])
    pair = Pair(first, second, widths, outer)

    def apart() -> Subject:
        return Subject(_apart(_lone_loop(shapes), pair, rows, keeps_plans), shapes)

    def joined() -> Subject:
        layout = _fastest(rows, widths, outer, keeps_plans)
        of_both, of_second = joined_gradients.in_a_net(_lone_loop(shapes), pair, layout, rows)
        return Subject([*of_both, *of_second], shapes)

    return trial.in_turn({APART: apart, JOINED: joined})


def _lone_loop(shapes: Iterable[str]) -> Loop:
    return trial.lone_loop([*shapes, "dw", "db", "dv", "dc", "dz"])


def _apart(loop: Loop, pair: Pair, rows: int, keeps_plans: bool) -> Operators:
    """Either gradient by itself in its fastest layout; they share a copy of dY if that is the same."""
    operators = (pair.first, pair.second)
    of_each = functools.partial(Size, GRADIENT, rows, outer=pair.outer, keeps_plans=keeps_plans)
    layouts = [
        products_over_steps.fastest(of_each(inner=width, results=len(operator.output)))
        for operator, width in zip(operators, pair.widths)
    ]
    shared = None
    if layouts[0].outer == layouts[1].outer:
        shared = onednn_over_steps.to_share(loop, pair.first)
    made: Operators = []
    for operator, width, layout in zip(operators, pair.widths, layouts):
        plain = Layout(width, pair.outer)
        made += onednn_over_steps.in_a_net(loop, operator, plain, layout, rows, shared)
        shared = None if shared is None else shared._replace(is_there=True)
    return made
