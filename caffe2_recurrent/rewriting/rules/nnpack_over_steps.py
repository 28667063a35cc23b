"""Products over all steps, outside of the loop, by NNPACK, where that is faster than MKL's; it is tried out."""

import functools
from typing import Dict, Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.rewriting import unchanged_weights
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import net_products, nnpack, onednn, separate_rows
from caffe2_recurrent.rewriting.products.net_products import PRODUCT, Dimensions
from caffe2_recurrent.rewriting.products.product_ways import NNPACK
from caffe2_recurrent.rewriting.products.step_products import GAIN
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.products_over_steps import ENOUGH
from caffe2_recurrent.rewriting.rules.unchanged_weights import seconds_of_comparing
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

AS_IT_IS = "as it is"

Operators = List[caffe2_pb2.OperatorDef]


class NNPACKOverSteps(Rule):
    """before the loop: Y = FC(X, W, b)

    =>  when W has changed: W as an image
        before the loop: NNPACK's convolution of it with X as filters; + b

    It is about products by MKL that make a sequence for this loop alone, with weights whose layout may be kept from run
    to run (`unchanged_weights`). Where there are no rows it is the FC that runs.
    """

    name = "nnpack_over_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        return net_products.sites(loop, (PRODUCT,))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if nnpack.is_missing():
            return "this Caffe2 has no NNPACK"
        operators, position = site.where
        operator = operators[position]
        reason = net_products.why_not(loop, operator, sizes) or net_products.why_not_own(loop, operators, operator)
        if reason is not None:
            return reason
        weights = operator.input[1]
        if not unchanged_weights.may_keep_of(loop, sizes, weights):
            return "its weights '{}' may be others in each run".format(weights)
        if loop.surroundings.has_company:
            return "another loop may run at the same time, and products by NNPACK have no memory of their own"
        outer, inner = net_products.weights_of(loop, operator, sizes)
        if not separate_rows.in_steps(NNPACK, inner, outer):
            return "in NNPACK's products with [{}, {}] what is no number would reach other rows".format(inner, outer)
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        found = net_products.dimensions(loop, operators[position], sizes)
        if found is None:
            return "the numbers of steps and sequences are not known; give shapes"
        if GAIN * self.share(loop, site, sizes, found) > 1:
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {0.outer}] NNPACK is not faster".format(found)
        return None

    def share(self, loop: Loop, site: Site, sizes: Sizes, found: Dimensions) -> float:
        """The time of such a product of `found` dimensions, as a share of that of MKL's."""
        operators, position = site.where
        rows = trial.rows_to_try(found.rows, found.inner, found.outer, ENOUGH)
        times = _tried(found._replace(rows=rows))
        more = seconds_of_comparing(loop, operators[position].input[1], sizes)
        return float((times[NNPACK].step + more) / times[AS_IT_IS].step)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        outer, inner = net_products.weights_of(loop, operator, sizes)
        laid_out = Emitter(loop, loop.forward, operator.input[1])
        image = nnpack.lay_out(laid_out, operator.input[1])
        made = [*laid_out.operators, *_in_a_net(loop, operator, image, inner, outer)]
        net_products.take_place(loop, operators, position, made)


def _in_a_net(loop: Loop, operator: caffe2_pb2.OperatorDef, image: str, inner: int, outer: int) -> Operators:
    emitter = Emitter(loop, operator, operator.output[0])
    nnpack.emit_over_steps(emitter, operator, image, inner, outer)
    # NNPACK fails without rows. It is little that stays.
    return onednn.in_a_net(
        emitter.operators, list(operator.output), loop, kept=emitter.made, otherwise=[operator], called="nnpack"
    )


@trial.remembered
def _tried(size: Dimensions) -> Dict[str, Seconds]:
    return trial.in_turn({way: functools.partial(_subject, size, way) for way in (AS_IT_IS, NNPACK)})


def _subject(size: Dimensions, way: str) -> Subject:
    shapes: Dict[str, Shape] = {"x": (size.rows, size.inner), "w": (size.outer, size.inner), "b": (size.outer,)}
    operator = caffe2_pb2.OperatorDef(type=PRODUCT, input=list(shapes), output=["y"])
    if way == AS_IT_IS:
        return Subject([operator], shapes)
    loop = trial.lone_loop([*shapes, *operator.output])
    laid_out = Emitter(loop, loop.forward, "w")
    image = nnpack.lay_out(laid_out, "w")
    return Subject(_in_a_net(loop, operator, image, size.inner, size.outer), shapes, kept=laid_out.operators)
