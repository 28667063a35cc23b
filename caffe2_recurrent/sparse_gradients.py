"""Sparse gradients, as Gather has them, made dense.

Indices may have any number of axes, as the slice of a sequence of them has two, and the values have those of a row
behind; SparseToDense takes one axis of indices.
"""

from typing import List

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.operators import operator_beside


def dense_operators(
    gradient: core.GradientSlice, like: str, target: str, beside: caffe2_pb2.OperatorDef
) -> List[caffe2_pb2.OperatorDef]:
    """`target`, of the shape of `like`, is the sum of the values in each row."""

    def add(kind: str, inputs: List[str], name: str, *others: str, **arguments: object) -> str:
        outputs = ["{}_{}".format(target, own) for own in (name, *others)]
        operators.append(operator_beside(kind, inputs, outputs, beside, **arguments))
        return outputs[0]

    operators: List[caffe2_pb2.OperatorDef] = []
    indices = add("FlattenToVec", [str(gradient.indices)], "rows")
    row = add("Slice", [add("Shape", [like], "shape")], "shape_of_row", starts=[1], ends=[-1])
    shape = add("Concat", [add("Shape", [indices], "count"), row], "shape_of_rows", "shape_of_rows_sizes", axis=0)
    values = add("Reshape", [str(gradient.values), shape], "values_of_rows", "values_of_rows_before")
    operators.append(operator_beside("SparseToDense", [indices, values, like], [target], beside))
    return operators
