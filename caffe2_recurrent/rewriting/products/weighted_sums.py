"""Products as weighted sums of rows.

The operator that pools embeddings has code that is made for the width of a row when it first runs, with AVX2 or
AVX-512 on processors of any maker; and it starts faster than a product does.

    Y[m, :] = sum over r of A[m, r] B[r, :]

is SparseLengthsWeightedSum(B, weights, indices, lengths): the weights are A's elements, row by row, and for each m the
indices are 0 to R - 1 and the length is R. It runs in one thread, and reads all of B for each m.

That code leaves the upper halves of the vector registers in use. What has been compiled for SSE then has to keep them,
as MKL's products do on processors of AMD, and takes up to five times as long, until something clears them. A thread
that is started in the meantime has them from its parent. So another operator of FBGEMM's follows whose code is compiled
for AVX2, and clears them: one that makes floats into halves, eight or more at a time.

Source: caffe2/operators/lengths_reducer_ops.h and half_float_ops.cc, EmbeddingSpMDM.cc and FbgemmFloat16ConvertAvx2.cc
of FBGEMM.
"""

from typing import NamedTuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.rewriting.emit import Emitter, aten_is_missing

KIND = "SparseLengthsWeightedSum"
# What clears the registers, of so many floats.
CLEARING, FLOATS = "FloatToHalf", 16
INT32 = caffe2_pb2.TensorProto.INT32


class Sums(NamedTuple):
    """A as the operator has it; any B with as many rows as A has columns goes with it."""

    weights: str
    indices: str
    lengths: str


def are_missing() -> bool:
    return aten_is_missing() or not core.IsOperator(CLEARING)


def by_columns(emitter: Emitter, blob: str, axis: int, columns: int) -> Sums:
    """A is the transpose of `blob`, which has so many columns, and whose rows start at `axis`."""
    transposed = emitter.aten("permute", [blob], "columns", dims=[axis, *range(axis)])
    emitter.reshape_in_place(transposed, [-1])
    number = emitter.new("Size", [_column(emitter, blob, axis, 0)], "number_of_rows")
    rows = emitter.new("Cast", [number], "rows_of_all", to=INT32)
    emitter.reshape_in_place(rows, [1])
    return _sums(emitter, transposed, emitter.new("Tile", [rows], "lengths", tiles=columns, axis=0))


def by_rows(emitter: Emitter, blob: str, axis: int, columns: int) -> Sums:
    """A is `blob`, which has so many columns, and whose rows start at `axis`."""
    weights = emitter.reshaped(blob, "elements", [-1])
    lengths = _column(emitter, blob, axis, columns)
    emitter.reshape_in_place(lengths, [-1])
    return _sums(emitter, weights, lengths)


def emit(emitter: Emitter, sums: Sums, rows: str, output: str) -> None:
    """`output = A rows`."""
    floats = emitter.new("ConstantFill", [], "floats", shape=[FLOATS], value=0.0)
    emitter.add(KIND, [rows, sums.weights, sums.indices, sums.lengths], output)
    emitter.new(CLEARING, [floats], "to_clear_registers")


def _column(emitter: Emitter, blob: str, axis: int, value: int) -> str:
    """`value` for each row of `blob`, in the shape of its first dimensions."""
    leading = emitter.new("Shape", [blob], "leading", axes=list(range(axis)))
    return emitter.new("ConstantFill", [leading], "of_rows", input_as_shape=1, value=value, dtype=INT32)


def _sums(emitter: Emitter, weights: str, lengths: str) -> Sums:
    return Sums(weights, emitter.new("LengthsRangeFill", [lengths], "indices"), lengths)
