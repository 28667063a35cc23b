"""Reading and setting the arguments of an operator."""

from typing import Any, Collection, Iterator, List, Mapping, Optional

from caffe2.proto import caffe2_pb2
from caffe2.python import utils as caffe2_utils
from google.protobuf import text_format

# What the engine calls arguments of a loop's operators. Those that hold the nets of its steps:
STEP_NET = "step_net"
BACKWARD_STEP_NET = "backward_step_net"
STEP_NETS = (STEP_NET, BACKWARD_STEP_NET)
# the outer blobs of the states, and the positions of their initial values among the inputs:
STATES = "recurrent_states"
INITIAL = "initial_recurrent_state_ids"
# the positions of the references that have a gradient, and what the step calls that:
PARAMETERS = "param"
PARAMETER_GRADIENTS = "param_grads"
# the blobs of the step that all steps share:
RECOMPUTED = "recompute_blobs_on_backward"
# in how many workspaces steps without a backward step take turns:
WORKSPACES = "num_workspaces"
# the blob of the number of the step:
TIMESTEP = "timestep"
# and the end of one that says how the gradient operator calls a blob.
RENAMED = ".rename"

# The axis of the channels of images by their order, where it is not 1.
CHANNELS = {"NHWC": 3}


def argument(operator: caffe2_pb2.OperatorDef, name: str) -> Optional[caffe2_pb2.Argument]:
    # Without a generator, as it is asked for more often than anything else.
    for given in operator.arg:
        if given.name == name:
            return given
    return None


def integer(operator: caffe2_pb2.OperatorDef, name: str, default: int) -> int:
    found = argument(operator, name)
    return default if found is None else int(found.i)


def number(operator: caffe2_pb2.OperatorDef, name: str, default: float) -> float:
    found = argument(operator, name)
    return default if found is None else float(found.f)


def joining_axis(operator: caffe2_pb2.OperatorDef) -> int:
    """The axis along which a Concat puts together and a Split takes apart: by the order of images, if not by number."""
    return integer(operator, "axis", CHANNELS.get(string(operator, "order", ""), 1))


def string(operator: caffe2_pb2.OperatorDef, name: str, default: str) -> str:
    found = argument(operator, name)
    return default if found is None else found.s.decode()


def integers(operator: caffe2_pb2.OperatorDef, name: str) -> List[int]:
    found = argument(operator, name)
    return [] if found is None else list(found.ints)


def strings(operator: caffe2_pb2.OperatorDef, name: str) -> List[str]:
    found = argument(operator, name)
    return [] if found is None else [value.decode() for value in found.strings]


def net(operator: caffe2_pb2.OperatorDef, name: str) -> caffe2_pb2.NetDef:
    """A copy of a net that the operator is given, empty if there is none."""
    copy = caffe2_pb2.NetDef()
    copy.CopyFrom(net_to_read(operator, name))
    return copy


def net_to_read(operator: caffe2_pb2.OperatorDef, name: str) -> caffe2_pb2.NetDef:
    """The net as it lies in the operator, to be read alone: a copy takes long. Of a step net that is text, a copy."""
    found = argument(operator, name)
    if found is None:
        return caffe2_pb2.NetDef()
    # As nets made before 2018 have it.
    return text_format.Parse(found.s.decode(), caffe2_pb2.NetDef()) if found.s else found.n


def has_nets(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the operator is given nets, to run them or, as the step of a loop, parts of them."""
    return any(given.HasField("n") or given.nets or (given.name in STEP_NETS and given.s) for given in operator.arg)


def nets_of(operator: caffe2_pb2.OperatorDef) -> Iterator[caffe2_pb2.NetDef]:
    """The nets that the operator is given, as they lie in it; of a step net that is text, a copy."""
    for given in operator.arg:
        if given.HasField("n"):
            yield given.n
        elif given.name in STEP_NETS:
            yield net(operator, given.name)
        yield from given.nets


def set_arguments(operator: caffe2_pb2.OperatorDef, arguments: Mapping[str, Any]) -> None:
    """Give the operator these arguments, in the place of those that it has by their names."""
    remove_arguments(operator, arguments)
    operator.arg.extend(caffe2_utils.MakeArgument(name, value) for name, value in arguments.items())


def remove_arguments(operator: caffe2_pb2.OperatorDef, names: Collection[str]) -> None:
    # The others stay where they are: nets are among them, which take long to copy.
    for position in reversed([position for position, given in enumerate(operator.arg) if given.name in names]):
        del operator.arg[position]
