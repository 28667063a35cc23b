"""Products over all steps, outside of the loop, by oneDNN with filters that stay for good; it is tried out."""

import functools
from typing import Dict, Iterable, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting import unchanged_weights
from caffe2_recurrent.rewriting.products import fixed_rows, net_products, onednn, onednn_convolutions
from caffe2_recurrent.rewriting.products.fixed_rows import Size
from caffe2_recurrent.rewriting.products.net_products import PRODUCT, Dimensions
from caffe2_recurrent.rewriting.products.step_products import GAIN
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules import products_over_steps
from caffe2_recurrent.rewriting.rules.nnpack_over_steps import NNPACKOverSteps
from caffe2_recurrent.rewriting.rules.products_over_steps import ENOUGH, ProductsOverSteps
from caffe2_recurrent.rewriting.steps.rows import FEATURES
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

AS_IT_IS, WITH_FILTERS = "as it is", "with filters"


class FiltersOverSteps(Rule):
    """before the loop: Y = FC(X, W, b)

    =>  in the first run: W and b as filters and biases; memory for rows and results
        before the loop: oneDNN's convolution of the rows of X with them

    It is about products by MKL that make a sequence for this loop alone, with weights and biases that stay for good
    (`constant_weights`), and threads whose number does (`constant_threads`) where filters depend on that. For other
    numbers of steps or sequences than the net was optimised for it is the FC that runs. See `fixed_rows.py`.
    """

    name = "filters_over_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        return net_products.sites(loop, (PRODUCT,))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        operator = operators[position]
        reason = (
            onednn.why_not()
            or net_products.why_not(loop, operator, sizes)
            or net_products.why_not_own(loop, operators, operator)
        )
        if reason is not None:
            return reason
        x, *given = operator.input
        for blob in given:
            if Keeping.FOR_GOOD not in loop.may_keep or not unchanged_weights.may_keep_of(loop, sizes, blob):
                return "'{}' may be another in a later run".format(blob)
        if not onednn_convolutions.keeps_plans(loop):
            return "the number of threads may be another in a later run"
        found = _size(loop, operator, sizes)
        if found is None:
            return "the numbers of steps and sequences are not known; give shapes"
        if integer(operator, "axis", 1) != FEATURES or sizes.shape(x) != found.of_rows:
            return "'{}' does not have a row of {} for each step and sequence".format(x, found.inner)
        if not fixed_rows.are_right(found):
            return "oneDNN does not keep rows of {} by {} where they lie".format(found.inner, found.outer)
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        found = _size(loop, operators[position], sizes)
        assert found is not None
        times: Dict[str, Seconds] = _tried(found)
        share = times[WITH_FILTERS].step / times[AS_IT_IS].step
        if GAIN * share > 1 or share > _share_of_others(loop, site, sizes, found):
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {0.outer}] filters are not faster".format(found)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        found = _size(loop, operators[position], sizes)
        assert found is not None
        made = fixed_rows.in_place_of(operators[position], loop, found)
        net_products.take_place(loop, operators, position, [*made.once, *made.each])


def _size(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Optional[Size]:
    """None if the numbers of steps and sequences are not known."""
    steps, batch = sizes.steps(loop), sizes.batch(loop)
    if steps is None or batch is None:
        return None
    outer, inner = net_products.weights_of(loop, operator, sizes)
    return Size(steps, batch, inner, outer)


def _share_of_others(loop: Loop, site: Site, sizes: Sizes, size: Size) -> float:
    """The least time of such a product by rules that are to follow, as a share of that of MKL's."""
    shares = [1.0]
    by_nnpack = NNPACKOverSteps()
    if by_nnpack.refusal(loop, site, sizes) is None:
        shares.append(by_nnpack.share(loop, site, sizes, Dimensions(size.rows, size.inner, size.outer)))
    if ProductsOverSteps().refusal(loop, site, sizes) is None:
        keeps_plans = onednn_convolutions.keeps_plans(loop)
        of_product = products_over_steps.Size(PRODUCT, size.rows, size.inner, size.outer, 1, keeps_plans=keeps_plans)
        shares.append(products_over_steps.share(of_product))
    return min(shares)


@trial.remembered
def _tried(size: Size) -> Dict[str, Seconds]:
    rows = trial.rows_to_try(size.rows, size.inner, size.outer, ENOUGH)
    fewer = size._replace(steps=max(1, rows // size.batch))
    return trial.in_turn({way: functools.partial(_subject, fewer, way) for way in (AS_IT_IS, WITH_FILTERS)})


def _subject(size: Size, way: str) -> Subject:
    shapes: Dict[str, Shape] = {"x": size.of_rows, "w": (size.outer, size.inner), "b": (size.outer,)}
    operator = fixed_rows.product(list(shapes), "y")
    if way == AS_IT_IS:
        return Subject([operator], shapes)
    made = fixed_rows.in_place_of(operator, trial.lone_loop([*shapes, *operator.output]), size)
    return Subject(made.each, shapes, kept=made.once)
