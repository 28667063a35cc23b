"""Sigmoid and tanh by ATen's vectorised kernels or by Caffe2's own operators, whichever is faster here.

ATen's tanh is MKL's, which is the fastest on Intel's processors and three times as slow as Caffe2's on one of AMD's.
"""

import functools
from typing import Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operator_arguments import set_arguments
from caffe2_recurrent.rewriting import trial
from caffe2_recurrent.rewriting.emit import ATEN, Emitter

SIGMOID, TANH = "Sigmoid", "Tanh"
KINDS = (SIGMOID, TANH)


def aten_name(kind: str) -> str:
    """What ATen calls the operator that Caffe2 calls `kind`."""
    return kind.lower()


def emit(emitter: Emitter, kind: str, blob: str, name: str, elements: Optional[int]) -> str:
    """`kind(blob)` into a new blob; ATen's if the number of elements is not known."""
    if elements is None or aten_is_faster(kind, elements):
        return emitter.aten(aten_name(kind), [blob], name)
    return emitter.new(kind, [blob], name)


@trial.remembered
def aten_is_faster(kind: str, elements: int) -> bool:
    """Whether ATen's operator takes less time than Caffe2's for so many elements; it is tried out."""
    shapes = {"x": (elements,)}
    own = caffe2_pb2.OperatorDef(type=kind, input=["x"], output=["y"])
    atens = caffe2_pb2.OperatorDef(type=ATEN, input=["x"], output=["y"])
    set_arguments(atens, {"operator": aten_name(kind)})
    candidates = {
        name: functools.partial(trial.seconds, [found], shapes) for name, found in ((ATEN, atens), (kind, own))
    }
    found = trial.in_turn(candidates)
    return bool(found[ATEN].step < found[kind].step)
