"""Operators of a step whose results are overwritten before anything reads them: there is no need to run them.

Rules make some, by taking away who has read. The RNN executor keeps who writes in order with who reads, but not with
who writes next, which might then be first.
"""

from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operators import is_written_next


def remove(loop: Loop) -> bool:
    """Whether there were any."""
    found = False
    for operators in loop.steps:
        # What one of them alone has read is read by nobody once it is gone.
        for position in reversed(range(len(operators))):
            outputs = operators[position].output
            if outputs and all(is_written_next(operators[position + 1 :], blob) for blob in outputs):
                del operators[position]
                found = True
    return found
