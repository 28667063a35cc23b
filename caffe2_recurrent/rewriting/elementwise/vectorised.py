"""Operators by element, by ATen's vectorised kernels or by Caffe2's own, whichever is faster here.

ATen's tanh is MKL's, which is the fastest on Intel's processors and three times as slow as Caffe2's on one of AMD's.
Caffe2's products are MKL's: after `torch.set_num_threads`, which has MKL use all threads however few the elements are,
ATen's take three quarters of their time for two thousand.
"""

import functools
from typing import Dict, Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operator_arguments import set_arguments
from caffe2_recurrent.operators import SUM
from caffe2_recurrent.rewriting.emit import ATEN, Emitter, aten_is_missing
from caffe2_recurrent.rewriting.trials import trial
from caffe2_recurrent.rewriting.trials.timing import Subject

SIGMOID, TANH, ADD, MULTIPLY = "Sigmoid", "Tanh", "Add", "Mul"
KINDS = (SIGMOID, TANH)
# By which ATen's products must be faster: by less than that, nothing was gained in a step.
GAIN = 1.1
# Operators that a trial of them has in its net, which takes time itself.
IN_A_ROW = 8


def aten_name(kind: str) -> str:
    """What ATen calls the operator that Caffe2 calls `kind`."""
    return kind.lower()


def emit(emitter: Emitter, kind: str, blob: str, name: str, elements: Optional[int]) -> str:
    """`kind(blob)` into a new blob; ATen's if the number of elements is not known."""
    if elements is None or aten_is_faster(kind, elements):
        return emitter.aten(aten_name(kind), [blob], name)
    return emitter.new(kind, [blob], name)


def emit_product(emitter: Emitter, factors: Sequence[str], name: str, elements: Optional[int]) -> str:
    """The product of two blobs of one shape, into a new blob; Caffe2's if the number of elements is not known."""
    if prefers_atens_product(elements):
        return emitter.aten(aten_name(MULTIPLY), factors, name)
    return emitter.new(MULTIPLY, factors, name)


def prefers_atens_product(elements: Optional[int]) -> bool:
    return elements is not None and aten_multiplies_faster(elements)


@trial.remembered
def aten_multiplies_faster(elements: int) -> bool:
    shapes: Dict[str, Shape] = {"x": (elements,), "z": (elements,)}
    return _atens_is_faster(caffe2_pb2.OperatorDef(type=MULTIPLY), aten_name(MULTIPLY), shapes, GAIN, IN_A_ROW)


def prefers_sum_of_three(elements: Optional[int]) -> bool:
    return elements is not None and sum_of_three_is_faster(elements)


@trial.remembered
def sum_of_three_is_faster(elements: int) -> bool:
    """Whether Caffe2's Sum of a blob, the same once more and a third one is faster than to have ATen add twice the blob
    to one number: that is one pass, but takes longer to begin with.
    """
    shapes: Dict[str, Shape] = {"x": (elements,), "z": (elements,), "one": (1,)}
    own = caffe2_pb2.OperatorDef(type=SUM, input=["x", "x", "z"], output=["y"])
    atens = caffe2_pb2.OperatorDef(type=ATEN, input=["one", "x"], output=["y"])
    set_arguments(atens, {"operator": aten_name(ADD), "alpha": 2.0})
    candidates = {
        found.type: functools.partial(Subject, IN_A_ROW * [found], {blob: shapes[blob] for blob in found.input})
        for found in (atens, own)
    }
    found = trial.in_turn(candidates)
    return bool(GAIN * found[SUM].step < found[ATEN].step)


@trial.remembered
def aten_is_faster(kind: str, elements: int) -> bool:
    """Whether ATen's operator takes less time than Caffe2's for so many elements; it is tried out."""
    return _atens_is_faster(caffe2_pb2.OperatorDef(type=kind), aten_name(kind), {"x": (elements,)})


def aten_adds_faster(rows: Optional[int], columns: int) -> bool:
    """Whether ATen's operator is faster than Caffe2's to add numbers `[columns]` to each row."""
    return rows is not None and not aten_is_missing() and _aten_adds_faster(rows, columns)


@trial.remembered
def _aten_adds_faster(rows: int, columns: int) -> bool:
    own = caffe2_pb2.OperatorDef(type=ADD)
    set_arguments(own, {"broadcast": 1})
    return _atens_is_faster(own, aten_name(ADD), {"x": (1, rows, columns), "b": (columns,)})


@trial.remembered
def aten_broadcasts_faster(kind: str, first: Shape, second: Shape) -> bool:
    """Whether ATen's operator is faster than Caffe2's for two blobs of which one is repeated."""
    return _atens_is_faster(caffe2_pb2.OperatorDef(type=kind), aten_name(kind), {"x": first, "z": second}, GAIN)


def _atens_is_faster(
    own: caffe2_pb2.OperatorDef, name: str, shapes: Dict[str, Shape], gain: float = 1.0, times: int = 1
) -> bool:
    atens = caffe2_pb2.OperatorDef(type=ATEN)
    set_arguments(atens, {"operator": name})
    for operator in (own, atens):
        operator.input.extend(shapes)
        operator.output.append("y")
    candidates = {
        name: functools.partial(Subject, times * [found], shapes) for name, found in ((own.type, own), (ATEN, atens))
    }
    found = trial.in_turn(candidates)
    return bool(gain * found[ATEN].step < found[own.type].step)
