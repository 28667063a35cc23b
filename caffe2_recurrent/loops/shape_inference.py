"""The shapes of what several operators make, one after the other.

Of a fill whose shape is the content of a blob Caffe2 infers nothing, as it follows shapes and no numbers. Sizes that
operators take from shapes and put together are followed here.
"""

import functools
from typing import Dict, Iterable, Mapping, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.caffe2_inference import infer
from caffe2_recurrent.loops.known_shapes import Shape
from caffe2_recurrent.operator_arguments import integer, integers
from caffe2_recurrent.operators import is_on_onednn


class Inference:
    """The `shapes` of blobs behind the operators that have been followed, as far as they are known; and `contents` of
    those that hold sizes in a row.

    What was `given` holds until an operator makes the blob another shape.
    """

    def __init__(self, given: Mapping[str, Shape]) -> None:
        self.shapes: Dict[str, Shape] = dict(given)
        self._given = frozenset(given)
        self.contents: Dict[str, Sequence[int]] = {}

    def follow(self, operators: Iterable[caffe2_pb2.OperatorDef]) -> None:
        for operator in operators:
            known = {blob: self.shapes[blob] for blob in operator.input if blob in self.shapes}
            content, made = self.content(operator), self._made(operator, known)
            for blob in operator.output:
                self.contents.pop(blob, None)
                if blob not in self._given:
                    self.shapes.pop(blob, None)
            if content is not None:
                self.contents[operator.output[0]] = content
            self.shapes.update(made)

    def _made(self, operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape]) -> Mapping[str, Shape]:
        if is_on_onednn(operator):
            return {}
        if operator.input and integer(operator, "input_as_shape", 0):
            shape = self.contents.get(operator.input[0])
            return {} if shape is None else {operator.output[0]: (*shape, *integers(operator, "extra_shape"))}
        if operator.type == "Transpose" and operator.input[0] in known:
            # Of which older Caffe2s say nothing, but that its axes were invalid.
            shape = known[operator.input[0]]
            axes = integers(operator, "axes") or list(range(len(shape)))[::-1]
            return {operator.output[0]: _taken(shape, axes)} if sorted(axes) == list(range(len(shape))) else {}
        return _inferred(operator.SerializeToString(), tuple(known.items()))

    def content(self, operator: caffe2_pb2.OperatorDef) -> Optional[Sequence[int]]:
        """What the first output holds, if it is sizes in a row."""
        if operator.type == "GivenTensorInt64Fill" and not operator.input and len(integers(operator, "shape")) == 1:
            return integers(operator, "values")
        if operator.type == "Shape" and operator.input[0] in self.shapes:
            shape = self.shapes[operator.input[0]]
            axes = integers(operator, "axes") or range(len(shape))
            return _taken(shape, axes) if len(shape) > max(axes, default=-1) else None
        if operator.type == "Concat" and all(blob in self.contents for blob in operator.input):
            return [size for blob in operator.input for size in self.contents[blob]]
        return None


def _taken(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(shape[axis] for axis in axes)


@functools.lru_cache(maxsize=4096)
def _inferred(operator: bytes, known: Tuple[Tuple[str, Shape], ...]) -> Mapping[str, Shape]:
    """Rules ask for the same again and again, which took a quarter of the time to apply them."""
    found, _ = infer(caffe2_pb2.OperatorDef.FromString(operator), dict(known))
    return {blob: shape for blob, shape in found.items() if shape}
