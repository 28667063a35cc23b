"""Which loop of a net a caller means."""

from typing import Any, Dict, Optional, Union

from caffe2_recurrent.arguments import Blob, is_blob, is_integer, outer_name
from caffe2_recurrent.loop import Loop, read_loops
from caffe2_recurrent.nets import read_net
from caffe2_recurrent.problems import Problems, given

AnyLoop = Union[None, int, Blob]


def choose_loop(caller: str, net: Any, loop: Any) -> Loop:
    """The loop of `net` at position `loop`, with the output `loop`, or, if that is None, the only one.

    Raises `TypeError` and `ValueError`, in the name of `caller`.
    """
    types, values = Problems(caller), Problems(caller)
    proto = read_net("net", net, types)
    if not (loop is None or is_integer(loop) or is_blob(loop)):
        types.add("loop must be a position, an output of the loop, or None; got {}", given(loop))
    types.raise_if_any(TypeError)
    assert proto is not None
    loops = dict(enumerate(read_loops(proto).values()))
    found = _find(loops, loop)
    if not loops:
        values.add("net '{}' has no loop: no RecurrentNetwork operator", proto.name)
    elif found is None and loop is None:
        values.add("net '{}' has {} loops; say which one by loop=: {}", proto.name, len(loops), _listed(loops))
    elif found is None:
        values.add("net '{}' has no loop {}; it has {}", proto.name, _shown(loop), _listed(loops))
    values.raise_if_any()
    assert found is not None
    return found


def _find(loops: Dict[int, Loop], loop: Any) -> Optional[Loop]:
    if loop is None:
        return loops[0] if len(loops) == 1 else None
    if is_integer(loop):
        return loops.get(int(loop))
    wanted = (str(loop), outer_name(loop))
    return next((found for name in wanted for found in loops.values() if name in found.outputs), None)


def _shown(loop: Any) -> str:
    return str(loop) if is_integer(loop) else "with the output '{}'".format(loop)


def _listed(loops: Dict[int, Loop]) -> str:
    return ", ".join("{} ('{}')".format(position, loop.name) for position, loop in loops.items())
