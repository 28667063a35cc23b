"""Memory for all rows of a sequence or a state of steps that are written out, which stays from run to run.

    X split into rows;  steps;  values of a state, from rows

    =>  once:      memory for X and for the state, and views of their rows, by the names that these have
        each run:  X copied there;  steps;  the memory shown as the values

Where oneDNN has the sequence in memory that stays (`fixed_rows.py`) the views are of that, and nothing is copied.
Operators write to a row in its place, as they do to a slice that a link shows. For that a row has to be as large in
each run: there are as many steps and sequences, weights stay, and of which shape it is written is known.

Source: narrow of ATen, which gives a view.
"""

from typing import Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import RowMemory
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import ATEN


def of_vectors(loop: Loop, sequence: str, rows: Sequence[str], size: int) -> RowMemory:
    """Memory in front of the loop for the rows of a sequence, each `[size]`."""
    zeros = loop.add_before("ConstantFill", [], sequence + "_no_bias", shape=[size], value=0.0)
    return RowMemory(_add(loop, sequence, rows, [size]), zeros)


def of_product(loop: Loop, sequence: str, rows: Sequence[str], size: int, memory: str) -> RowMemory:
    """Likewise, in `memory`, which has the sequence already."""
    flat = loop.add_before(ATEN, [memory], sequence + "_rows_memory", operator="flatten", start_dim=0, end_dim=-1)
    _add_views(loop, flat, rows, size)
    return RowMemory(flat, is_full=True)


def of_values(loop: Loop, states: str, rows: Sequence[str], size: int) -> RowMemory:
    """Likewise, for the values of a state, each `[1, 1, size]`."""
    return RowMemory(_add(loop, states, rows, [1, 1, size]))


def filled(loop: Loop, memory: RowMemory, blob: str, bias: Optional[str]) -> caffe2_pb2.OperatorDef:
    """What puts a sequence there, with a bias added to each row, if there is one.

    Unlike Copy it refuses rows of another size, and what is not of floats. Either would be put into memory of its own.
    """
    return new_operator("Add", [blob, bias or memory.zeros], [memory.blob], loop.forward, broadcast=1)


def shown(loop: Loop, memory: RowMemory, blob: str) -> caffe2_pb2.OperatorDef:
    """What shows the values of a state there as `blob`."""
    return new_operator("Alias", [memory.blob], [blob], loop.forward)


def _add(loop: Loop, name: str, rows: Sequence[str], shape: Sequence[int]) -> str:
    length, *others = shape
    memory = loop.new_blob(name + "_rows_memory")
    elements = [len(rows) * length, *others]
    loop.before.append(new_operator("ConstantFill", [], [memory], loop.forward, shape=elements, value=0.0))
    _add_views(loop, memory, rows, length)
    return memory


def _add_views(loop: Loop, memory: str, rows: Sequence[str], length: int) -> None:
    for position, row in enumerate(rows):
        view = {"operator": "narrow", "dim": 0, "start": position * length, "length": length}
        loop.before.append(new_operator(ATEN, [memory], [row], loop.forward, **view))
