"""A product whose columns are split, with one matrix for each part; it is tried out."""

import functools
from typing import Dict, Iterable, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import remove_arguments
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting import passes
from caffe2_recurrent.rewriting.emit import aten_is_missing
from caffe2_recurrent.rewriting.products import step_products
from caffe2_recurrent.rewriting.products.product import LAST_TWO
from caffe2_recurrent.rewriting.products.step_products import MULTIPLICATION, weights_shape
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.joined_sequence import (
    RESULT,
    JoinedSequence,
    lone_product,
    product_at,
    source_of,
    subject_of_product,
)
from caffe2_recurrent.rewriting.rules.packed_products import PackedProducts, what_may_be_kept
from caffe2_recurrent.rewriting.rules.products_over_steps import ProductsOverSteps
from caffe2_recurrent.rewriting.steps import columns
from caffe2_recurrent.rewriting.steps.columns import Region
from caffe2_recurrent.rewriting.steps.overlap import has_threads_given, take_executor_off, why_executor_pays
from caffe2_recurrent.rewriting.steps.rows import has_rows
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.numbering import Numbering, operators_of
from caffe2_recurrent.rewriting.trials.timing import Seconds, Subject

# It must be faster by this factor, in the step and in what is done before the loop.
GAIN = 1.02


class GatesFirst(Rule):
    """step: Y = BatchMatMul(h, W);  Z = sigmoid(Y);  i, f, ... = Split(Z)

    =>  before the loop: W `[K, M]` as `[k, K, M / k]`, a matrix for each of the k parts
        step: Y `[k, N, M / k]` = BatchMatMul(h, W);  Z = sigmoid(Y);  i, f, ... are views of Z

    Where the parts lie one behind the other, nothing has to be copied to split them, and products with fewer columns
    may be faster. Until they are split, columns may only be squashed, each element by itself, and the backward step may
    see none of that; a part that it sees is copied. A sum of Y and a sequence becomes part of the product, as
    `joined_sequence` has it. The RNN executor goes off.
    """

    name = "gates_first"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            is_product = operator.type == MULTIPLICATION and step_products.is_with_weights(loop, operator)
            if is_product and _is_split(loop, position):
                yield Site("BatchMatMul -> '{}'".format(operator.output[0]), position)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        if has_threads_given(loop):
            return "the RNN executor has been given threads, and would not see that parts share memory"
        product = loop.operators[site.where]
        weights, rows = product.input[1], product.input[0]
        shape = weights_shape(loop, weights, sizes)
        if shape is None:
            return "the size of its weights '{}' is not known; give shapes".format(weights)
        if len(shape) != 2 or not step_products.is_plain(product):
            return "its weights '{}' are laid out in another way".format(weights)
        joining = _joining(loop, site.where)
        if joining is not None:
            reason = JoinedSequence().refusal(loop, joining, sizes)
            if reason is not None:
                return reason
            if len(loop.operators[joining.where[0]].input) > 2:
                return "more than the slice of a sequence is added to it"
        elif not has_rows(loop, rows, sizes):
            return "'{}' is not known to have one row for each sequence".format(rows)
        region = _region(loop, site.where, sizes)
        if region is None:
            return "it is not split into parts of one width, or first something else is done with it"
        return columns.why_not(loop, region, site.where, _result_at(loop, site.where))

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        reason = why_executor_pays(loop)
        if reason is not None:
            return reason
        size = _size(loop, site, sizes)
        if size is None:
            return "the numbers of steps and sequences are not known; give shapes"
        found: Dict[bool, Seconds] = _tried(size)
        if GAIN * found[True].of_step(size.steps) > found[False].of_step(size.steps):
            return "for [{0.rows}, {0.inner}] x [{0.inner}, {0.outer}] it is not faster".format(size)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        region, joining = _region(loop, site.where, sizes), _joining(loop, site.where)
        assert region is not None
        product = loop.operators[site.where]
        if step_products.layout(loop, product) == step_products.TRANSPOSED_ROWS:
            step_products.take_rows(loop, product)
        if joining is not None:
            JoinedSequence().rewrite(loop, joining, sizes)
        _lay_out(loop, product, region, in_place=joining is not None)
        inside = set(map(id, region.operators))
        loop.operators[:] = [
            made
            for operator in loop.operators
            for made in (columns.in_blocks(loop, region, operator) if id(operator) in inside else [operator])
        ]
        loop.known.rows -= region.blobs
        # It knows by their names which operators have to wait for each other.
        take_executor_off(loop)


def _is_split(loop: Loop, multiplying: int) -> bool:
    """Whether a Split sees the product, or something that others make of it."""
    seen = {loop.operators[multiplying].output[0]}
    for operator in loop.operators[multiplying + 1 :]:
        if not seen.isdisjoint(operator.input):
            seen.update(operator.output)
            if operator.type == columns.SPLIT:
                return True
    return False


def _joining(loop: Loop, multiplying: int) -> Optional[Site]:
    """The site of `joined_sequence` whose product it is, if there is one."""
    return next((site for site in JoinedSequence().sites(loop) if product_at(loop, site.where[0]) == multiplying), None)


def _result_at(loop: Loop, multiplying: int) -> int:
    """The position behind which the slice of the sequence has been added to the product."""
    joining = _joining(loop, multiplying)
    return multiplying if joining is None else int(joining.where[0])


def _region(loop: Loop, multiplying: int, sizes: Sizes) -> Optional[Region]:
    product = loop.operators[multiplying]
    outer = step_products.read_product(loop, product, sizes, None).outer
    return columns.region_behind(loop.operators[_result_at(loop, multiplying) + 1 :], product.output[0], outer)


def _lay_out(loop: Loop, product: caffe2_pb2.OperatorDef, region: Region, in_place: bool) -> None:
    """Give the product its weights as `[parts, K, width]`; what only the product sees may be reshaped `in_place`."""
    weights = product.input[1]
    blocks = weights if in_place else loop.new_blob(weights + "_blocks")
    if step_products.has_weights_in_rows(product):
        shape, axes = [region.parts, region.width, -1], LAST_TWO
    else:
        shape, axes = [-1, region.parts, region.width], [1, 0, 2]
    loop.before.append(
        new_operator("Reshape", [weights], [blocks, loop.new_blob(weights + "_shape")], loop.forward, shape=shape)
    )
    product.input[1] = loop.add_before("Transpose", [blocks], weights + "_first", axes=axes)
    remove_arguments(product, ["trans_b"])
    loop.add_reference(product.input[1])


# ---------------------------------------------------------------------------------------------------------- the trial


class Size(NamedTuple):
    """`steps` steps with `rows` rows of `inner` numbers, and `of_sequence` of a sequence that is to be joined, if there
    is one, that make rows of `outer`. `region` are the operators that see these, numbered but for `RESULT`.
    `may_keep` as loops have it.
    """

    steps: int
    rows: int
    inner: int
    of_sequence: Optional[int]
    outer: int
    layout: str
    region: bytes
    may_keep: Keeping = Keeping.NOTHING


def _size(loop: Loop, site: Site, sizes: Sizes) -> Optional[Size]:
    steps, batch = sizes.steps(loop), sizes.batch(loop)
    if steps is None or batch is None:
        return None
    operator = loop.operators[site.where]
    product = step_products.read_product(loop, operator, sizes, batch)
    of_sequence = None
    if _joining(loop, site.where) is not None:
        x = sizes.shape(source_of(loop).input[0])
        assert x is not None
        of_sequence = x[-1]
    region = _region(loop, site.where, sizes)
    assert region is not None
    layout, seeing = step_products.layout(loop, operator), Numbering({operator.output[0]: RESULT})
    numbered = seeing.operators(region.operators)
    may_keep = what_may_be_kept(loop, sizes)
    return Size(steps, batch, product.inner, of_sequence, product.outer, layout, numbered, may_keep)


@trial.remembered
def _tried(size: Size) -> Dict[bool, Seconds]:
    """Gates first, or as it is."""
    candidates = {is_first: functools.partial(_subject, size, is_first) for is_first in (False, True)}
    return trial.in_turn(candidates, size.steps)


def _subject(size: Size, is_first: bool) -> Subject:
    """The product with its region in a step, as fast as the rules get it, and what is done before."""
    region = operators_of(size.region)
    loop, shapes = lone_product(
        size.steps, size.rows, size.inner, size.of_sequence, size.outer, size.layout, may_keep=size.may_keep
    )
    loop.operators += region
    for operator in region:
        for blob in operator.output:
            loop.names.new(blob)
    sizes = Sizes(shapes, loop.surroundings.fed)
    if is_first:
        passes.apply(GatesFirst(), loop, sizes, even_if_slower=True)
    for rule in (JoinedSequence(), PackedProducts(), ProductsOverSteps()):
        passes.apply(rule, loop, sizes)
    return subject_of_product(loop, shapes)
