"""What each step adds to a slice of a sequence, and scales it with, in the product that makes the sequence."""

from typing import Iterable, List, Optional

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import argument, integer, set_arguments
from caffe2_recurrent.operators import SUM, copied, new_operator
from caffe2_recurrent.rewriting.elementwise.scaling import why_not_weights
from caffe2_recurrent.rewriting.emit import ATEN, is_aten
from caffe2_recurrent.rewriting.products.step_products import MULTIPLICATION, has_weights_in_rows, weights_shape
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.unrolled_steps import UnrolledSteps
from caffe2_recurrent.rewriting.sequences import own_sequence
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.addends import is_in_backward_step, products_at
from caffe2_recurrent.rewriting.steps.rows import FEATURES, has_rows

# With fewer rows in the whole sequence, there is nothing to be gained.
FEWEST_ROWS = 128


class SequenceBias(Rule):
    """before the loop: X = FC(x, V, c)
    step: Y = FC(h, W, b);  Z = Y + s * x_t, or Z = Sum(Y, x_t)

    =>  before the loop: X = FC(x, s * V, s * c + b)
        step: Z = BatchMatMul(h, W);  Z = Sum(Z, x_t)

    Two passes over `[N, M]` less. The sequence must be the loop's first, a blob of its scope, made by an FC of the net,
    and nothing else may read it: it gets another name, and the old one is gone. FCTransposed likewise.
    """

    name = "sequence_bias"

    def sites(self, loop: Loop) -> Iterable[Site]:
        sequence = loop.inputs[0]
        if sequence == loop.made.get(self.name):
            return
        for position, operator in enumerate(loop.operators):
            for link in loop.links:
                if link.outer == sequence and _adds(operator, link.inner):
                    yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (position, link))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        position, link = site.where
        why_not = own_sequence.why_not_own(loop, link)
        if why_not is not None:
            return why_not
        if dataflow.readers(loop.operators, link.inner) != [position] or link.inner in loop.written:
            return "'{}' is needed elsewhere in the step too".format(link.inner)
        if is_in_backward_step(loop, link.inner) or link.inner in loop.net.external_output:
            return "'{}' is needed behind the step too".format(link.inner)
        products = products_at(loop, position)
        if not products:
            return "no addend is a product with weights, the same in all steps, that nothing else reads"
        if len(products) > 1:
            return "it adds several products"
        product = loop.operators[products[0]]
        if integer(product, "axis", 1) != FEATURES or not has_rows(loop, product.input[0], sizes):
            return "'{}' is not known to have one row for each sequence".format(product.input[0])
        scale = _scale(loop.operators[position])
        if not loop.references.issuperset([product.input[2], *scale]):
            return "what it is scaled with is not the same in all steps"
        for blob, dimensions in ((product.input[1], 2), *((blob, 1) for blob in scale)):
            shape = weights_shape(loop, blob, sizes)
            if shape is not None and len(shape) != dimensions:
                return "'{}' has {} dimensions".format(blob, len(shape))
        source = own_sequence.source_of(loop, link.outer)
        assert source is not None
        ours, theirs = (_columns(loop, operator, sizes) for operator in (product, source))
        if scale and None not in (ours, theirs) and ours != theirs:
            return "'{}' is {} wide and the product {}, so that ATen adds it to all columns".format(
                link.inner, theirs, ours
            )
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        steps, batch = sizes.steps(loop), sizes.batch(loop)
        if steps is None or batch is None:
            return "the numbers of steps and sequences are not known; give shapes"
        rows = steps * batch
        # Of one sequence the product may take the row for its bias later, where steps are written out.
        may_be_bias = batch == 1 and UnrolledSteps.name in loop.rules
        if rows < FEWEST_ROWS and not may_be_bias:
            return "with {} rows in the sequence it costs as much as it gains".format(rows)
        position, link = site.where
        if not _scale(loop.operators[position]):
            return None
        source = own_sequence.source_of(loop, link.outer)
        assert source is not None
        weights = source.input[1]
        shape = sizes.shape(weights)
        if shape is None:
            return "the size of the weights '{}' is not known; give shapes".format(weights)
        return why_not_weights(rows, int(np.prod(shape[1:])))

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        position, link = site.where
        adding, (multiplying,) = loop.operators[position], products_at(loop, position)
        product, total = loop.operators[multiplying], adding.output[0]
        own, bias, scale = product.output[0], product.input[2], _scale(adding)
        others = [blob for blob in adding.input if blob not in (own, link.inner, *scale)]
        # Where the engine's Sum is to be in place, its first input is.
        others.sort(key=lambda blob: blob != total)
        between = loop.operators[multiplying + 1 : position]
        taken = {
            *product.input,
            *others,
            *(blob for operator in between for blob in (*operator.input, *operator.output)),
        }
        if total not in taken:
            # The sum in place of the product, while that is in the cache.
            product.output[0] = total
        _drop_bias(product)
        slice_ = loop.new_blob(link.inner + "_with_bias")
        addends = [product.output[0], slice_]
        addends = [*others, *addends] if total in others else [*addends, *others]
        loop.operators[position] = new_operator(SUM, addends, [total], adding)
        loop.shared[:] = [blob for blob in loop.shared if blob != own or blob in loop.written]
        old = own_sequence.take_source(loop)
        source = _with_bias(loop, old, bias, scale)
        for new, like in zip([*source.input[1:], *source.output], [*old.input[1:], *old.output]):
            sizes.add(new, like)
        loop.made[self.name] = source.output[0]
        own_sequence.replace(loop, link.inner, slice_, source)


def _adds(operator: caffe2_pb2.OperatorDef, blob: str) -> bool:
    """Whether the operator adds `blob`, or a multiple of it, to something else."""
    if operator.type == SUM:
        return list(operator.input).count(blob) == 1
    times = is_aten(operator, "addcmul") and argument(operator, "value") is None
    return times and operator.input[1] == blob and operator.input[0] != blob


def _columns(loop: Loop, product: caffe2_pb2.OperatorDef, sizes: Sizes) -> Optional[int]:
    """The columns that a product makes, if the shape of its weights is known."""
    shape = weights_shape(loop, product.input[1], sizes)
    return None if shape is None else shape[0 if has_weights_in_rows(product) else -1]


def _scale(adding: caffe2_pb2.OperatorDef) -> List[str]:
    """The blob that the slice is multiplied with, if there is one."""
    return list(adding.input[2:]) if adding.type == ATEN else []


def _drop_bias(product: caffe2_pb2.OperatorDef) -> None:
    in_rows = {"trans_b": 1} if product.type == "FC" else {}
    product.type = MULTIPLICATION
    del product.input[2], product.arg[:]
    set_arguments(product, {"broadcast": 1, **in_rows})


def _with_bias(loop: Loop, old: caffe2_pb2.OperatorDef, bias: str, scale: List[str]) -> caffe2_pb2.OperatorDef:
    """What makes the first sequence anew, with the bias and the scale."""
    source = copied(old)
    _, weights, own_bias = source.input
    name = own_bias + "_with_bias"
    if scale:
        source.input[1] = loop.add_before("Mul", [weights, *scale], weights + "_scaled", broadcast=1, axis=0)
        source.input[2] = loop.add_before(ATEN, [bias, own_bias, *scale], name, operator="addcmul")
    else:
        source.input[2] = loop.add_before(SUM, [own_bias, bias], name)
    source.output[0] = loop.new_blob(loop.inputs[0] + "_with_bias")
    return source
