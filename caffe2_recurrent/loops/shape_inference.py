"""The shapes of what several operators make, one after the other.

Of a fill whose shape is the content of a blob Caffe2 infers nothing, as it follows shapes and no numbers. Sizes that
operators take from shapes and put together are followed here.
"""

import functools
from typing import Dict, Iterable, Mapping, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.caffe2_inference import EXTRA, FROM_INPUT, infer
from caffe2_recurrent.loops.known_shapes import Shape
from caffe2_recurrent.operator_arguments import integer, integers, remove_arguments, set_arguments
from caffe2_recurrent.operators import copied, is_on_onednn

NOTHING: Mapping[str, Shape] = {}


class Inference:
    """The `shapes` of blobs behind the operators that have been followed, as far as they are known; and `contents` of
    those that hold sizes in a row.

    What was `given` holds until an operator makes the blob another shape; what is but `known` at first, until one
    writes to it.
    """

    def __init__(self, given: Mapping[str, Shape], known: Mapping[str, Shape] = NOTHING) -> None:
        self.shapes: Dict[str, Shape] = {**known, **given}
        self._given = frozenset(given)
        self.contents: Dict[str, Sequence[int]] = {}

    def follow(self, operators: Iterable[caffe2_pb2.OperatorDef]) -> None:
        for operator in operators:
            known = {blob: self.shapes[blob] for blob in operator.input if blob in self.shapes}
            contents, made = self.contents_of(operator), self._made(self.with_contents(operator), known)
            for blob in operator.output:
                self.contents.pop(blob, None)
                if blob not in self._given:
                    self.shapes.pop(blob, None)
            self.contents.update(contents)
            self.shapes.update(made)

    def with_contents(self, operator: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
        """The operator, if it makes the shape that a blob holds, with what that is known to hold in its place."""
        if operator.input and integer(operator, FROM_INPUT, 0):
            rest, sizes = operator.input[1:], self.contents.get(operator.input[0])
        elif operator.type == "Reshape" and len(operator.input) > 1:
            rest, sizes = operator.input[:1], self.contents.get(operator.input[1])
        else:
            return operator
        if sizes is None:
            return operator
        made = copied(operator)
        made.input[:] = rest
        set_arguments(made, {"shape": [*sizes, *integers(operator, EXTRA)]})
        remove_arguments(made, [FROM_INPUT, EXTRA])
        return made

    def _made(self, operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape]) -> Mapping[str, Shape]:
        if is_on_onednn(operator):
            return {}
        if operator.type == "Transpose" and operator.input[0] in known:
            # Of which older Caffe2s say nothing, but that its axes were invalid.
            shape = known[operator.input[0]]
            axes = integers(operator, "axes") or list(range(len(shape)))[::-1]
            return {operator.output[0]: _taken(shape, axes)} if sorted(axes) == list(range(len(shape))) else {}
        return _inferred(operator.SerializeToString(), tuple(known.items()))

    def contents_of(self, operator: caffe2_pb2.OperatorDef) -> Mapping[str, Sequence[int]]:
        """What an output holds, if it is sizes in a row."""
        content = self._content(operator)
        if content is not None:
            return {operator.output[0]: content}
        if operator.type == "Reshape" and len(operator.output) > 1 and operator.input[0] in self.shapes:
            return {operator.output[1]: self.shapes[operator.input[0]]}
        return {}

    def _content(self, operator: caffe2_pb2.OperatorDef) -> Optional[Sequence[int]]:
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
