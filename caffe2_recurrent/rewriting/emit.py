"""Writing lists of step operators: one call an operator, results named after what they hold."""

from typing import Any, List, Sequence

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import string
from caffe2_recurrent.operators import new_operator

ATEN = "ATen"


def aten_is_missing() -> bool:
    """Whether this Caffe2 was built without the operator that runs ATen's vectorised kernels."""
    return not core.IsOperator(ATEN)


def is_aten(operator: caffe2_pb2.OperatorDef, kind: str) -> bool:
    """Whether it is ATen's operator `kind`."""
    return operator.type == ATEN and string(operator, "operator", "") == kind


class Emitter:
    """Collects operators beside `beside`; new blobs get names of the loop `loop` that start with `stem`."""

    def __init__(self, loop: Loop, beside: caffe2_pb2.OperatorDef, stem: str) -> None:
        self.operators: List[caffe2_pb2.OperatorDef] = []
        self.made: List[str] = []
        self.beside, self.loop = beside, loop
        self._stem = stem

    def blob(self, name: str) -> str:
        """A new blob of the step."""
        self.made.append(self.loop.new_blob("{}_{}".format(self._stem, name)))
        return self.made[-1]

    def add(self, kind: str, inputs: Sequence[str], output: str, **arguments: Any) -> str:
        """`output = kind(inputs)`, into a blob that exists."""
        self.operators.append(new_operator(kind, inputs, [output], self.beside, **arguments))
        return output

    def new(self, kind: str, inputs: Sequence[str], name: str, **arguments: Any) -> str:
        """`kind(inputs)` into a new blob."""
        return self.add(kind, inputs, self.blob(name), **arguments)

    def aten(self, kind: str, inputs: Sequence[str], name: str, **arguments: Any) -> str:
        """ATen's operator `kind`; its output is a tensor of its own, so it cannot be a linked blob."""
        return self.new(ATEN, inputs, name, operator=kind, **arguments)

    def reshaped(self, blob: str, name: str, shape: Sequence[int]) -> str:
        """A copy in another shape."""
        outputs = [self.blob(name), self.blob("old_shape")]
        self.operators.append(new_operator("Reshape", [blob], outputs, self.beside, shape=shape))
        return outputs[0]

    def reshape_in_place(self, blob: str, shape: Sequence[int]) -> None:
        outputs = [blob, self.blob("old_shape")]
        self.operators.append(new_operator("Reshape", [blob], outputs, self.beside, shape=shape))

    def reshape_in_place_like(self, blob: str, shape: str) -> None:
        """To the shape that the blob `shape` says."""
        self.operators.append(new_operator("Reshape", [blob, shape], [blob, self.blob("old_shape")], self.beside))

    def split(self, blob: str, names: Sequence[str], axis: int, **widths: Any) -> List[str]:
        """In equal parts, or in those of `split=`."""
        return self.split_into(blob, [self.blob(name) for name in names], axis, **widths)

    def split_into(self, blob: str, outputs: List[str], axis: int, **widths: Any) -> List[str]:
        """Likewise, into blobs that exist."""
        self.operators.append(new_operator("Split", [blob], outputs, self.beside, axis=axis, **widths))
        return outputs

    def concat(self, inputs: Sequence[str], name: str, axis: int) -> str:
        outputs = [self.blob(name), self.blob(name + "_sizes")]
        self.operators.append(new_operator("Concat", inputs, outputs, self.beside, axis=axis))
        return outputs[0]

    def column_of_ones(self, blob: str, axis: int) -> str:
        """A 1 for each row of `blob`, whose rows start at `axis`: of its first dimensions and another of 1."""
        one = self.new("GivenTensorInt64Fill", [], "one", shape=[1], values=[1])
        leading = self.new("Shape", [blob], "leading", axes=list(range(axis)))
        shape = self.concat([leading, one], "shape_of_ones", 0)
        return self.new("ConstantFill", [shape], "ones", input_as_shape=1, value=1.0)
