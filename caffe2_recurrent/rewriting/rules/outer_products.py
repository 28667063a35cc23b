"""The gradient of matrices that all steps multiply with a vector each, as one product behind the loop."""

from typing import Iterable, NamedTuple, Optional, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Parameter
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.products.step_products import MULTIPLICATION
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.sequences.over_steps import OverSteps, of_forward, of_gradient, vector_along
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS
from caffe2_recurrent.rewriting.steps.step_shapes import MAY_BE_LARGER, shapes_before


class Factor(NamedTuple):
    """A blob of the backward step with a vector for each matrix, along `axis` of the gradient."""

    blob: str
    axis: int
    is_transposed: bool

    @property
    def length(self) -> int:
        """The axis of the blob along which its vectors lie; the other one but the first is 1."""
        return 3 - self.axis if self.is_transposed else self.axis


class OuterProducts(Rule):
    """backward step: dA = BatchMatMul(p, q), p `[N, M, 1]`, q `[N, 1, K]`, and the engine adds up dA over the steps

    =>  after the loop: dA = BatchMatMul(P', Q), P `[N, T, M]` and Q `[N, T, K]`, p and q of all steps

    p, q may be transposed. Of such a product is the gradient of A in `BatchMatMul(A, b)`, b `[N, K, 1]`.
    """

    name = "outer_products"

    def sites(self, loop: Loop) -> Iterable[Site]:
        gradient = loop.gradient
        if gradient is None:
            return
        gradients = {parameter.inner_gradient: parameter for parameter in gradient.parameters}
        for position, operator in enumerate(gradient.operators):
            is_one_by_one = operator.type == MULTIPLICATION and not integer(operator, "broadcast", 0)
            if is_one_by_one and operator.output[0] in gradients:
                parameter = gradients[operator.output[0]]
                yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (position, parameter))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.gradient is not None
        position, parameter = site.where
        operators = loop.gradient.operators
        operator = operators[position]
        if dataflow.reads(operators, parameter.inner_gradient):
            return "'{}' is used for something else too".format(parameter.inner_gradient)
        if dataflow.writers(operators, parameter.inner_gradient) != [position]:
            return "'{}' is written more than once".format(parameter.inner_gradient)
        shapes = shapes_before(loop, sizes, operators, position)
        larger = shapes_before(loop, sizes.when_larger(), operators, position)
        for factor in _factors(operator):
            shape = shapes.get(factor.blob)
            if shape is None:
                return "the shape of '{}' is not known; give shapes".format(factor.blob)
            if len(shape) != DIMENSIONS or shape[3 - factor.length] != 1:
                return "'{}' has no vector for each matrix: {}".format(factor.blob, shape)
            if factor.blob not in larger or larger[factor.blob][3 - factor.length] != 1:
                return MAY_BE_LARGER.format(factor.blob, shape)
            values = _values(loop, factor, position)
            if isinstance(values, str):
                return values
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        assert loop.gradient is not None
        position, parameter = site.where
        factors = _factors(loop.gradient.operators[position])
        outer = [_outer(loop, factor, position, parameter) for factor in factors]
        del loop.gradient.operators[position]
        product = new_operator(MULTIPLICATION, outer, [parameter.outer_gradient], loop.forward, trans_a=1)
        loop.after_gradient.append(product)
        loop.gradient.parameters.remove(parameter)


def _factors(operator: caffe2_pb2.OperatorDef) -> Tuple[Factor, Factor]:
    rows, columns = operator.input
    return (
        Factor(rows, 1, bool(integer(operator, "trans_a", 0))),
        Factor(columns, 2, bool(integer(operator, "trans_b", 0))),
    )


def _values(loop: Loop, factor: Factor, position: int) -> Union[OverSteps, str]:
    gradient = loop.gradient
    assert gradient is not None
    backward = {link.inner for link in gradient.backward_links}.union(*(made.output for made in gradient.operators))
    if factor.blob in backward and factor.blob not in loop.written:
        return of_gradient(loop, factor.blob, position)
    return of_forward(loop, factor.blob)


def _outer(loop: Loop, factor: Factor, position: int, parameter: Parameter) -> str:
    """The outer blob `[N, T, k]` with the vectors of all steps."""
    values = _values(loop, factor, position)
    assert isinstance(values, OverSteps)
    of_steps = values.take(lambda: vector_along(loop, parameter.outer, factor.axis, DIMENSIONS))
    turned = loop.new_blob(of_steps + "_by_sequence")
    loop.after_gradient.append(new_operator("Transpose", [of_steps], [turned], loop.forward, axes=[1, 0, 2]))
    return turned
