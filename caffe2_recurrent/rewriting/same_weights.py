"""Whether weights are equal to copies of them, with as little reading as that takes.

    is_different  =  not all of  is_same_size(W, copy)  and  equal(b, copy)
                     or  sum over rows of |W - copy|  is not 0

ATen's `equal` compares number by number. Caffe2's distance of the rows of two matrices takes a quarter of that with one
thread, and takes no matrices of different shapes. Where a weight is no number, its distance is none either, so that it
is different, as with `equal`; infinity is different from itself, too. It takes float32 alone.

Source: L1DistanceOp in caffe2/operators/distance_op.cc.
"""

from typing import Dict, List, Mapping, Optional, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Shape
from caffe2_recurrent.operators import new_operator, read_before_written
from caffe2_recurrent.rewriting.emit import ATEN

EQUAL, DISTANCE = "equal", "L1Distance"
ONE_OF = "IsMemberOf"
# Of less `equal` takes a microsecond or two.
LARGE, LONG_ROW = 4096, 16

Operators = List[caffe2_pb2.OperatorDef]


def way(weight: str, shape: Optional[Shape]) -> str:
    """How a weight is to be compared. What its numbers are is seen in the workspace, if it is there."""
    is_large = shape is not None and len(shape) > 1 and np.prod(shape) >= max(LARGE, LONG_ROW * shape[0])
    return DISTANCE if is_large and workspace_blobs.kind(weight) == np.float32 else EQUAL


def compare(loop: Loop, ways: Mapping[str, str], copies: Mapping[str, str], result: str) -> Operators:
    """Operators that say in `result`, a bool, whether a weight is not equal to its copy."""
    first = {EQUAL: "equal", DISTANCE: "is_same_size"}
    seen: Dict[str, str] = {weight: loop.new_blob(copy + "_is_equal") for weight, copy in copies.items()}
    made = [
        operator_of(loop, ATEN, [weight, copies[weight]], [blob], operator=first[ways[weight]])
        for weight, blob in seen.items()
    ]
    equal, *others = seen.values()
    for other in others:
        product = loop.new_blob("weights_equal")
        made.append(operator_of(loop, "Mul", [equal, other], [product]))
        equal = product
    far = [weight for weight in copies if ways[weight] == DISTANCE]
    if not far:
        return [*made, is_one_of(loop, equal, 0, result)]
    condition = loop.new_blob("weights_fit")
    pairs = {weight: copies[weight] for weight in far}
    true = {"shape": [1], "value": True, "dtype": core.DataType.BOOL}
    nets = {
        "then_net": net_of("distances", _distances(loop, pairs, result)),
        "else_net": net_of("others", [operator_of(loop, "ConstantFill", [], [result], **true)]),
    }
    inputs = [condition, *pairs, *pairs.values()]
    return [*made, is_one_of(loop, equal, 1, condition), operator_of(loop, "If", inputs, [result], **nets)]


def is_one_of(loop: Loop, blob: str, value: int, result: str) -> caffe2_pb2.OperatorDef:
    """Whether whole numbers in `blob` are `value`, as bools, of which an `If` wants one."""
    return operator_of(loop, ONE_OF, [blob], [result], value=[value], dtype=core.DataType.INT64)


def _distances(loop: Loop, pairs: Mapping[str, str], result: str) -> Operators:
    """Whether the distance of any pair is not 0: as a bool, what is no number is true."""
    distances = [loop.new_blob(copy + "_distance") for copy in pairs.values()]
    made = [operator_of(loop, DISTANCE, list(pair), [of]) for pair, of in zip(pairs.items(), distances)]
    rows, sizes, distance = (loop.new_blob("weights_" + name) for name in ("distances", "distances_sizes", "distance"))
    if len(distances) > 1:
        made.append(operator_of(loop, "Concat", distances, [rows, sizes], axis=0))
    made.append(operator_of(loop, "SumElements", [rows if len(distances) > 1 else distances[0]], [distance]))
    made.append(operator_of(loop, "Cast", [distance], [result], to=core.DataType.BOOL))
    return made


def operator_of(
    loop: Loop, kind: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: object
) -> caffe2_pb2.OperatorDef:
    return new_operator(kind, inputs, outputs, loop.forward, **arguments)


def net_of(name: str, operators: Operators) -> caffe2_pb2.NetDef:
    """A net for an `If`."""
    return caffe2_pb2.NetDef(name=name, type="simple", op=operators, external_input=read_before_written(operators))
