"""Sparse gradients, as Gather has them: with flat indices, and made dense.

Indices may have any number of axes, as the slice of a sequence of them has two, and the values have those of a row
behind. Caffe2 adds up sparse gradients by joining them, and SparseToDense takes them, along one axis.
"""

from typing import List, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.operators import operator_beside

Operators = List[caffe2_pb2.OperatorDef]


def flat(
    gradient: core.GradientSlice, like: str, prefix: str, beside: caffe2_pb2.OperatorDef
) -> Tuple[Operators, core.GradientSlice]:
    """Operators that make indices `[k]` and values `[k, ...]` of a gradient of the rows of `like`; and these.

    They are in blobs of their own, which begin with `prefix`.
    """

    def add(kind: str, inputs: List[str], name: str, *others: str, **arguments: object) -> str:
        outputs = ["{}_{}".format(prefix, own) for own in (name, *others)]
        operators.append(operator_beside(kind, inputs, outputs, beside, **arguments))
        return outputs[0]

    operators: Operators = []
    row = add("Slice", [add("Shape", [like], "shape")], "shape_of_row", starts=[1], ends=[-1])
    count = add("Shape", [add("FlattenToVec", [str(gradient.indices)], "counted")], "count")
    shape = add("Concat", [count, row], "shape_of_rows", "shape_of_rows_sizes", axis=0)
    # Caffe2 may give both other names, where they are parts of a sum; so nothing else reads them here.
    indices = add("FlattenToVec", [str(gradient.indices)], "rows")
    values = add("Reshape", [str(gradient.values), shape], "values_of_rows", "values_of_rows_before")
    return operators, core.GradientSlice(indices=indices, values=values)


def dense_operators(gradient: core.GradientSlice, like: str, target: str, beside: caffe2_pb2.OperatorDef) -> Operators:
    """`target`, of the shape of `like`, is the sum of the values in each row."""
    operators, rows = flat(gradient, like, target, beside)
    return [*operators, operator_beside("SparseToDense", [rows.indices, rows.values, like], [target], beside)]
