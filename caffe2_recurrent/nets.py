"""The net that a caller means: a model's, a net, or one read from a file."""

from typing import Any, Optional, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.problems import Problems, given

AnyNet = Union[ModelHelper, core.Net, caffe2_pb2.NetDef]


def read_net(role: str, value: Any, types: Problems, *others: str) -> Optional[caffe2_pb2.NetDef]:
    """The proto of the net in the argument `role`; notes in `types` what is none, nor one of `others` that may be."""
    net = value.net if isinstance(value, ModelHelper) else value
    if isinstance(net, core.Net):
        return net.Proto()
    if isinstance(net, caffe2_pb2.NetDef):
        return net
    *kinds, last = ("a ModelHelper", "a core.Net", "a NetDef", *others)
    types.add("{} must be {} or {}; got {}", role, ", ".join(kinds), last, given(value))
    return None


def init_net_of(value: Any) -> Optional[caffe2_pb2.NetDef]:
    """The net that makes the parameters of a model; None for anything else."""
    return value.param_init_net.Proto() if isinstance(value, ModelHelper) else None
