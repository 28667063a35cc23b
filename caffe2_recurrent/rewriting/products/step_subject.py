"""What is to be timed of a loop that stands for another one: a step, as it is run, and what comes before the loop."""

from typing import Iterable, Mapping

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.rewriting import unchanged_weights
from caffe2_recurrent.rewriting.products import kept_filters
from caffe2_recurrent.rewriting.trials.timing import Subject


def subject_of(
    loop: Loop,
    operators: Iterable[caffe2_pb2.OperatorDef],
    shapes: Mapping[str, Shape],
    slices: Iterable[str] = (),
    steps: int = 1,
) -> Subject:
    """`operators` are those of the step. If the loop may keep what is made of weights, that takes no time.

    Where operators that keep filters are made in each run, they are so once, as `one_workspace` has it.
    """
    kept = unchanged_weights.made_of(loop, loop.surroundings.fed) if Keeping.WEIGHTS in loop.may_keep else []
    in_each_run = unchanged_weights.without(loop.before, kept)
    step = kept_filters.in_place(loop, list(operators))
    anew = kept_filters.are_made_anew(loop, in_each_run)
    return Subject(step, shapes, in_each_run, slices=tuple(slices), steps=steps, kept=kept, anew=anew)
