"""Gradients of sequences to which the net adds more, once rules have let operators behind the loop read them too.

before    <loop>/x_grad = RecurrentNetworkGradient(...), or a loop of its own;  w_grad = MatMul(<loop>/x_grad, ...)
          x_grad = Alias(<loop>/x_grad);  x_grad = Sum(x_grad, ...)
after     likewise, and the Sum waits for w_grad

Nets that run operators side by side order them by the names of blobs alone: who reads <loop>/x_grad need not be done
when the sum is written to the same memory under its other name. A copy would not set the two apart: they stay one
tensor wherever the net as it was has run in the same workspace.

Source: control_input in prepareOperatorNodes of caffe2/core/net_dag_utils.cc.
"""

from typing import List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR, copied

# As rules write a backward pass.
BACKWARD_PASSES = (OPERATOR, "If")


def keep_order(operators: List[caffe2_pb2.OperatorDef]) -> None:
    """Let what writes to those gradients among `operators`, all those of a net, wait for what reads them."""
    made_at = {
        blob: position
        for position, operator in enumerate(operators)
        if operator.type == GRADIENT_OPERATOR or (operator.type in BACKWARD_PASSES and operator.is_gradient_op)
        for blob in operator.output
    }
    for position, operator in enumerate(operators):
        if operator.type == "Alias" and operator.input[0] in made_at:
            _let_writer_wait(operators, made_at[operator.input[0]], position)


def _let_writer_wait(operators: List[caffe2_pb2.OperatorDef], made: int, alias: int) -> None:
    (gradient,), (exposed,) = operators[alias].input, operators[alias].output
    later = range(alias + 1, len(operators))
    writing = next((position for position in later if exposed in operators[position].output), None)
    if writing is None:
        return
    # Views of it are read too.
    shown = {gradient}
    waits_for: List[str] = []
    for position in range(made + 1, writing):
        operator = operators[position]
        if position != alias and not shown.isdisjoint(operator.input):
            shown.update(operator.output)
            waits_for += operator.output
    # Operators may be those of the net, which stays as it is.
    writer = copied(operators[writing])
    known = {*writer.input, *writer.control_input}
    writer.control_input.extend(blob for blob in dict.fromkeys(waits_for) if blob not in known)
    operators[writing] = writer
