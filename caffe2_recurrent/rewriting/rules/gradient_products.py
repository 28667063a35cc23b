"""Gradients over all steps in parts, where that is faster; it is tried out."""

from typing import Iterable, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting import gradients_apart, net_products
from caffe2_recurrent.rewriting.emit import Emitter
from caffe2_recurrent.rewriting.gradients_apart import Apart, Shared, Size, Weights
from caffe2_recurrent.rewriting.net_products import GRADIENT, Operators
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.step_products import weights_shape
from caffe2_recurrent.sizes import Sizes

# A gradient in parts must be faster by this factor.
GAIN = 1.02


class GradientProducts(Rule):
    """after the loop: dW, db, dX = FCGradient(X, W, dY);  dV, dc, dZ = FCGradient(Z, V, dY)

    =>  dW = MatMul(dY', X);  db = MatMul(1', dY);  dX = MatMul(dY, W)
        dV = Transpose(MatMul(Z', dY));  dc = Copy(db);  dZ = MatMul(dY, V)

    It is about products that another rule has moved out of the loop, and those of the net that continue from the
    gradient of a sequence. Each is taken apart for itself, with the gradient of its weights transposed or not; see
    `gradients_apart.py`.
    """

    name = "gradient_products"

    def sites(self, loop: Loop) -> Iterable[Site]:
        return net_products.sites(loop, (GRADIENT,))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        return net_products.why_not(loop, operators[position], sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        size = _size(loop, site, sizes)
        if size is None:
            return "the numbers of steps and sequences are not known; give shapes"
        found = gradients_apart.seconds(size)
        if GAIN * min(found.values()) > found[None]:
            return "for [{0.outer}, {1}] x [{1}, {0.inner}] it is not faster".format(size.weights, size.rows)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator, size = operators[position], _size(loop, site, sizes)
        way = None if size is None else gradients_apart.fastest(size)
        there = _there(loop, operators, operator)
        there = there._replace(bias=there.bias or _left_there(loop, operators, operator))
        emitter = Emitter(loop, operator, operator.output[0])
        made = gradients_apart.emit(emitter, operator, way or Apart(), _weights(loop, operator, sizes), there)
        key = _key(loop, operators, operator)
        if key is not None:
            loop.made[key] = made
        # In front of it there may be one more by now.
        position = _position(operators, operator)
        operators[position : position + 1] = emitter.operators


def _size(loop: Loop, site: Site, sizes: Sizes) -> Optional[Size]:
    operators, position = site.where
    operator = operators[position]
    found = net_products.dimensions(loop, operator, sizes)
    if found is None:
        return None
    there = _there(loop, operators, operator)
    has_bias = there.bias is not None or _earlier(loop, operators, operator) is not None
    weights = _weights(loop, operator, sizes)
    return Size(found.rows, weights, len(operator.output), has_bias, there.columns is not None)


def _weights(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Weights:
    shape = weights_shape(loop, operator.input[1], sizes)
    assert shape is not None
    return Weights(*shape)


def _position(operators: Operators, operator: caffe2_pb2.OperatorDef) -> int:
    return next(position for position, other in enumerate(operators) if other is operator)


# ----------------------------------------------------------------------------------- what gradients have in common


def _key(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[Tuple[str, str, int]]:
    """The same for gradients with the same dY; None if that may change before `operator` reads it."""
    of_result, axis = operator.input[2], integer(operator, "axis", 1)
    if net_products.is_sink(loop, operators):
        assert loop.gradient is not None
        of_result = loop.gradient.sequence
    elif operators is not loop.after_gradient:
        return None
    return "shared by gradients", of_result, axis


def _there(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Shared:
    """What other operators have left there."""
    made = loop.made.get(_key(loop, operators, operator))
    return Shared() if made is None or made.bias in operator.output else made


def _earlier(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[caffe2_pb2.OperatorDef]:
    """A gradient with the same dY, in front of `operator`."""
    key = _key(loop, operators, operator)
    for other in loop.after_gradient:
        if other is operator:
            break
        if other.type == GRADIENT and key == _key(loop, loop.after_gradient, other):
            return other
    return None


def _left_there(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[str]:
    """Have an earlier operator leave its gradient of a bias there, if there is one."""
    gradient = _earlier(loop, operators, operator)
    if gradient is None:
        return None
    of_bias = gradient.output[1]
    shared = loop.new_blob(of_bias + "_to_share")
    # Whoever has the gradient may change it.
    gradient.output[1] = shared
    position = _position(loop.after_gradient, gradient)
    loop.after_gradient.insert(position + 1, new_operator("Copy", [shared], [of_bias], gradient))
    loop.made[_key(loop, loop.after_gradient, gradient)] = Shared(shared)
    return shared
