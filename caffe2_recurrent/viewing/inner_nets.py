"""What is known of the blobs that an If computes, as if its net had run; `optimize` makes such nets for oneDNN.

These compute shapes as well, from those of other blobs and numbers; that is followed.
"""

from typing import Dict, Mapping, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.shape_inference import Inference
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
    before = Inference({blob: known[blob].shape for blob in operator.input if blob in known})
    before.contents = numbers
    with_numbers, contents = before.with_contents(operator), before.contents_of(operator)
    for blob in operator.output:
        # What it held before is gone.
        numbers.pop(blob, None)
    numbers.update(contents)
    return infer(with_numbers, [known.get(blob) for blob in with_numbers.input])
