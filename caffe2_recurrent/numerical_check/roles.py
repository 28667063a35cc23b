"""What the inputs of a net are to its loops."""

from typing import Dict, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.operators import read_before_written

INPUT = "input"


def read_inputs(net: caffe2_pb2.NetDef) -> Tuple[str, ...]:
    """The blobs that must be there before the net runs, in the order in which it reads them."""
    # The engine makes the states; an operator may read one by name all the same.
    made = {state.outer_states for loop in read_loops(net).values() for state in loop.states}
    return tuple(blob for blob in read_before_written(net.op) if blob not in made)


def read_roles(net: caffe2_pb2.NetDef) -> Dict[str, str]:
    """'sequence', 'initial state' or 'reference' for the blobs that loops read; the rest are inputs."""
    roles: Dict[str, str] = {}
    for loop in read_loops(net).values():
        roles.update(_roles(loop))
    return roles


def _roles(loop: Loop) -> Dict[str, str]:
    linked = {link.outer for link in loop.links}
    roles = dict.fromkeys(loop.inputs, "reference")
    roles.update({blob: "sequence" for blob in loop.inputs if blob in linked})
    roles.update({state.outer_initial: "initial state" for state in loop.states})
    return roles
