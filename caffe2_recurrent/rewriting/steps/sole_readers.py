"""Operators that take a result over from the one that makes it: nothing else needs that, and they may run sooner."""

from typing import List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.rewriting.steps.addends import is_needed

Operators = List[caffe2_pb2.OperatorDef]


def sole_reader(loop: Loop, operators: Operators, position: int) -> Optional[int]:
    """Where the only reader of the result at `position` is, if it might as well be right behind it; None otherwise.

    That goes for the forward step: of the backward step it is not known who needs its results.
    """
    result = operators[position].output[0]
    reading = dataflow.readers(operators, result, position)
    if operators is not loop.operators or len(reading) != 1:
        return None
    (found,) = reading
    reader = operators[found]
    if result not in reader.output and is_needed(loop, result):
        return None
    others = [blob for blob in reader.input if blob != result]
    for between in operators[position + 1 : found]:
        if not set(reader.output).isdisjoint([*between.input, *between.output]):
            return None
        if not set(others).isdisjoint(between.output):
            return None
    return found


def drop_reader(loop: Loop, operators: Operators, position: int, found: int) -> caffe2_pb2.OperatorDef:
    """The sole reader at `found`, which is gone from the step; with it its blob goes from those that steps share."""
    result = operators[position].output[0]
    reader = operators.pop(found)
    if result not in reader.output and dataflow.writers(operators, result) == [position]:
        loop.shared[:] = [blob for blob in loop.shared if blob != result]
    return reader
