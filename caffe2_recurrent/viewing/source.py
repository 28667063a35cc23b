"""The loops of whatever a caller wants to see: a model, a net, or one of a loop's two operators."""

from dataclasses import dataclass
from typing import Any, Collection, Mapping, Optional, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import Blob
from caffe2_recurrent.backward.gradient_maker import POSITIONS, PYTHON_POSITIONS, SEQUENCE_GRADIENTS
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.selection import note_no_loops
from caffe2_recurrent.loops.shape_checks import check_shapes, read_shapes
from caffe2_recurrent.loops.sizes import find_sizes
from caffe2_recurrent.nets import AnyNet, init_net_of, read_net
from caffe2_recurrent.operator_arguments import STATES, integers, remove_arguments, strings
from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR, copied
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.viewing.kept import Memory, read_memory
from caffe2_recurrent.viewing.loop_sizes import LoopSizes, find_loop_sizes, find_outer_tensors
from caffe2_recurrent.viewing.structure import Structure
from caffe2_recurrent.viewing.structure_reading import read_structure

NetOrOperator = Union[AnyNet, caffe2_pb2.OperatorDef]
Shapes = Mapping[Blob, Tuple[int, ...]]


@dataclass(frozen=True)
class SeenLoop:
    """A loop with its sizes and what its steps keep.

    Without a forward operator in what was given (`has_forward`), it is what the gradient operator says of it.
    `backward_pass` is the name of the loop that is its backward pass, if one is.
    """

    has_forward: bool
    structure: Structure
    sizes: LoopSizes
    memory: Memory
    backward_pass: Optional[str]


@dataclass(frozen=True)
class Source:
    """What was given: what it is called, its operators, and its loops."""

    name: str
    net: caffe2_pb2.NetDef
    loops: Tuple[SeenLoop, ...]


def read_source(net_or_op: Any, shapes: Any, types: Problems, values: Problems) -> Source:
    """Notes in `values` what is wrong; raises `TypeError` with all of `types`."""
    name, given_net = _net(net_or_op, types)
    known_shapes = read_shapes(shapes, types)
    types.raise_if_any(TypeError)
    forward = {operator.output[-1] for operator in given_net.op if operator.type == OPERATOR}
    net = _with_forward_operators(given_net, forward)
    loops = read_loops(net)
    if not loops:
        note_no_loops(name, net, values)
        return Source(name, net, ())
    check_shapes(known_shapes, net, init_net_of(net_or_op), list(loops.values()), values)
    if values:
        # The engine, asked for sizes, would print what it makes of them.
        known_shapes = {}
    tensors = find_outer_tensors(net, find_sizes(net, init_net_of(net_or_op), known_shapes))
    blobs_of_net = {blob for operator in net.op for blob in [*operator.input, *operator.output]}
    seen = []
    structures = [read_structure(loop) for loop in loops.values()]
    backward_passes = {found.backward_pass_of: found.name for found in structures if found.backward_pass_of}
    for loop, structure in zip(loops.values(), structures):
        sizes = find_loop_sizes(net, loop, structure, tensors, known_shapes)
        memory = read_memory(structure, sizes, blobs_of_net)
        backward_pass = backward_passes.get(loop.outputs[-1])
        seen.append(SeenLoop(loop.outputs[-1] in forward, structure, sizes, memory, backward_pass))
    return Source(name, net, tuple(seen))


def _net(value: Any, types: Problems) -> Tuple[str, caffe2_pb2.NetDef]:
    if isinstance(value, caffe2_pb2.OperatorDef):
        return "operator {}".format(value.type), caffe2_pb2.NetDef(op=[value])
    net = read_net("net_or_op", value, types, "an OperatorDef") or caffe2_pb2.NetDef()
    return "net '{}'".format(net.name), net


def _with_forward_operators(net: caffe2_pb2.NetDef, forward: Collection[str]) -> caffe2_pb2.NetDef:
    """The net, or a copy in which each gradient operator that stands alone has its forward operator before it.

    `forward` are the blobs of step workspaces of the forward operators that are there.
    """
    gradients = [operator for operator in net.op if operator.type == GRADIENT_OPERATOR]
    alone = [operator for operator in gradients if operator.input[-1] not in forward]
    if not alone:
        return net
    changed = caffe2_pb2.NetDef()
    changed.CopyFrom(net)
    del changed.op[:]
    changed.op.extend([*(_forward_operator(operator) for operator in alone), *net.op])
    return changed


def _forward_operator(gradient: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    """The operator whose gradient this one computes: it has its arguments, inputs and outputs."""
    forward = copied(gradient)
    aliases, states = strings(gradient, "alias_dst"), strings(gradient, STATES)
    seen = list(gradient.input[len(integers(gradient, POSITIONS)) : -1])
    forward.type, forward.is_gradient_op = OPERATOR, False
    forward.input[:] = [blob for blob in seen if blob not in aliases + states]
    forward.output[:] = [*aliases, *(blob for blob in seen if blob in states), gradient.input[-1]]
    remove_arguments(forward, (PYTHON_POSITIONS, SEQUENCE_GRADIENTS))
    return forward
