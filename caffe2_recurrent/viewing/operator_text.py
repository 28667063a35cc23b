"""What an operator is told, in a few words."""

from typing import Any, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.operators import is_on_onednn

LONGEST_LIST = 4
LONGEST_STRING = 40


def arguments_text(operator: caffe2_pb2.OperatorDef) -> str:
    """`axis=2, mode='sequence'`; long lists and strings shortened, nets by their number of operators."""
    return ", ".join("{}={}".format(given.name, _value(given)) for given in operator.arg)


def type_text(operator: caffe2_pb2.OperatorDef) -> str:
    """`FC`; `FC (oneDNN)` where it is not Caffe2's own."""
    return operator.type + (" (oneDNN)" if is_on_onednn(operator) else "")


def device_text(device: caffe2_pb2.DeviceOption) -> str:
    """`CPU`, `CUDA 0`."""
    name = caffe2_pb2.DeviceTypeProto.Name(device.device_type).replace("PROTO_", "")
    return name if device.device_type == caffe2_pb2.CPU else "{} {}".format(name, device.device_id)


def _value(given: caffe2_pb2.Argument) -> str:
    if given.HasField("i"):
        return str(given.i)
    if given.HasField("f"):
        return "{:g}".format(given.f)
    if given.HasField("s"):
        return _string(given.s)
    if given.HasField("n"):
        return "<net of {} operators>".format(len(given.n.op))
    if given.strings:
        return _list([_string(value) for value in given.strings])
    if given.floats:
        return _list(["{:g}".format(value) for value in given.floats])
    if given.nets:
        return "<{} nets>".format(len(given.nets))
    return _list([str(value) for value in given.ints])


def _string(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text if len(text) <= LONGEST_STRING else text[: LONGEST_STRING - 3] + "...")


def _list(values: Sequence[Any]) -> str:
    shown = list(values[:LONGEST_LIST]) + (["... {} in all".format(len(values))] if len(values) > LONGEST_LIST else [])
    return "[{}]".format(", ".join(shown))
