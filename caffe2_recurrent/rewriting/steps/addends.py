"""Products with weights that a step adds to something."""

from typing import List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.rewriting.steps import dataflow

PRODUCTS = ("FC", "FCTransposed")


def products_at(loop: Loop, adding: int) -> List[int]:
    """The products that the operator at `adding` adds to something, with weights `[M, K]` (for FCTransposed `[K, M]`)
    and a bias that are the same in all steps, and that nothing else reads.
    """
    inputs = list(loop.operators[adding].input)
    found = []
    for blob in inputs:
        position = dataflow.writer(loop.operators, blob, adding)
        if position is None or inputs.count(blob) > 1 or not _has_weights_in_rows(loop, loop.operators[position]):
            continue
        in_place = blob in loop.operators[adding].output
        if dataflow.readers(loop.operators, blob, position) == [adding] and (in_place or not is_needed(loop, blob)):
            found.append(position)
    return found


def is_needed(loop: Loop, blob: str) -> bool:
    """Whether something beside the operators of the step needs a blob of it."""
    return is_in_backward_step(loop, blob) or loop.link(blob) is not None or blob in loop.net.external_output


def is_in_backward_step(loop: Loop, blob: str) -> bool:
    operators = [] if loop.gradient is None else loop.gradient.operators
    return any(blob in operator.input or blob in operator.output for operator in operators)


def _has_weights_in_rows(loop: Loop, operator: caffe2_pb2.OperatorDef) -> bool:
    # Other layouts (axis_w) have rows in another place.
    if operator.type not in PRODUCTS or is_on_onednn(operator) or integer(operator, "axis_w", 1) != 1:
        return False
    # Transposed weights are a blob of the loop's own.
    return operator.type == "FCTransposed" or loop.references.issuperset(operator.input[1:])
