"""What is known of the blobs that an If computes, as if its net had run; `optimize` makes such nets for oneDNN.

These compute shapes as well, from those of other blobs and numbers; that is followed.
"""

from typing import Dict, Mapping, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.shape_inference import Inference
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.viewing.tensors import Tensor, infer

Numbers = Dict[str, Sequence[int]]


def infer_if(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Tensor], numbers: Numbers) -> Dict[int, Tensor]:
    """The outputs of an If, by position, as far as they follow from `known`; `numbers` as in `infer_counting`."""
    found = dict(known)
    for inner in net_argument(operator, "then_net").op:
        outputs = (infer_if if inner.type == "If" else infer_counting)(inner, found, numbers)
        for position, blob in enumerate(inner.output):
            found.pop(blob, None)
            if position in outputs:
                found[blob] = outputs[position]
    return {position: found[blob] for position, blob in enumerate(operator.output) if blob in found}


def infer_counting(
    operator: caffe2_pb2.OperatorDef, known: Mapping[str, Tensor], numbers: Numbers
) -> Dict[int, Tensor]:
    """The outputs of an operator, by position. `numbers`, of which shapes are computed, gets those that it makes."""
    outputs = _of_computed_shape(operator, known, numbers)
    if outputs is None:
        outputs = infer(operator, [known.get(blob) for blob in operator.input])
    _count(operator, known, numbers)
    return outputs


def _count(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Tensor], numbers: Numbers) -> None:
    """Notes the numbers that an operator puts into its first output; what its outputs had before is gone."""
    before = Inference({blob: known[blob].shape for blob in operator.input if blob in known})
    before.contents = numbers
    content = before.content(operator)
    for blob in operator.output:
        numbers.pop(blob, None)
    if content is not None:
        numbers[operator.output[0]] = content


def _of_computed_shape(
    operator: caffe2_pb2.OperatorDef, known: Mapping[str, Tensor], numbers: Numbers
) -> Optional[Dict[int, Tensor]]:
    """The output of a Reshape or ConstantFill to a shape that has been computed."""
    if operator.type == "ConstantFill" and integer(operator, "input_as_shape", 0):
        shape = numbers.get(operator.input[0])
        return {} if shape is None else {0: Tensor(tuple(shape), np.dtype(np.float32))}
    if operator.type != "Reshape" or len(operator.input) == 1:
        return None
    before, shape = known.get(operator.input[0]), numbers.get(operator.input[1])
    if before is None or shape is None:
        return {}
    old_shape = Tensor((len(before.shape),), np.dtype(np.int64))
    return {0: Tensor(tuple(shape), before.kind), 1: old_shape}
