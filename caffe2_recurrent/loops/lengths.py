"""What the steps of a loop take for lengths: numbers of steps, or of what there is to attend to."""

from typing import Dict

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import integer, string
from caffe2_recurrent.operators import LENGTHS_INPUT


def lengths_of(loop: Loop) -> Dict[str, bool]:
    """The blobs that operators of its steps take for lengths, and whether they are those of its own sequences."""
    found: Dict[str, bool] = {}
    for operator in loop.operators:
        if operator.type in LENGTHS_INPUT and integer(operator, "sequence_lengths", 1):
            found[operator.input[LENGTHS_INPUT[operator.type]]] = True
        elif operator.type == "SequenceMask" and string(operator, "mode", "") == "sequence":
            found.setdefault(operator.input[1], False)
    return found
