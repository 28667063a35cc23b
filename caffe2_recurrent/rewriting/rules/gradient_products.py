"""Gradients over all steps in parts, where that is faster; it is tried out."""

from typing import Iterable, Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.products import gradients_apart, net_products, shared_gradients
from caffe2_recurrent.rewriting.products.gradients_apart import Apart
from caffe2_recurrent.rewriting.products.net_products import GRADIENT
from caffe2_recurrent.rewriting.rule import Rule, Site

# A gradient in parts must be faster by this factor.
GAIN = 1.02


class GradientProducts(Rule):
    """after the loop: dW, db, dX = FCGradient(X, W, dY);  dV, dc, dZ = FCGradient(Z, V, dY)

    =>  dW = MatMul(dY', X);  db = MatMul(1', dY);  dX = MatMul(dY, W)
        dV = Transpose(MatMul(Z', dY));  dc = Copy(db);  dZ = SparseLengthsWeightedSum(V, dY, ...)

    It is about products that another rule has moved out of the loop, and those of the net that continue from the
    gradient of a sequence. Each is taken apart for itself, dW and dX in the way that is fastest; see
    `gradients_apart.py`, and `shared_gradients.py` for what two with the same dY share.
    """

    name = "gradient_products"

    def sites(self, loop: Loop) -> Iterable[Site]:
        return net_products.sites(loop, (GRADIENT,))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        return net_products.why_not(loop, operators[position], sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        size = shared_gradients.size_of(loop, operators, operators[position], sizes)
        if size is None:
            return "the numbers of steps and sequences are not known; give shapes"
        found = gradients_apart.seconds(size)
        if GAIN * min(found.values()) > found[None]:
            return "for [{0.outer}, {1}] x [{1}, {0.inner}] it is not faster".format(size.weights, size.rows)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        size = shared_gradients.size_of(loop, operators, operator, sizes)
        weights = shared_gradients.weights_of(loop, operator, sizes)
        way = None if size is None else gradients_apart.fastest(size)
        there = shared_gradients.there(loop, operators, operator)
        if there.bias is None:
            there = there._replace(bias=shared_gradients.bias_left_there(loop, operators, operator))
        emitter = Emitter(loop, operator, operator.output[0])
        made = gradients_apart.emit(emitter, operator, way or Apart(), weights, there)
        shared_gradients.leave(loop, operators, operator, made)
        # In front of it there may be one more by now.
        position = shared_gradients.position_of(operators, operator)
        operators[position : position + 1] = emitter.operators
