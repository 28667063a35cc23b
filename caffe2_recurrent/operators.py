"""Operators put in beside those of a net, and what Caffe2 calls gradients."""

import re
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Sequence, Set

from caffe2.proto import caffe2_pb2
from caffe2.python import scope
from caffe2.python import utils as caffe2_utils

from caffe2_recurrent.operator_arguments import RENAMED, STEP_NETS, TIMESTEP, has_nets, net_to_read, nets_of, string

OPERATOR = "RecurrentNetwork"
GRADIENT_OPERATOR = "RecurrentNetworkGradient"
LOOPS = (OPERATOR, GRADIENT_OPERATOR)
SUM = "Sum"
# The position of the lengths among the inputs of units that have some.
LENGTHS_INPUT = {"LSTMUnit": 3, "GRUUnit": 2}
GRADIENT_SUFFIX = "_grad"
# As in `_x_grad_autosplit_0` more may follow.
GRADIENT_NAME = re.compile(GRADIENT_SUFFIX + "(_[^/]*)?$")
# Their output is the memory of their input, under another name.
SHOWING = frozenset(["Alias", "AliasWithName"])
# Turns each sequence round, for the loop that runs over it from its end.
TURNING = "ReversePackedSegs"
# The engine's operator that makes a blob a view of slices. And an argument of our own, of which the engine takes no
# notice: a loop that is the backward pass of another one has that one's step workspaces in it.
LINK = "rnn_internal_apply_link"
BACKWARD_PASS_OF = "backward_pass_of"


def is_backward_of(operator: caffe2_pb2.OperatorDef, forward: caffe2_pb2.OperatorDef) -> bool:
    """Whether `operator` is the loop that the rule `backward_loop` has made of the backward pass of `forward`."""
    return operator.type == OPERATOR and string(operator, BACKWARD_PASS_OF, "") == forward.output[-1]


def gradient_name(blob: str) -> str:
    return blob + GRADIENT_SUFFIX


def is_gradient_name(blob: str) -> bool:
    """Whether Caffe2, or a rule of `optimize`, has made the name from that of a gradient; its scope does not count."""
    return GRADIENT_NAME.search(blob) is not None


def new_operator(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], beside: caffe2_pb2.OperatorDef, **arguments: Any
) -> caffe2_pb2.OperatorDef:
    """An operator between blobs of the given (full) names, on the device of the operator `beside`."""
    # There may be one for each operator of a step, and `CreateOperator` takes several times as long.
    given = [caffe2_utils.MakeArgument(*argument) for argument in sorted(arguments.items())]
    made = caffe2_pb2.OperatorDef(name="", type=kind, input=inputs, output=outputs, arg=given)
    if beside.HasField("device_option"):
        made.device_option.CopyFrom(beside.device_option)
    return made


def is_on_onednn(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether the operator is one of oneDNN, which Caffe2 calls IDEEP, between tensors that are laid out its way."""
    return bool(operator.device_option.device_type == caffe2_pb2.IDEEP)


def operator_beside(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], beside: caffe2_pb2.OperatorDef, **arguments: Any
) -> caffe2_pb2.OperatorDef:
    """As `new_operator`, for a net that is being built: without a device of `beside`, on that of the current scope."""
    made = new_operator(kind, inputs, outputs, beside, **arguments)
    if not made.HasField("device_option") and scope.CurrentDeviceScope() is not None:
        made.device_option.CopyFrom(scope.CurrentDeviceScope())
    return made


def copy_operator(source: str, target: str, beside: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    """`target = Copy(source)`."""
    return operator_beside("Copy", [source], [target], beside)


def copied(operator: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    copy = caffe2_pb2.OperatorDef()
    copy.CopyFrom(operator)
    return copy


def renamed(operator: caffe2_pb2.OperatorDef, names: Mapping[str, str]) -> caffe2_pb2.OperatorDef:
    """A copy between blobs of other names, also in nets that it runs and in what a loop says of its step."""
    made = copied(operator)
    for blobs in (made.input, made.output, made.control_input):
        blobs[:] = [names.get(blob, blob) for blob in blobs]
    if made.type in LOOPS:
        _rename_in_arguments(made, names)
    for net in nets_of(made):
        inside = [renamed(other, names) for other in net.op]
        del net.op[:]
        net.op.extend(inside)
        for blobs in (net.external_input, net.external_output):
            blobs[:] = [names.get(blob, blob) for blob in blobs]
    return made


def _rename_in_arguments(loop: caffe2_pb2.OperatorDef, names: Mapping[str, str]) -> None:
    """All strings of a loop are names of blobs, and so are what it renames and those that it renames them to."""
    for given in loop.arg:
        if given.name in STEP_NETS and given.s:
            # Of a step net that is text, a copy would be renamed.
            given.n.CopyFrom(net_to_read(loop, given.name))
            given.ClearField("s")
        elif given.name.endswith(RENAMED):
            renamed_blob = given.name[: -len(RENAMED)]
            given.name = names.get(renamed_blob, renamed_blob) + RENAMED
            given.s = _other_name(given.s, names)
        elif given.name == TIMESTEP:
            given.s = _other_name(given.s, names)
        given.strings[:] = [_other_name(blob, names) for blob in given.strings]


def _other_name(blob: bytes, names: Mapping[str, str]) -> bytes:
    return names.get(blob.decode(), blob.decode()).encode()


def opened(operators: Iterable[caffe2_pb2.OperatorDef], with_steps: bool = True) -> Iterator[caffe2_pb2.OperatorDef]:
    """The operators, each with those of the nets that it runs behind it, as they lie in it.

    Without steps of loops they are those that share a workspace.
    """
    for operator in operators:
        yield operator
        if with_steps or operator.type not in LOOPS:
            for net in nets_of(operator):
                yield from opened(net.op, with_steps)


def as_bytes(operator: caffe2_pb2.OperatorDef, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> bytes:
    """An operator like `operator` between other blobs, the same bytes whatever its own are called."""
    plain = copied(operator)
    plain.input[:], plain.output[:] = inputs, outputs
    plain.ClearField("name")
    return bytes(plain.SerializeToString())


def read_before_written(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[str]:
    """The blobs that operators need from elsewhere, in their order; also what is changed in its place."""
    read: Dict[str, None] = {}
    written: Set[str] = set()
    for operator in operators:
        read.update(dict.fromkeys(blob for blob in operator.input if blob not in written))
        written.update(operator.output)
    return list(read)


def outputs_of(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[str]:
    """What operators write, each blob once, in their order."""
    return list(dict.fromkeys(blob for operator in operators for blob in operator.output))


def net_running(name: str, operators: Sequence[caffe2_pb2.OperatorDef]) -> caffe2_pb2.NetDef:
    """A net that runs them one after the other, for an operator that runs nets."""
    return caffe2_pb2.NetDef(
        name=name,
        type="simple",
        op=operators,
        external_input=read_before_written(operators),
        external_output=outputs_of(operators),
    )


def is_written_next(operators: Iterable[caffe2_pb2.OperatorDef], blob: str) -> bool:
    """Whether the first of the operators that has to do with `blob` writes and does not read it."""
    for operator in operators:
        # What nets in operators read need not be among the inputs.
        if blob in operator.input or blob in operator.control_input or has_nets(operator):
            return False
        if blob in operator.output:
            return True
    return False
