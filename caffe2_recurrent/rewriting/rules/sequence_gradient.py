"""The gradient of the sequence behind the loop, where what it is made of is there over all steps."""

from typing import Iterable, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import SUM, new_operator
from caffe2_recurrent.rewriting import gradient_memory
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.sequences import over_steps
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.gradient_parts import ELEMENTWISE_LINEAR_GRADIENT

PRODUCT = "Mul"


class Made(NamedTuple):
    """Where the backward step makes the sequence's gradient: the products, and the last operator, which adds them up
    or is the only one of them."""

    products: List[int]
    last: int


class SequenceGradient(Rule):
    """backward step: u = Mul(dY, v);  w = Mul(dZ, s);  dx_t = Sum(u, w)
    after the loop: dX, .. = ElementwiseLinearGradient(dY of all steps, X, v);  and the same of dZ and s

    =>  after the loop: the sequence's gradient = Sum(dX, the other one's)

    This is how an MILSTM comes by it, once `parameter_gradients` has moved the gradients of its vectors.
    """

    name = "sequence_gradient"

    def sites(self, loop: Loop) -> Iterable[Site]:
        gradient = loop.gradient
        if gradient is None:
            return
        for link in gradient.backward_links:
            if link.outer == gradient.sequence and _made(loop, link.inner) is not None:
                yield Site("'{}'".format(link.inner), link)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        gradient, link = loop.gradient, site.where
        made = _made(loop, link.inner)
        assert gradient is not None and made is not None
        same = [other for other in gradient.backward_links if link.outer == other.outer or link.inner == other.inner]
        if same != [link]:
            return "'{}' is linked more than once".format(link.inner)
        needed = {other.inner for other in gradient.backward_links if other != link}
        needed |= gradient.of_parameters
        if gradient_memory.is_taken(loop):
            return gradient_memory.TAKEN
        for position in {*made.products, made.last}:
            (blob,) = gradient.operators[position].output
            readers = dataflow.readers(gradient.operators, blob, position)
            if blob in needed or any(reader != made.last for reader in readers):
                return "'{}' is needed elsewhere too".format(blob)
            if position in made.products and _moved(loop, position) is None:
                return "'{}' is not known over all steps".format(blob)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient, link = loop.gradient, site.where
        made = _made(loop, link.inner)
        assert gradient is not None and made is not None
        moved = [operator for operator in (_moved(loop, position) for position in made.products) if operator]
        spent = {*made.products, made.last}
        gradient.operators[:] = [
            operator for position, operator in enumerate(gradient.operators) if position not in spent
        ]
        gradient.backward_links.remove(link)
        if len(moved) == 1:
            dataflow.rename(moved[0], moved[0].output[0], gradient.sequence)
            return
        addends = [operator.output[0] for operator in moved]
        loop.after_gradient.append(new_operator(SUM, addends, [gradient.sequence], loop.forward))


def _made(loop: Loop, blob: str) -> Optional[Made]:
    """How the backward step makes `blob`, if it is of products with what is the same in all steps."""
    assert loop.gradient is not None
    operators = loop.gradient.operators
    last = dataflow.writer(operators, blob)
    if last is None:
        return None
    adds = operators[last].type == SUM
    found = [dataflow.writer(operators, part, last) for part in operators[last].input] if adds else [last]
    products = [position for position in found if position is not None]
    if len(products) < len(found) or not all(_is_product(loop, operators[position]) for position in products):
        return None
    return Made(products, last)


def _is_product(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    return operator.type == PRODUCT and loop.is_reference(operator.input[1])


def _moved(loop: Loop, position: int) -> Optional[caffe2_pb2.OperatorDef]:
    """The operator behind the loop that makes the same as the product at `position`, for all steps."""
    assert loop.gradient is not None
    of_result, weights = loop.gradient.operators[position].input
    values = over_steps.known(loop, of_result)
    for operator in loop.after_gradient:
        if operator.type == ELEMENTWISE_LINEAR_GRADIENT and (operator.input[0], operator.input[2]) == (values, weights):
            return operator
    return None
