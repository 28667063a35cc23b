"""Which loop of a net a caller means."""

import itertools
from typing import Any, Iterator, Optional, Sequence, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import Blob, is_blob, is_integer, known_name
from caffe2_recurrent.loops.loop import Loop, is_in_parts, stands_for_loop
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.nets import read_net
from caffe2_recurrent.operator_arguments import nets_of
from caffe2_recurrent.operators import LOOPS, OPERATOR
from caffe2_recurrent.problems import Problems, given, names

AnyLoop = Union[None, int, Blob]


def choose_loop(net: Any, loop: Any, types: Problems, values: Problems) -> Loop:
    """The loop of `net` at position `loop`, with the output `loop`, or, if that is None, the only one.

    Raises `TypeError` with all of `types`, or `ValueError` with all of `values`, if there is no such loop.
    """
    proto = read_net("net", net, types)
    check_loop(loop, types)
    types.raise_if_any(TypeError)
    assert proto is not None
    loops = list(read_loops(proto).values())
    outputs = [found.outputs for found in loops]
    position: Optional[int] = None
    if not loops:
        note_no_loops("net '{}'".format(proto.name), proto, values)
    elif loop is None and len(loops) > 1:
        values.add("net '{}' has {} loops; say which one by loop=: {}", proto.name, len(loops), _listed(outputs))
    else:
        position = find_loop("net '{}'".format(proto.name), outputs, 0 if loop is None else loop, values)
    if position is None:
        values.raise_if_any()
    assert position is not None
    return loops[position]


def note_no_loops(
    name: str,
    net: caffe2_pb2.NetDef,
    values: Problems,
    advice: Optional[str] = None,
) -> None:
    """Note why there are none, and with `advice` what to do where that is because steps are written out, or the batch
    is in parts."""
    if any(map(is_in_parts, net.op)):
        values.add("{} has its batch in parts; {}", name, advice or "optimize it without `batch_parts`")
    elif any(map(stands_for_loop, net.op)):
        values.add("{} has its steps written out; {}", name, advice or "optimize it without the rule 'unrolled_steps'")
    else:
        found = dict.fromkeys(operator.type for operator in net.op)
        others = "its operators are " + names(found) if found else "it has no operators"
        inside = list(dict.fromkeys(_nets_with_loops(net)))
        if inside:
            others += ", and one is in a net that these are given; pass that net: " + ", ".join(inside)
        values.add("{} has no {} operator; {}", name, OPERATOR, others)


def _nets_with_loops(net: caffe2_pb2.NetDef) -> Iterator[str]:
    """Nets that have one among those that operators are given, and theirs, and whose they are; steps of loops do not
    count."""
    for operator in net.op:
        for inner in nets_of(operator) if operator.type not in LOOPS else ():
            if any(found.type == OPERATOR for found in inner.op):
                yield "'{}' of {}".format(inner.name, operator.type)
            yield from _nets_with_loops(inner)


def check_loop(loop: Any, types: Problems) -> None:
    if not (loop is None or is_integer(loop) or is_blob(loop)):
        types.add("loop must be a position, an output of the loop, or None; got {}", given(loop))


def find_loop(name: str, outputs: Sequence[Sequence[str]], loop: Union[int, Blob], values: Problems) -> Optional[int]:
    """Which of the loops with these `outputs` is at position `loop` or has the output `loop`; notes if none is."""
    if is_integer(loop):
        found = [position for position in range(len(outputs)) if position == loop]
    else:
        wanted = known_name(loop, set(itertools.chain.from_iterable(outputs)))
        found = [position for position, blobs in enumerate(outputs) if wanted in blobs]
    if not found:
        shown = str(loop) if is_integer(loop) else "with the output '{}'".format(loop)
        values.add("{} has no loop {}; it has {}", name, shown, _listed(outputs))
    return found[0] if found else None


def _listed(outputs: Sequence[Sequence[str]]) -> str:
    return ", ".join("{} ('{}')".format(position, blobs[0]) for position, blobs in enumerate(outputs))
