"""What the steps of a loop take for lengths: numbers of steps, or of what there is to attend to."""

from typing import Dict, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import integer, string
from caffe2_recurrent.operators import LENGTHS_INPUT


def lengths_of(loop: Loop) -> Dict[str, bool]:
    """The blobs that operators of its steps take for lengths, and whether they are those of its own sequences."""
    found: Dict[str, bool] = {}
    for operator in loop.operators:
        if operator.type in LENGTHS_INPUT and integer(operator, "sequence_lengths", 1):
            found[operator.input[LENGTHS_INPUT[operator.type]]] = True
            continue
        lengths = lengths_of_mask(operator)
        if lengths is not None:
            found.setdefault(lengths, False)
    return found


def lengths_of_mask(operator: caffe2_pb2.OperatorDef) -> Optional[str]:
    """The blob with a length for each row that it masks; None if it is no such mask."""
    is_one = operator.type == "SequenceMask" and string(operator, "mode", "") == "sequence"
    return operator.input[1] if is_one else None
