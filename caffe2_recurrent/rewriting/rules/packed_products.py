"""Products with weights by oneDNN or NNPACK, where that is faster than MKL's; it is tried out."""

from typing import Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop, is_optimised
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import SUM
from caffe2_recurrent.rewriting import unchanged_weights
from caffe2_recurrent.rewriting.products import kept_filters, product_ways, row_widths, separate_rows, step_products
from caffe2_recurrent.rewriting.products.product import Product
from caffe2_recurrent.rewriting.products.sigmoids import with_sigmoid
from caffe2_recurrent.rewriting.products.step_products import AS_IT_IS, GAIN, Size, seconds_of_step
from caffe2_recurrent.rewriting.products.sums import sum_of, with_sum
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.backward_loop import BackwardLoop
from caffe2_recurrent.rewriting.steps.overlap import has_threads_given, take_executor_off, why_executor_pays
from caffe2_recurrent.rewriting.steps.rows import has_rows

# The types of nets that run operators in the order in which they stand.
IN_ORDER = ("", "simple")


class PackedProducts(Rule):
    """step: Y = FC(X, W, b)

    =>  before the loop: W laid out for oneDNN                                      W as an image
        step: X copied to oneDNN's memory, the product there, Y copied back    or   NNPACK's convolution of it with X

    or X as an image whose channels come last, with W as filters that oneDNN keeps for the steps of a run, and Y not
    copied back: where a step workspace or two are enough, as without a backward step and with `backward_loop`.

    If all that the step wants of Y is its sigmoid, oneDNN takes that too where it is faster; if it is its sum with
    another blob, an inner product is added there, and Y not copied back. FCTransposed, and BatchMatMul with weights,
    likewise, also with several matrices, as `gates_first` leaves it; in both steps. W must be the same in all steps,
    and X `[1, N, K]`. The ways to have the product are tried at the sizes given, and the fastest one is taken. For
    oneDNN the RNN executor goes off.
    """

    name = "packed_products"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                if step_products.is_with_weights(loop, operator):
                    yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if not product_ways.ways_of(1):
            return product_ways.why_none()
        if has_threads_given(loop) and all(map(product_ways.is_by_onednn, product_ways.ways_of(1))):
            return "the RNN executor has been given threads of its own, and oneDNN would start some in each of them"
        if has_threads_given(loop) and is_optimised(loop.forward):
            # With these as they are it was found to pay.
            return "an earlier `optimize` has left the RNN executor on, and the products as they are"
        operators, position = site.where
        operator = operators[position]
        weights = operator.input[1]
        shape = step_products.weights_shape(loop, weights, sizes)
        if shape is None:
            return "the size of its weights '{}' is not known; give shapes".format(weights)
        is_one = len(shape) == 2
        are_several = operator.type == step_products.MULTIPLICATION and len(shape) == 3 and shape[0] > 1
        if not (is_one or are_several) or not step_products.is_plain(operator):
            return "its weights '{}' are laid out in another way".format(weights)
        if not has_rows(loop, operator.input[0], sizes):
            return "'{}' is not known to have one row for each sequence".format(operator.input[0])
        product = _read(loop, operator, sizes)
        if not product_ways.ways_of(product.parts):
            return "its weights '{}' are several matrices, and this Caffe2's oneDNN takes one".format(weights)
        if not _ways(loop, product, Keeping.NOTHING):
            return separate_rows.why_not(product.inner, product.outer)
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        reason = why_executor_pays(loop)
        if reason is not None:
            return reason
        operators, position = site.where
        operator = operators[position]
        product = _read(loop, operator, sizes)
        if product.batch is None:
            return "the batch size is not known; give shapes"
        is_added = sum_of(loop, operators, position) is not None
        given = step_products.read_product(loop, operator, sizes, product.batch)
        may_keep = _may_keep(loop, product, sizes)
        size, as_it_is = (Size.of(operator.type, found, is_added, may_keep) for found in (product, given))
        steps = sizes.steps(loop)
        way = _fastest(operator.type, product, steps, is_added, _ways(loop, product, may_keep), may_keep)
        if GAIN * seconds_of_step(size, way, steps) > seconds_of_step(as_it_is, AS_IT_IS, None):
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {0.outer}] no other way is faster".format(size)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        product = _read(loop, operator, sizes)
        is_added = sum_of(loop, operators, position) is not None
        may_keep = _may_keep(loop, product, sizes)
        ways = _ways(loop, product, may_keep)
        way = _fastest(operator.type, product, sizes.steps(loop), is_added, ways, may_keep)
        product = with_sum(way, loop, operators, position, with_sigmoid(way, loop, operators, position, product))
        if way == product_ways.KEPT_FILTERS:
            widths = row_widths.of_rows(loop, operator, product.input, product.inner, sizes)
            product = product._replace(widths=widths)
        emitter = product_ways.emit(way, loop, product, operator)
        result = product.sigmoid or product.output
        others = [other.type for other in operators if result in other.output and other is not operator]
        if product.parts == 1 and set(others) <= {SUM}:
            loop.known.always_rows[result] = product.outer
        operators[position : position + 1] = emitter.operators
        step_products.drop_transposed(loop, operator.input[1])
        # The steps share what is made on the way, like oneDNN's tensors; backward steps do with what they write.
        written = {blob for made in emitter.operators for blob in made.output}
        shared = [blob for blob in emitter.made if operators is loop.operators or blob not in written]
        loop.shared += [blob for blob in shared if blob not in loop.shared]
        if product_ways.is_by_onednn(way):
            # Threads of the RNN executor bring threads of OpenMP of their own, and so of oneDNN; and it would go on
            # with operators of step workspaces that are gone.
            take_executor_off(loop)


def what_may_be_kept(loop: Loop, sizes: Sizes) -> Keeping:
    """What may be kept of products of the steps, as far as it is known before they are looked at."""
    if Keeping.FILTERS in loop.may_keep and loop.gradient is not None and not _becomes_two(loop, sizes):
        return loop.may_keep & ~Keeping.FILTERS
    return loop.may_keep


def _becomes_two(loop: Loop, sizes: Sizes) -> bool:
    """Whether its backward pass becomes a loop of its own: as it is, there are as many step workspaces as steps."""
    rule = BackwardLoop()
    # Whether it pays is known at once.
    return any(
        rule.loss(loop, site, sizes) is None and rule.refusal(loop, site, sizes) is None for site in rule.sites(loop)
    )


def _may_keep(loop: Loop, product: Product, sizes: Sizes) -> Keeping:
    """What may be kept of this one."""
    weights = product.columns if product.rows is None else product.rows
    assert weights is not None
    found = Keeping.WEIGHTS if unchanged_weights.may_keep_of(loop, sizes, weights) else Keeping.NOTHING
    if product.parts != 1 or loop.net.type not in IN_ORDER or Keeping.FILTERS not in what_may_be_kept(loop, sizes):
        return found
    if loop.workspaces in loop.surroundings.read_outside:
        # They would have another name.
        return found
    if not kept_filters.are_right(product.inner, product.outer):
        return found
    return found | Keeping.FILTERS | loop.may_keep & Keeping.NUMBER


def _read(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Product:
    """The product, of the rows themselves where it has transposed ones: oneDNN transposes them faster, if it has to."""
    product = step_products.read_product(loop, operator, sizes, sizes.batch(loop))
    rows = None if product.columns is None else step_products.rows_of(loop, product.columns)
    return product if rows is None else product._replace(columns=None, rows=rows)


def _ways(loop: Loop, product: Product, may_keep: Keeping) -> List[str]:
    """Those that keep the rows of sequences apart, and do with the threads that somebody has given the RNN executor."""
    size = (product.inner, product.outer, product.parts)
    there = product_ways.ways_of(product.parts, Keeping.FILTERS in may_keep)
    ways = [way for way in there if separate_rows.in_steps(way, *size)]
    if product.bias is not None and not loop.is_reference(product.bias):
        ways = [way for way in ways if not product_ways.lays_out_bias(way)]
    return [way for way in ways if not (product_ways.is_by_onednn(way) and has_threads_given(loop))]


def _fastest(
    kind: str, product: Product, steps: Optional[int], is_added: bool, ways: List[str], may_keep: Keeping
) -> str:
    """The way to take; without a trial if the batch size is not known."""
    if product.batch is None:
        return ways[0]
    size = Size.of(kind, product, is_added, may_keep)
    return min(ways, key=lambda way: seconds_of_step(size, way, steps))
