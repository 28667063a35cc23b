"""Sigmoid and Tanh by ATen's vectorised kernels, where these are faster; it is tried out."""

from typing import Iterable, List, Optional

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import is_on_onednn, new_operator
from caffe2_recurrent.rewriting.elementwise import vectorised
from caffe2_recurrent.rewriting.emit import ATEN, aten_is_missing
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.rows import BINARY, ELEMENTWISE
from caffe2_recurrent.rewriting.steps.step_shapes import shapes_before


class Activations(Rule):
    """step: Y = Sigmoid(X)    =>    Y = ATen sigmoid(X),    and Tanh likewise

    Also where the backward step computes Y again. ATen's output is a tensor of its own, so Y must be no linked blob,
    and X gets another name where it has that of Y.
    """

    name = "activations"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for operators in loop.steps:
            for position, operator in enumerate(operators):
                if operator.type in vectorised.KINDS and not is_on_onednn(operator):
                    yield Site("{} -> '{}'".format(operator.type, operator.output[0]), (operators, position))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if aten_is_missing():
            return "this Caffe2 has no ATen operator"
        operators, position = site.where
        output = operators[position].output[0]
        if any(link.inner == output for link in loop.all_links):
            return "'{}' is linked to an outer blob".format(output)
        if output in operators[position].input and _writer(operators, position) is None:
            return "it works in place, and something else needs '{}' from before".format(output)
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        operators, position = site.where
        kind = operators[position].type
        shape = shapes_before(loop, sizes, operators, position).get(operators[position].input[0])
        if shape is None:
            return "its size is not known, and {} is faster for a small one; give shapes".format(kind)
        elements = int(np.prod(shape))
        if not vectorised.aten_is_faster(kind, elements):
            return "with {} elements {} is faster".format(elements, kind)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        operators, position = site.where
        operator = operators[position]
        output = operator.output[0]
        if output in operator.input:
            own = loop.new_blob(output + "_before")
            writing = _writer(operators, position)
            assert writing is not None
            made = operators[writing].output
            made[list(made).index(output)] = own
            operator.input[0] = own
            if loop.gradient is not None:
                loop.shared.append(own)
        kind = vectorised.aten_name(operator.type)
        operators[position] = new_operator(ATEN, operator.input, operator.output, operator, operator=kind)


def _writer(operators: List[caffe2_pb2.OperatorDef], position: int) -> Optional[int]:
    """The operator that writes what the one at `position` reads, if nothing else reads it, and may do so elsewhere."""
    blob = operators[position].input[0]
    writing = dataflow.writer(operators, blob, position)
    if writing is None or (blob in operators[writing].input and operators[writing].type not in ELEMENTWISE | BINARY):
        return None
    return writing if dataflow.readers(operators, blob, writing) == [position] else None
