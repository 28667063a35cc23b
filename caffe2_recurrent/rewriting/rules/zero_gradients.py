"""Gradients that are zero are not added."""

from typing import Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer, number
from caffe2_recurrent.operators import SUM
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow


class ZeroGradients(Rule):
    """backward step: z = ConstantFill(0);  y = operator(..);  s = Sum(z, y)    =>    s = operator(..)

    With more than two addends the Sum stays, without z. The gradient that LSTMUnitGradient gives to the hidden state
    before is z too, where all sequences are T long: it writes it to a blob that nobody reads.
    """

    name = "zero_gradients"

    def sites(self, loop: Loop) -> Iterable[Site]:
        operators = loop.gradient.operators if loop.gradient is not None else []
        for position, operator in enumerate(operators):
            if _is_zero(operator):
                for reading in dataflow.readers(operators, operator.output[0], position):
                    if operators[reading].type == SUM:
                        yield Site("Sum -> '{}'".format(operators[reading].output[0]), (position, reading))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.gradient is not None
        operators = loop.gradient.operators
        position, adding = site.where
        zero, total = operators[position].output[0], operators[adding].output[0]
        if dataflow.readers(operators, zero, position) != [adding]:
            return "'{}' is read elsewhere too".format(zero)
        if zero != total and any(link.inner == zero for link in loop.gradient.backward_links):
            return "'{}' is linked to an outer blob".format(zero)
        if zero != total and zero in loop.gradient.of_parameters:
            return "'{}' is the gradient of a parameter too".format(zero)
        others = [blob for blob in operators[adding].input if blob != zero]
        if not others:
            return "it adds nothing else"
        if len(others) == 1 and _writer_of_total(loop, others[0], total, adding) is None:
            return "'{}' is read or linked elsewhere too".format(others[0])
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        assert loop.gradient is not None
        operators = loop.gradient.operators
        position, adding = site.where
        zero, total = operators[position].output[0], operators[adding].output[0]
        others = [blob for blob in operators[adding].input if blob != zero]
        spent = []
        if operators[position].type == "ConstantFill":
            spent.append(position)
        else:
            unread = loop.new_blob(zero + "_zero")
            operators[position].output[0] = unread
        if len(others) > 1:
            operators[adding].input[:] = others
        else:
            writing = _writer_of_total(loop, others[0], total, adding)
            assert writing is not None
            outputs = operators[writing].output
            outputs[list(outputs).index(others[0])] = total
            spent.append(adding)
        operators[:] = [operator for index, operator in enumerate(operators) if index not in spent]


def _is_zero(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the first output is nothing but zeros."""
    if operator.type == "LSTMUnitGradient":
        return not integer(operator, "sequence_lengths", 1)
    return operator.type == "ConstantFill" and number(operator, "value", 0.0) == 0.0 and bool(operator.input)


def _writer_of_total(loop: Loop, addend: str, total: str, adding: int) -> Optional[int]:
    """The operator that could write `total` in place of `addend`, which only the Sum reads."""
    assert loop.gradient is not None
    operators: List[caffe2_pb2.OperatorDef] = loop.gradient.operators
    writing = dataflow.writer(operators, addend, adding)
    if addend == total:
        return writing
    linked = any(link.inner == addend for link in loop.gradient.backward_links)
    if writing is None or linked or addend in loop.gradient.of_parameters or addend in operators[writing].input:
        return None
    if dataflow.readers(operators, addend, writing) != [adding]:
        return None
    between = operators[writing + 1 : adding]
    if any(
        total in operator.input or total in operator.output for operator in between if operator.type != "ConstantFill"
    ):
        return None
    return None if operators[writing].type == "ATen" else writing
