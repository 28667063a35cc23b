"""A loop and the same loop with its steps written out, timed."""

import functools
from typing import Dict, Iterable, Mapping, Optional, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.gradient_maker import POSITIONS
from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import integer, integers
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting import trial, unrolled
from caffe2_recurrent.rewriting.rows import UNITS
from caffe2_recurrent.rewriting.subjects import Seconds, Subject
from caffe2_recurrent.sizes import Shape, Sizes

# The inputs of units that hold whole numbers, the lengths.
LENGTHS = {"LSTMUnit": 3, "GRUUnit": 2}
AS_IT_IS, UNROLLED = "loop", "unrolled"


def seconds(loop: Loop, candidate: Loop, sizes: Sizes) -> Union[Mapping[str, Seconds], str]:
    """The times of the loop as it is and of `candidate`, with steps written out; or why they cannot be had."""
    before = len(loop.before)
    as_it_is = loop.around_forward()[before:]
    written_out = unrolled.around_forward(candidate)[before:]
    if loop.gradient is not None:
        as_it_is += loop.around_gradient()[:1]
        written_out += unrolled.around_gradient(candidate)[:1]
    known = sizes.made_by(loop.before)
    written = {blob for operator in as_it_is for blob in operator.output}
    wanted = dict.fromkeys(blob for operator in as_it_is for blob in operator.input if blob not in written)
    shapes = _shapes(loop, list(wanted), known)
    if shapes is None:
        return "the shapes of what its steps read are not all known; give shapes"
    one_by_one = bool(integer(loop.forward, ENABLE, 0))
    return _time(_bytes(as_it_is), _bytes(written_out), tuple(shapes.items()), tuple(_lengths(loop)), one_by_one)


def _shapes(loop: Loop, blobs: Iterable[str], known: Mapping[str, Shape]) -> Optional[Dict[str, Shape]]:
    """The shapes of what the operators read; None if one is not known."""
    found = dict(known)
    if loop.gradient is not None:
        initial = {state.outer_states: known.get(state.outer_initial) for state in loop.states}
        steps, batch, *_ = known.get(loop.inputs[0], (0, 0))
        positions = integers(loop.gradient.operator, POSITIONS)
        for blob, alias in zip(loop.gradient.incoming, (loop.aliases[position] for position in positions)):
            shape = initial[alias.outer_states]
            if shape:
                found[blob] = (steps if alias.offset == 1 else 1, batch, shape[-1])
    return {blob: found[blob] for blob in blobs} if all(map(found.__contains__, blobs)) else None


def _lengths(loop: Loop) -> Iterable[str]:
    """Blobs of whole numbers."""
    for operator in loop.operators:
        if operator.type in UNITS and unrolled.needs_step_number(operator):
            yield operator.input[LENGTHS[operator.type]]


def _bytes(operators: Iterable[caffe2_pb2.OperatorDef]) -> bytes:
    return bytes(caffe2_pb2.NetDef(op=operators).SerializeToString())


@trial.remembered
def _time(
    as_it_is: bytes,
    written_out: bytes,
    shapes: Tuple[Tuple[str, Shape], ...],
    lengths: Tuple[str, ...],
    one_by_one: bool,
) -> Union[Mapping[str, Seconds], str]:
    floats = {blob: shape for blob, shape in shapes if blob not in lengths}
    kind = caffe2_pb2.TensorProto.INT32
    whole = [
        new_operator("ConstantFill", [], [blob], caffe2_pb2.OperatorDef(), shape=list(shape), value=1, dtype=kind)
        for blob, shape in shapes
        if blob in lengths
    ]

    def subject(operators: bytes) -> Subject:
        return Subject(caffe2_pb2.NetDef.FromString(operators).op, floats, whole)

    candidates = {AS_IT_IS: as_it_is, UNROLLED: written_out}
    try:
        return trial.in_turn(
            {name: functools.partial(subject, operators) for name, operators in candidates.items()},
            one_by_one=one_by_one,
        )
    except RuntimeError:
        return "its steps cannot be tried with arbitrary numbers"
