"""The part of a net that predicts.

    net -> operators outside of the gradient pass -> those that the outputs depend on -> net without gradients

Caffe2's `ExtractPredictorNet` cuts by position, from the first operator that reads an input to the last one that writes
an output. That loses what stands before, as the weights that `optimize` has transposed, with all that reads them, and
what stands behind, as the copies of last states into initial ones. This goes by what is read and written.
"""

from typing import Iterable, Iterator, List, NamedTuple, Sequence, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.arguments import Blob, check_once, known_name, read_blobs
from caffe2_recurrent.loops.loop import BACKWARD, stands_for_loop
from caffe2_recurrent.nets import AnyNet, read_net
from caffe2_recurrent.operator_arguments import PARAMETER_GRADIENTS, PARAMETERS, integer, nets_of, remove_arguments
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import OPERATOR, copied
from caffe2_recurrent.problems import Problems, meant, names
from caffe2_recurrent.serving.dependencies import Access, accesses_of, from_outside, needed_for, outside_of_gradients
from caffe2_recurrent.wiring import link_arguments

# What a forward operator has for its gradient alone.
FOR_GRADIENT = (*BACKWARD, PARAMETERS, PARAMETER_GRADIENTS, *link_arguments("backward_link", ()))
# In training mode unless is_test says otherwise.
TRAINING_BY_DEFAULT = ("Dropout", "SpatialBN")


class Prediction(NamedTuple):
    """A net without gradients, and the blobs that it has to find beside its inputs, as `PredictorExportMeta` asks."""

    net: core.Net
    parameters: List[core.BlobReference]


def prediction_net(
    model_or_net: AnyNet,
    inputs: Union[Blob, Iterable[Blob]],
    outputs: Union[Blob, Iterable[Blob]],
) -> Prediction:
    """Cut out of a net what computes `outputs` from `inputs`, without gradients; the net itself stays as it is.

    Its loops are forward only: they have one, two or four step workspaces, whatever the number of steps. What the net
    writes for its own next run, as copies of the last states into the initial ones, stays in, but not the blobs in
    `inputs`.

    Args:
        model_or_net: a `ModelHelper`, a `core.Net` or a `NetDef`; with gradient operators or without, optimised or not.
        inputs: the blob or blobs that are fed before each run, even if the net could compute them. A string means the
            name as written, or else the one under the current `NameScope`.
        outputs: the blob or blobs that are wanted.

    Returns:
        The net and its parameters: all blobs that it reads and does not compute, but for the inputs. These are weights
        and biases, constants, and states that are carried over, which a file keeps with the values that they have.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: outputs that the net does not compute or that are parameters of it, inputs on which they do not
            depend, operators in training mode: all of them.

    Source of what a forward-only loop keeps: RecurrentNetworkOp in caffe2/operators/rnn/recurrent_network_op.h.
    """
    types, values = Problems("prediction_net"), Problems("prediction_net")
    proto = read_net("model_or_net", model_or_net, types)
    fed = read_blobs("inputs", inputs, types)
    wanted = read_blobs("outputs", outputs, types)
    types.raise_if_any(TypeError)
    assert proto is not None
    accesses = accesses_of(outside_of_gradients(proto))
    known = {blob for access in accesses for blob in access.reads + access.writes}
    fed, wanted = ([known_name(blob, known) for blob in blobs] for blobs in (fed, wanted))
    kept = needed_for(accesses, fed, wanted)
    outside = from_outside(kept)
    parameters = [blob for blob in outside if blob not in fed]
    # Where the outputs are none of the net's, that is what there is to say.
    _check_inputs(fed, outside if kept else fed, values)
    _check_outputs(wanted, accesses, parameters, proto.name, values)
    operators = [_without_backward_steps(access.operator) for access in kept]
    for operator in _in_training_mode(operators):
        values.add(
            "operator {} -> {} is in training mode; build the net that predicts with is_test=True",
            operator.type,
            names(operator.output),
        )
    values.raise_if_any()
    net = _net_of(proto, operators)
    net.Proto().external_input.extend([*fed, *parameters])
    net.Proto().external_output.extend(wanted)
    return Prediction(net, [core.BlobReference(blob) for blob in parameters])


def _check_inputs(fed: Sequence[str], outside: Sequence[str], problems: Problems) -> None:
    check_once("inputs", fed, problems)
    for blob in fed:
        if blob not in outside:
            problems.add("the outputs do not depend on the input '{}'; they depend on {}", blob, names(outside))


def _check_outputs(
    wanted: Sequence[str], accesses: Sequence[Access], parameters: Sequence[str], net: str, problems: Problems
) -> None:
    check_once("outputs", wanted, problems)
    if not wanted:
        problems.add("outputs is empty")
    written = {blob for access in accesses for blob in access.writes}
    computed = list(dict.fromkeys(blob for access in accesses for blob in access.operator.output))
    for blob in wanted:
        if blob not in written:
            text = "net '{}' does not compute the output '{}' outside of its gradient pass; {}"
            problems.add(text, net, blob, meant(blob, computed, "it computes "))
        elif blob in parameters:
            problems.add("the output '{}' is also a parameter: the net reads what its last run has written there", blob)


def _in_training_mode(operators: Iterable[caffe2_pb2.OperatorDef]) -> Iterator[caffe2_pb2.OperatorDef]:
    """Those operators, and operators in the nets that they run, that do something else in training."""
    for operator in operators:
        if integer(operator, "is_test", int(operator.type not in TRAINING_BY_DEFAULT)) == 0:
            yield operator
        # The steps that are written out are those of the loop, each with names of its own.
        inside = [net_argument(operator, "else_net")] if stands_for_loop(operator) else nets_of(operator)
        for net in inside:
            yield from _in_training_mode(net.op)


def _without_backward_steps(operator: caffe2_pb2.OperatorDef) -> caffe2_pb2.OperatorDef:
    changed = copied(operator)
    _remove_backward_steps(changed)
    return changed


def _remove_backward_steps(operator: caffe2_pb2.OperatorDef) -> None:
    """In the nets that it runs, too."""
    if operator.type == OPERATOR:
        remove_arguments(operator, FOR_GRADIENT)
    for net in nets_of(operator):
        for inner in net.op:
            _remove_backward_steps(inner)


def _net_of(source: caffe2_pb2.NetDef, operators: Sequence[caffe2_pb2.OperatorDef]) -> core.Net:
    """A net of the operators that runs as `source` does."""
    net = core.Net(source.name + "_predict")
    name = net.Name()
    proto = net.Proto()
    proto.CopyFrom(source)
    proto.name = name
    for field in (proto.op, proto.external_input, proto.external_output):
        del field[:]
    proto.op.extend(operators)
    return net
