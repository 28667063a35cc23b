"""The shapes of a net's blobs, given by the caller or fed: read, and held against what the net does with them."""

from typing import Any, Collection, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.arguments import is_integer, is_iterable
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape, made_by_init_net, shapes_of_inputs
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.problems import Problems, given, names


class Wording(NamedTuple):
    """How errors call a blob, and what they say before several."""

    blob: str
    several: str


GIVEN, FED = Wording("shapes['{}']", "shapes: "), Wording("'{}'", "")


def read_shapes(shapes: Any, problems: Problems) -> Dict[str, Shape]:
    """The caller's `shapes`, checked."""
    if shapes is None:
        return {}
    if not isinstance(shapes, Mapping):
        problems.add("shapes must map blobs to their dimensions, like {{'x': (20, 128, 40)}}; got {}", given(shapes))
        return {}
    read: Dict[str, Shape] = {}
    for blob, shape in shapes.items():
        if not isinstance(blob, (str, core.BlobReference)):
            problems.add("shapes maps blobs or their names; got {}", given(blob))
            continue
        # An iterator can be gone through once.
        sizes = tuple(shape) if is_iterable(shape) and not isinstance(shape, (str, bytes)) else None
        if sizes is None or not all(map(_is_size, sizes)):
            problems.add("shapes['{}'] must be whole numbers from 1 on, like (20, 128, 40); got {}", blob, given(shape))
        else:
            read[str(blob)] = tuple(map(int, sizes))
    return read


def check_shapes(
    shapes: Mapping[str, Shape],
    net: caffe2_pb2.NetDef,
    init_net: Optional[caffe2_pb2.NetDef],
    loops: Sequence[Loop],
    values: Problems,
    wording: Wording = GIVEN,
) -> None:
    """Note what in the caller's `shapes` cannot be meant.

    Names that nothing in the net, or in the steps of its loops, is called by; dimensions that a product of the net
    cannot read; a sequence without steps or without a batch.
    """
    operators = [*net.op, *(operator for loop in loops for step in loop.steps for operator in step)]
    blobs = {blob for operator in operators for blob in [*operator.input, *operator.output]}
    unknown = [blob for blob in shapes if blob not in blobs]
    if unknown:
        written = {blob for operator in net.op for blob in operator.output}
        read = dict.fromkeys(blob for operator in net.op for blob in operator.input if blob not in written)
        values.add("shapes has {}, which no operator reads or writes; the net reads {}", names(unknown), names(read))
    if shapes:
        parameters = made_by_init_net(init_net)
        # What `init_net` makes is there before the net runs, whatever has been left by that name.
        known = {**shapes_of_inputs(net, {}, shapes), **parameters, **shapes}
        for operator in net.op:
            if operator.type == "FC" and shapes.keys() & set(operator.input[:2]):
                _check_product(operator, shapes, known, values, wording)
    # Of others a step reads what there is for it; of the first one the engine takes T and N.
    for loop, sequence in {loop.name: loop.inputs[0] for loop in loops}.items():
        if len(shapes.get(sequence, (1, 1))) < 2:
            text = "{} must be [T, N, ...], as loop '{}' runs over it; got {}"
            values.add(text, wording.blob.format(sequence), loop, shapes[sequence])


def columns_of(operator: caffe2_pb2.OperatorDef, known: Mapping[str, Shape]) -> Optional[Tuple[int, int]]:
    """How many columns the two factors of an FC have; None where one is unknown, or has too few dimensions."""
    axes = _axes(operator)
    if any(len(known.get(blob, ())) < least_dimensions(axis) for blob, axis in axes.items()):
        return None
    left, right = (int(np.prod(known[blob][axes[blob] :])) for blob in operator.input[:2])
    return left, right


def show(blob: str, shape: Shape) -> str:
    return "'{}' {}".format(blob, shape)


def say_columns(columns: Tuple[int, int]) -> str:
    return "{} and {} columns".format(*columns)


def add_misfit(
    operator: caffe2_pb2.OperatorDef, shown: Sequence[str], why: str, values: Problems, wording: Wording
) -> None:
    """Note that what an operator reads, as it is `shown`, does not fit."""
    text = "{}{}, of which {} makes '{}', do not fit: {}"
    values.add(text, wording.several, " and ".join(shown), operator.type, operator.output[0], why)


def check_dimensions(
    operator: caffe2_pb2.OperatorDef,
    blobs: Collection[str],
    known: Mapping[str, Shape],
    values: Problems,
    wording: Wording,
) -> None:
    """Note those factors of an FC among `blobs` that have too few dimensions."""
    for blob, axis in _axes(operator).items():
        if blob in blobs and len(known[blob]) < least_dimensions(axis):
            text = "{} must have {} dimensions or more, as FC makes '{}' of it; got {}"
            values.add(text, wording.blob.format(blob), least_dimensions(axis), operator.output[0], known[blob])


def _axes(operator: caffe2_pb2.OperatorDef) -> Dict[str, int]:
    return {operator.input[0]: integer(operator, "axis", 1), operator.input[1]: integer(operator, "axis_w", 1)}


def least_dimensions(axis: int) -> int:
    """How many dimensions there must be for it."""
    return max(axis + 1, -axis)


def _check_product(
    operator: caffe2_pb2.OperatorDef,
    shapes: Mapping[str, Shape],
    known: Mapping[str, Shape],
    values: Problems,
    wording: Wording,
) -> None:
    check_dimensions(operator, shapes, known, values, wording)
    columns = columns_of(operator, known)
    if columns is not None and columns[0] != columns[1]:
        shown = [show(blob, known[blob]) for blob in operator.input[:2]]
        add_misfit(operator, shown, say_columns(columns), values, wording)


def _is_size(value: Any) -> bool:
    return is_integer(value) and int(value) > 0
