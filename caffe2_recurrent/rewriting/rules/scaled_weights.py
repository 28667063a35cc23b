"""A factor on a sum, taken into the weights of one addend and applied to the other as it is added."""

from typing import Iterable, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting import dataflow
from caffe2_recurrent.rewriting.emit import ATEN
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

PRODUCTS = ("FC", "FCTransposed")


class ScaledWeights(Rule):
    """step: Y = FC(X, W, b);  G = Sum(Y, A);  Z = shift + scale * G

    =>  before the loop: weights scale * W, row by row, and bias scale * b + shift
        step: Y = FC(X, weights, bias);  Z = Y + scale * A

    One pass over `[N, M]` less. Nothing else may read Y or G. FCTransposed likewise, where it is columns.
    """

    name = "scaled_weights"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            if operator.type == ATEN and _is(operator, "addcmul") and operator.input[0] not in loop.written:
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
        if dataflow.readers(loop.operators, total, adding) != [scaling] or _is_needed(loop, total):
            return "'{}' is needed elsewhere too".format(total)
        if _product(loop, adding) is None:
            return "neither addend is a product with weights, the same in all steps, that nothing else reads"
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        adding, scaling = site.where
        multiplying = _product(loop, adding)
        assert multiplying is not None
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


def _is(operator: caffe2_pb2.OperatorDef, kind: str) -> bool:
    given = argument(operator, "operator")
    return given is not None and given.s.decode() == kind


def _is_needed(loop: Loop, blob: str) -> bool:
    """Whether something beside the operators of the step needs a blob of it."""
    gradient = loop.gradient
    in_backward = gradient is not None and any(
        blob in operator.input or blob in operator.output for operator in gradient.operators
    )
    return in_backward or loop.link(blob) is not None or blob in loop.net.external_output


def _product(loop: Loop, adding: int) -> Optional[int]:
    """The product that the Sum at `adding` adds something to, if only the Sum reads it."""
    for blob in loop.operators[adding].input:
        position = dataflow.writer(loop.operators, blob, adding)
        if position is None or not _has_scalable_weights(loop, loop.operators[position]):
            continue
        in_place = blob in loop.operators[adding].output
        if dataflow.readers(loop.operators, blob, position) == [adding] and (in_place or not _is_needed(loop, blob)):
            return position
    return None


def _has_scalable_weights(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    # Other layouts (axis_w) have rows in another place.
    if operator.type not in PRODUCTS or is_on_onednn(operator) or integer(operator, "axis_w", 1) != 1:
        return False
    # Transposed weights are a blob of the loop's own.
    return operator.type == "FCTransposed" or loop.references.issuperset(operator.input[1:])
