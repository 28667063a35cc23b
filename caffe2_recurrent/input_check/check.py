"""check_inputs: what the workspace holds for a net, held against what the net and its loops do with it."""

import warnings
from typing import Dict, Iterable, List, Mapping, Optional

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.input_check.fed import Fed, is_there, read_fed
from caffe2_recurrent.input_check.loops import check_loop
from caffe2_recurrent.input_check.operands import check_bias
from caffe2_recurrent.loops.loop import Loop, is_optimised, stands_for_loop
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.selection import note_no_loops
from caffe2_recurrent.loops.shape_checks import FED, check_shapes, columns_of, show
from caffe2_recurrent.loops.sizes import Shape, find_sizes
from caffe2_recurrent.nets import AnyNet, init_net_of, read_net
from caffe2_recurrent.operators import is_on_onednn
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.serving.dependencies import accesses_of, from_outside

OPTIMISED = (
    "check_inputs: net '{}' has been optimised, so that much that does not fit cannot be seen; check it as it was built"
)


def check_inputs(model_or_net: AnyNet) -> None:
    """Name what is in the workspace and does not fit a net with loops, and what is not there.

    The engine finds the same when the net runs, one thing at a time and in its own words. Call it when everything has
    been fed and `param_init_net` has run, before `optimize`: of a loop that has been rewritten less can be said. It
    looks at

    - blobs that the net reads, and nothing has fed or made;
    - sequences: the first one `[T, N, ...]`, with N as the initial states and the lengths have it, and not
      `[N, T, ...]`; others of T steps or more;
    - initial states: `[D]`, `[N, D]` or `[1, N, D]`, with D as the steps have it; where two blobs contradict each other
      about that, both;
    - lengths: int32, N of them, or one for each row of a mask; none of a sequence larger than T;
    - FC: as many columns in inputs and states as in the weight, a bias for each of its rows; all of them float32;
    - what Sum, Add, Sub, Mul, Div, Concat and ElementwiseLinear read in a step, as far as shapes are known and all is
      for N sequences.

    Nothing is run or changed, and nothing is copied but lengths.

    Args:
        model_or_net: a `ModelHelper`, a `core.Net` or a `NetDef` with loops, whoever built them.

    Warns:
        UserWarning: nothing was found, but the net has been optimised, and much cannot be seen.

    Raises:
        TypeError: it is none of these.
        ValueError: all that does not fit, by the names of the blobs.

    Source of what the engine asks for: caffe2/operators/rnn/recurrent_network_op.h, lstm_unit_op.h, gru_unit_op.h and
    boolean_mask_ops.cc in caffe2/operators; and what `operands.py` names.
    """
    types, values = Problems("check_inputs"), Problems("check_inputs")
    net = read_net("model_or_net", model_or_net, types)
    types.raise_if_any(TypeError)
    assert net is not None
    init_net = init_net_of(model_or_net)
    loops = list(read_loops(net).values())
    if not loops and not any(map(stands_for_loop, net.op)):
        note_no_loops("net '{}'".format(net.name), net, values)
        values.raise_if_any()
    states = {state.outer_states for loop in loops for state in loop.states}
    read = [blob for blob in from_outside(accesses_of(net.op)) if blob not in states]
    _check_missing(read, init_net, values)
    fed = {blob: found for blob, found in zip(read, map(read_fed, read)) if found is not None}
    _check_kinds(net, loops, fed, values)
    shapes = {blob: found.shape for blob, found in fed.items()}
    check_shapes(shapes, net, init_net, loops, values, FED)
    _check_biases(net, shapes, values)
    sizes = find_sizes(_without_misfits(net, shapes), init_net, _fitting(net, shapes))
    for loop in loops:
        check_loop(net, loop, sizes, fed, values)
    values.raise_if_any()
    if any(is_optimised(loop.forward) for loop in loops) or any(map(stands_for_loop, net.op)):
        warnings.warn(OPTIMISED.format(net.name), stacklevel=2)


def _check_biases(net: caffe2_pb2.NetDef, shapes: Mapping[str, Shape], values: Problems) -> None:
    shown = {blob: show(blob, shape) for blob, shape in shapes.items()}
    for operator in net.op:
        if operator.type == "FC" and not is_on_onednn(operator):
            check_bias(operator, shapes, shown, values)


def _check_missing(read: Iterable[str], init_net: Optional[caffe2_pb2.NetDef], values: Problems) -> None:
    missing = [blob for blob in read if not is_there(blob)]
    made = {blob for operator in (init_net.op if init_net is not None else ()) for blob in operator.output}
    for blobs, advice in (
        ([blob for blob in missing if blob not in made], "to be fed, or made by another net, before this one runs"),
        ([blob for blob in missing if blob in made], "to be made by param_init_net, so run it"),
    ):
        if blobs:
            values.add("the workspace has no {}; {}", names(blobs), advice)


def _check_kinds(net: caffe2_pb2.NetDef, loops: List[Loop], fed: Mapping[str, Fed], values: Problems) -> None:
    """What is multiplied, and what the engine links, is float32."""
    steps = [operator for loop in loops for operator in loop.operators]
    sequences = [link.outer for loop in loops for link in loop.links if link.outer in loop.inputs]
    floats = [*sequences, *(state.outer_initial for loop in loops for state in loop.states)]
    for operator in [*net.op, *steps]:
        if operator.type == "FC" and not is_on_onednn(operator):
            floats += operator.input
    for blob in dict.fromkeys(floats):
        if blob in fed and fed[blob].kind != np.float32:
            is_whole = blob in sequences and np.issubdtype(fed[blob].kind, np.integer)
            also = ", or look up before the loop what such numbers stand for (Gather)" if is_whole else ""
            values.add(
                "'{}' must be float32; got {}; feed it as value.astype(np.float32){}", blob, fed[blob].kind, also
            )


def _fitting(net: caffe2_pb2.NetDef, shapes: Mapping[str, Shape]) -> Dict[str, Shape]:
    """The shapes, with as many columns as products want; T and N are what they are."""
    fitting = dict(shapes)
    for operator in net.op:
        columns = columns_of(operator, shapes) if operator.type == "FC" else None
        if columns is not None and columns[0] != columns[1]:
            left = operator.input[0]
            fitting[left] = (*shapes[left][:-1], columns[1])
    return fitting


def _without_misfits(net: caffe2_pb2.NetDef, shapes: Mapping[str, Shape]) -> caffe2_pb2.NetDef:
    """Without products of what has too few dimensions: asked for sizes, the engine would print what it makes of it."""
    changed = caffe2_pb2.NetDef()
    changed.CopyFrom(net)
    del changed.op[:]
    for operator in net.op:
        known = operator.type == "FC" and shapes.keys() >= set(operator.input[:2])
        if not known or columns_of(operator, shapes) is not None:
            changed.op.append(operator)
    return changed
