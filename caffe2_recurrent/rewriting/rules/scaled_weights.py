"""A factor on a sum, taken into the weights of one addend and applied to the other as it is added."""

from typing import Iterable, Optional

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.rewriting import dataflow
from caffe2_recurrent.rewriting.addends import is_needed, products_at
from caffe2_recurrent.rewriting.emit import ATEN, is_aten
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes


class ScaledWeights(Rule):
    """step: Y = FC(X, W, b);  G = Sum(Y, A);  Z = shift + scale * G

    =>  before the loop: weights scale * W, row by row, and bias scale * b + shift
        step: Y = FC(X, weights, bias);  Z = Y + scale * A

    One pass over `[N, M]` less. Nothing else may read Y or G. FCTransposed likewise, where it is columns.
    """

    name = "scaled_weights"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if is_aten(operator, "addcmul") and operator.input[0] not in loop.written:
                adding = dataflow.writer(loop.operators, operator.input[1], position)
                if adding is not None and loop.operators[adding].type == "Sum":
                    yield Site("Sum -> '{}'".format(operator.input[1]), (adding, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        adding, scaling = site.where
        total = loop.operators[scaling].input[1]
        if not loop.references.issuperset([loop.operators[scaling].input[0], loop.operators[scaling].input[2]]):
            return "what it is scaled with is not the same in all steps"
        if len(loop.operators[adding].input) != 2:
            return "it adds {} blobs".format(len(loop.operators[adding].input))
        if dataflow.readers(loop.operators, total, adding) != [scaling] or is_needed(loop, total):
            return "'{}' is needed elsewhere too".format(total)
        if not products_at(loop, adding):
            return "neither addend is a product with weights, the same in all steps, that nothing else reads"
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        adding, scaling = site.where
        multiplying, *_ = products_at(loop, adding)
        product, scaled = loop.operators[multiplying], loop.operators[scaling]
        shift, _, scale = scaled.input
        _, original, bias = product.input
        along = {"broadcast": 1, "axis": 0} if product.type == "FC" else {}
        weights = loop.add_before("Mul", [original, scale], original + "_scaled", **along)
        biases = loop.add_before(ATEN, [shift, bias, scale], bias + "_scaled", operator="addcmul")
        for outer in (weights, biases):
            loop.add_reference(outer)
        (addend,) = [blob for blob in loop.operators[adding].input if blob != product.output[0]]
        # In-place operators leave one name for product and sum.
        own = loop.new_blob(product.output[0] + "_product")
        product.input[1:] = [weights, biases]
        product.output[0] = own
        scaled.input[:] = [own, addend, scale]
        if loop.gradient is not None:
            loop.shared.append(own)
        del loop.operators[adding]
