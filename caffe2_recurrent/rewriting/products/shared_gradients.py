"""What gradients over all steps with the same dY share: the gradient of a bias, and dY's columns.

An LSTM has two: that of the products with its states is behind the loop, and that of the product that makes the
sequence, from the net, behind that. The second finds what the first has left.
"""

from typing import Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.products import gradients_apart, net_products
from caffe2_recurrent.rewriting.products.gradients_apart import SUMS, Shared, Size, Weights
from caffe2_recurrent.rewriting.products.net_products import GRADIENT, Operators
from caffe2_recurrent.rewriting.products.step_products import weights_shape
from caffe2_recurrent.rewriting.products.weighted_sums import Sums

BIAS = "gradient of a bias"


def size_of(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Optional[Size]:
    """That of a gradient among `operators`, with what is or will be there; None if not all of it is known."""
    found = net_products.dimensions(loop, operator, sizes)
    if found is None:
        return None
    shared, other = there(loop, operators, operator), _earlier(loop, operators, operator)
    size = Size(found.rows, weights_of(loop, operator, sizes), len(operator.output))
    return size._replace(
        has_bias=shared.bias is not None or other is not None,
        has_columns=shared.columns is not None or (other is not None and _leaves_columns(loop, other, sizes)),
    )


def weights_of(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Weights:
    shape = weights_shape(loop, operator.input[1], sizes)
    assert shape is not None
    return Weights(*shape)


def there(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Shared:
    """What other operators have left there."""
    key = _key(loop, operators, operator)
    bias = loop.made.get((BIAS, key))
    if bias is None or bias in operator.output:
        return Shared()
    columns = [loop.made[(part, key)] for part in Sums._fields if (part, key) in loop.made]
    return Shared(bias, Sums(*columns) if columns else None)


def leave(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef, made: Shared) -> None:
    """Let others find what has been made in place of `operator`."""
    key = _key(loop, operators, operator)
    if key is None:
        return
    assert made.bias is not None
    loop.made[(BIAS, key)] = made.bias
    for part, blob in zip(Sums._fields, made.columns or ()):
        loop.made[(part, key)] = blob


def bias_left_there(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[str]:
    """Have an earlier operator leave its gradient of a bias there, if there is one that stays."""
    gradient = _earlier(loop, operators, operator)
    if gradient is None:
        return None
    of_bias = gradient.output[1]
    shared = loop.new_blob(of_bias + "_to_share")
    # Whoever has the gradient may change it.
    gradient.output[1] = shared
    copy = new_operator("Copy", [shared], [of_bias], gradient)
    loop.after_gradient.insert(position_of(loop.after_gradient, gradient) + 1, copy)
    leave(loop, loop.after_gradient, gradient, Shared(shared))
    return shared


def position_of(operators: Operators, operator: caffe2_pb2.OperatorDef) -> int:
    return next(position for position, other in enumerate(operators) if other is operator)


def _key(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[Tuple[str, int]]:
    """The same for gradients with the same dY; None if that may change before `operator` reads it."""
    of_result, axis = operator.input[2], integer(operator, "axis", 1)
    if net_products.is_sink(loop, operators):
        assert loop.gradient is not None
        of_result = loop.gradient.sequence
    elif operators is not loop.after_gradient:
        return None
    return of_result, axis


def _earlier(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[caffe2_pb2.OperatorDef]:
    """A gradient with the same dY, in front of `operator`."""
    key = _key(loop, operators, operator)
    for other in loop.after_gradient:
        if other is operator:
            break
        if other.type == GRADIENT and key == _key(loop, loop.after_gradient, other):
            return other
    return None


def _leaves_columns(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> bool:
    """Whether a gradient behind the loop, still as it was, will be weighted sums."""
    size = size_of(loop, loop.after_gradient, operator, sizes)
    if size is None or not any(way is not None and way.weights == SUMS for way in gradients_apart.ways(size)):
        return False
    way = gradients_apart.fastest(size)
    return way is not None and way.weights == SUMS
