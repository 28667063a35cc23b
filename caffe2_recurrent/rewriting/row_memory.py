"""Memory for all rows of a sequence or a state of steps that are written out, which stays from run to run.

    X split into rows;  steps;  values of a state, from rows

    =>  once:      memory for X and for the state, and views of their rows, by the names that these have
        each run:  X copied there;  steps;  the memory shown as the values

Operators write to a row in its place, as they do to a slice that a link shows. For that a row has to be as large in
each run: there are as many steps and sequences, weights stay, and of which shape it is written is known.

Source: narrow of ATen, which gives a view.
"""

from typing import Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import ATEN


def add(loop: Loop, name: str, rows: Sequence[str], shape: Sequence[int]) -> str:
    """Memory in front of the loop, for `rows` of that shape one behind the other; gives its blob."""
    length, *others = shape
    memory = loop.new_blob(name + "_rows_memory")
    elements = [len(rows) * length, *others]
    loop.before.append(new_operator("ConstantFill", [], [memory], loop.forward, shape=elements, value=0.0))
    for position, row in enumerate(rows):
        view = {"operator": "narrow", "dim": 0, "start": position * length, "length": length}
        loop.before.append(new_operator(ATEN, [memory], [row], loop.forward, **view))
    return memory


def filled(loop: Loop, memory: str, blob: str, bias: Optional[str]) -> caffe2_pb2.OperatorDef:
    """What puts a sequence there, with a bias added to each row. Unlike Copy, both refuse what is not of floats."""
    if bias is not None:
        return new_operator("Add", [blob, bias], [memory], loop.forward, broadcast=1)
    return new_operator("Scale", [blob], [memory], loop.forward, scale=1.0)


def shown(loop: Loop, memory: str, blob: str) -> caffe2_pb2.OperatorDef:
    """What shows the values of a state there as `blob`."""
    return new_operator("Alias", [memory], [blob], loop.forward)
