"""Operators that may run more often or less often than they stand in a step."""

from caffe2_recurrent.rewriting.steps.rows import ALONG_FEATURES, BINARY, ELEMENTWISE

# Known to depend on their inputs alone and to change nothing else. Others may take from a queue, count their calls or
# write a file.
REPEATABLE = (
    ELEMENTWISE
    | BINARY
    | ALONG_FEATURES
    | frozenset(
        [
            "Abs",
            "And",
            "BatchMatMul",
            "Cast",
            "Ceil",
            "Clip",
            "Concat",
            "ConstantFill",
            "Cos",
            "DotProduct",
            "EQ",
            "Elu",
            "Exp",
            "ExpandDims",
            "Flatten",
            "FlattenToVec",
            "Floor",
            "GE",
            "GT",
            "Gather",
            "GivenTensorFill",
            "GivenTensorInt64Fill",
            "GivenTensorIntFill",
            "LE",
            "LT",
            "LayerNorm",
            "LeakyRelu",
            "Log",
            "MatMul",
            "Max",
            "Mean",
            "Min",
            "Normalize",
            "Not",
            "OneHot",
            "Or",
            "Pow",
            "ReduceBackMean",
            "ReduceBackSum",
            "ReduceFrontMean",
            "ReduceFrontSum",
            "ReduceMean",
            "ReduceSum",
            "Reshape",
            "Selu",
            "SequenceMask",
            "Shape",
            "Sign",
            "Sin",
            "Slice",
            "Softplus",
            "Softsign",
            "Sqr",
            "Sqrt",
            "Squeeze",
            "SumElements",
            "Tile",
            "Transpose",
            "WeightedSum",
            "Where",
        ]
    )
)
