"""Whether operators of cuDNN can run on this machine."""

from typing import Any, List, Optional, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.installation import DOCTOR
from caffe2_recurrent.problems import Problems, given, names

OPERATOR = "Recurrent"
OPERATORS = (OPERATOR, "RecurrentGradient", "RecurrentParamSet", "RecurrentParamGet")
ASK_DOCTOR = "`python -m {}` says what this installation can do".format(DOCTOR)


def check_can_run(net: Union[ModelHelper, core.Net, caffe2_pb2.NetDef]) -> None:
    """Raise if a net has operators of `cudnn_LSTM` that cannot run here, and say why.

    Creating such a net fails in the engine with an error that does not. Takes a model (whose two nets are checked), a
    net or a `NetDef`.

    Raises:
        RuntimeError: there is no GPU to use, or operators have no GPU as their device.
        TypeError: `net` is none of these.
    """
    problems = Problems("check_can_run")
    for proto in _protos(net):
        operators = [operator for operator in proto.op if operator.type in OPERATORS]
        trouble = machine_trouble() if operators else None
        if trouble is not None:
            problems.add("net '{}' has {} operators of cuDNN: {}", proto.name, len(operators), trouble)
            continue
        misplaced = [operator for operator in operators if _device_type(operator, proto) != caffe2_pb2.CUDA]
        if misplaced:
            problems.add(
                "net '{}': {} that compute {} are not on a GPU; build them in a DeviceScope of one, or call "
                "net.RunAllOnGPU()",
                proto.name,
                "{} of {} operators of cuDNN".format(len(misplaced), len(operators)),
                names(operator.output[0] for operator in misplaced),
            )
    problems.raise_if_any(RuntimeError)


def machine_trouble() -> Optional[str]:
    """Why operators of cuDNN cannot run on this machine, or None where they can."""
    if workspace.has_gpu_support and workspace.NumCudaDevices() > 0:
        return None
    return "cuDNN needs a GPU, and this Caffe2 has none to use; " + ASK_DOCTOR


def _protos(net: Any) -> List[caffe2_pb2.NetDef]:
    if isinstance(net, ModelHelper):
        return [net.param_init_net.Proto(), net.net.Proto()]
    if isinstance(net, core.Net):
        return [net.Proto()]
    if isinstance(net, caffe2_pb2.NetDef):
        return [net]
    raise TypeError("check_can_run takes a model, a core.Net or a NetDef; got {}".format(given(net)))


def _device_type(operator: caffe2_pb2.OperatorDef, proto: caffe2_pb2.NetDef) -> int:
    # An operator's own device counts before that of its net.
    option = operator.device_option if operator.HasField("device_option") else proto.device_option
    device: int = option.device_type
    return device
