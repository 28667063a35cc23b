"""Products of the net around a loop, FC and FCGradient: where they are, and what rules have to know of them."""

from typing import Container, Iterable, List, NamedTuple, Optional

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.rewriting.products.step_products import weights_shape
from caffe2_recurrent.rewriting.rule import Site
from caffe2_recurrent.rewriting.sequences import own_sequence

PRODUCT, GRADIENT = "FC", "FCGradient"

Operators = List[caffe2_pb2.OperatorDef]


class Dimensions(NamedTuple):
    """`rows` rows of `inner` elements, with weights `[outer, inner]`."""

    rows: int
    inner: int
    outer: int


def sites(loop: Loop, kinds: Container[str]) -> Iterable[Site]:
    """Those by MKL; a site is a list of operators and a position in it."""
    around = loop.surroundings
    lists = (loop.before, loop.after_gradient, *around.products.values(), *around.of_references.values())
    for operators in lists:
        for position, operator in enumerate(operators):
            if operator.type in kinds and operator.device_option.device_type == caffe2_pb2.CPU:
                blobs = ", ".join("'{}'".format(blob) for blob in operator.output)
                yield Site("{} -> {}".format(operator.type, blobs), (operators, position))


def why_not(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Optional[str]:
    """Why it is no product of rows with weights `[M, K]`, so far as is known; None if it is one."""
    weights = operator.input[1]
    shape = weights_shape(loop, weights, sizes)
    if shape is None:
        return "the size of its weights '{}' is not known; give shapes".format(weights)
    if len(shape) != 2 or integer(operator, "axis_w", 1) != 1:
        return "its weights '{}' are laid out in another way".format(weights)
    axis = integer(operator, "axis", 1)
    if axis <= 0:
        return "its axis {} is not counted from the first dimension on, from 1".format(axis)
    return None


def why_not_own(loop: Loop, operators: Operators, operator: caffe2_pb2.OperatorDef) -> Optional[str]:
    """Why the loop cannot have its result made in another way in front of it; None if it makes that for it alone."""
    (result,) = operator.output
    if operators is not loop.before and result not in loop.surroundings.sources:
        return "'{}' is not made for this loop alone".format(result)
    return None


def take_place(loop: Loop, operators: Operators, position: int, made: Operators) -> None:
    """Put what is `made`, in place of an operator whose result is the loop's own, in front of the loop."""
    (result,) = operators[position].output
    if operators is loop.before:
        operators[position : position + 1] = made
    else:
        # Together, so that what is made of weights alone is in front of the loop.
        loop.before[:0] = [*operators[:position], *made, *operators[position + 1 :]]
        loop.surroundings.products[loop.surroundings.sources.pop(result)] = []
    # Its sequence is no FC's any more.
    if loop.made.get(own_sequence.OWN) == result:
        del loop.made[own_sequence.OWN]


def weights_of(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Shape:
    """The shape of its weights, where `why_not` is None."""
    shape = weights_shape(loop, operator.input[1], sizes)
    assert shape is not None
    return shape


def dimensions(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Optional[Dimensions]:
    """None if the number of rows, or the weights, are not known."""
    rows, shape = _rows(loop, operator, sizes), weights_shape(loop, operator.input[1], sizes)
    if rows is None or shape is None:
        return None
    outer, inner = shape
    return Dimensions(rows, inner, outer)


def _rows(loop: Loop, operator: caffe2_pb2.OperatorDef, sizes: Sizes) -> Optional[int]:
    """One for each sequence in each step; what is no sequence of the loop has rows of its own."""
    if any(other is operator for operators in loop.surroundings.of_references.values() for other in operators):
        shape = sizes.shape(operator.input[0])
        return None if shape is None else int(np.prod(shape[: integer(operator, "axis", 1)]))
    steps, batch = sizes.steps(loop), sizes.batch(loop)
    return None if steps is None or batch is None else steps * batch


def is_sink(loop: Loop, operators: Operators) -> bool:
    """Whether these take the place of a gradient that continues from what the loop leaves as its sequence's."""
    return any(loop.surroundings.products[sink] is operators for sink in loop.surroundings.sinks)


def at_sink(loop: Loop) -> Optional[Site]:
    """The one gradient that continues from what the loop leaves as its sequence's, if it is still by MKL."""
    if len(loop.surroundings.sinks) != 1:
        return None
    (sink,) = loop.surroundings.sinks
    found = (site for site in sites(loop, (GRADIENT,)) if site.where[0] is loop.surroundings.products[sink])
    return next(found, None)
