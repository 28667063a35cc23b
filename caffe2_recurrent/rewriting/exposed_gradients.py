"""Gradients of sequences to which the net adds more, once rules have let operators behind the loop read them too.

before    <loop>/x_grad = RecurrentNetworkGradient(...);  x_grad = Alias(<loop>/x_grad);  x_grad = Sum(x_grad, ...)
after     likewise, with x_grad = Copy(<loop>/x_grad)

Nets that run operators side by side order them by the names of blobs alone: who reads <loop>/x_grad need not be done
when the sum is written to the same memory under its other name.
"""

from typing import List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.gradient_maker import GRADIENT_OPERATOR
from caffe2_recurrent.operators import copied


def set_apart(operators: List[caffe2_pb2.OperatorDef]) -> None:
    """Put copies in place of those aliases among `operators`, all those of a net."""
    of_loops = {blob for operator in operators if operator.type == GRADIENT_OPERATOR for blob in operator.output}
    for position, alias in enumerate(operators):
        if alias.type != "Alias" or alias.input[0] not in of_loops:
            continue
        others = operators[:position] + operators[position + 1 :]
        read = any(alias.input[0] in other.input for other in others)
        if read and any(alias.output[0] in later.output for later in operators[position + 1 :]):
            operators[position] = copied(alias)
            operators[position].type = "Copy"
