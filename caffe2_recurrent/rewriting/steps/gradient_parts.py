"""What a gradient operator of a step makes of what, by role, and how it is taken apart.

    dW, db, dX = FCGradient(X, W, dY)              the shares of parameters dW, db; dX = BatchMatMul(dY, W)
    dX, dw, db = ElementwiseLinearGradient(..)     dw, db; dX = Mul(dY, w)
    dX, db = AddGradient(dY, X, b)                 db; dX = dY, and likewise SubGradient
    dX, dw = MulGradient(dY, X, w)                 dw; dX = Mul(dY, w)

The operands of the last three may stand in the other order. Over all steps the same operators make the shares.
"""

from typing import Callable, List, NamedTuple, Optional, Set, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import argument
from caffe2_recurrent.operators import copied, new_operator
from caffe2_recurrent.rewriting.steps.rows import FEATURES

FC_GRADIENT, ELEMENTWISE_LINEAR_GRADIENT = "FCGradient", "ElementwiseLinearGradient"
ADD_GRADIENT, SUB_GRADIENT, MUL_GRADIENT = "AddGradient", "SubGradient", "MulGradient"
# Of operators by element, with a blob that is repeated.
BY_ELEMENT = (ADD_GRADIENT, SUB_GRADIENT, MUL_GRADIENT)


class Parts(NamedTuple):
    """The blobs of a gradient operator: of Y = operator(X, W, b), or of X and one parameter W.

    `shares` are the gradients of the parameters, `of_input` that of X, if it is wanted.
    """

    operator: caffe2_pb2.OperatorDef
    input: str
    weights: str
    of_output: str
    shares: Tuple[str, ...]
    of_input: Optional[str]

    @property
    def reads_input(self) -> bool:
        """Whether the shares depend on X; if not, an operator wants its shape alone."""
        return self.operator.type not in (ADD_GRADIENT, SUB_GRADIENT)

    @property
    def is_by_element(self) -> bool:
        return self.operator.type in BY_ELEMENT

    @property
    def has_weights_first(self) -> bool:
        return self.is_by_element and self.operator.input[1] == self.weights


def read(operator: caffe2_pb2.OperatorDef, fixed: Set[str]) -> Optional[Parts]:
    """The parts of an operator that is about parameters; `fixed` are the blobs that all steps see alike."""
    inputs, outputs = list(operator.input), list(operator.output)
    if operator.type == FC_GRADIENT:
        of_input = outputs[2] if len(outputs) > 2 else None
        return Parts(operator, inputs[0], inputs[1], inputs[2], tuple(outputs[:2]), of_input)
    if operator.type == ELEMENTWISE_LINEAR_GRADIENT:
        return Parts(operator, inputs[1], inputs[2], inputs[0], tuple(outputs[1:]), outputs[0])
    if operator.type in BY_ELEMENT and [blob in fixed for blob in inputs[1:3]].count(True) == 1:
        operands = list(zip(inputs[1:], outputs))
        ((weights, share),) = [operand for operand in operands if operand[0] in fixed]
        ((other, of_other),) = [operand for operand in operands if operand[0] not in fixed]
        return Parts(operator, other, weights, inputs[0], (share,), of_other)
    return None


def of_input(parts: Parts) -> List[caffe2_pb2.OperatorDef]:
    """What is left of the operator in a step: it makes the gradient of X."""
    operator, target = parts.operator, parts.of_input
    if target is None:
        return []
    factors = [parts.of_output, parts.weights]
    if operator.type == FC_GRADIENT:
        return [new_operator("BatchMatMul", factors, [target], operator, broadcast=1)]
    if parts.reads_input:
        product = new_operator("Mul", factors, [target], operator)
        for name in ("broadcast", "axis"):
            given = argument(operator, name)
            if parts.is_by_element and given is not None:
                product.arg.add().CopyFrom(given)
        return [product]
    if parts.has_weights_first and operator.type == SUB_GRADIENT:
        return [new_operator("Negative", [parts.of_output], [target], operator)]
    return [] if target == parts.of_output else [new_operator("Copy", [parts.of_output], [target], operator)]


def of_shares(
    parts: Parts, input_: str, of_output: str, shares: List[str], rest: Callable[[], str], is_vector: bool
) -> caffe2_pb2.OperatorDef:
    """The operator over all steps: it makes the shares of X and dY of all steps.

    `rest` gives blobs for what it cannot do without. W `is_vector`: it has one dimension.
    """
    operator = parts.operator
    if operator.type == FC_GRADIENT:
        inputs, outputs = [input_, parts.weights, of_output], shares
    elif operator.type == MUL_GRADIENT and is_vector and argument(operator, "axis") is None:
        # MulGradient takes several times as long.
        inputs, outputs = [of_output, input_, parts.weights], [rest(), *shares, rest()]
        return new_operator(ELEMENTWISE_LINEAR_GRADIENT, inputs, outputs, operator, axis=FEATURES)
    elif parts.has_weights_first:
        inputs, outputs = [of_output, parts.weights, input_], [*shares, rest()]
    else:
        inputs, outputs = [of_output, input_, parts.weights], [rest(), *shares]
    made = copied(operator)
    made.input[:], made.output[:] = inputs, outputs
    return made
