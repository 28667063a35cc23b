"""Nets optimised once, for callers that come with the same net again and again, as `RunNetOnce` in a loop.

A net is the same if its text is, and if what it reads has the same sizes and types in the current workspace: all that
`optimize` looks at.
"""

from collections import OrderedDict
from typing import Any, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent import workspace_blobs
from caffe2_recurrent.operators import read_before_written
from caffe2_recurrent.rewriting import Report, optimize_proto
from caffe2_recurrent.rewriting.options import Options

# How many nets are kept, the last ones used: those of one script are few.
KEPT = 32


class Optimizer:
    """`optimize` with the same options for all nets, which remembers what it made of the last ones."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._known: OrderedDict[Any, Tuple[caffe2_pb2.NetDef, Report]] = OrderedDict()

    def optimize(self, net: caffe2_pb2.NetDef) -> Report:
        """Rewrite `net` in place."""
        key = (net.SerializeToString(), _seen(net))
        if key in self._known:
            self._known.move_to_end(key)
            known, report = self._known[key]
            net.CopyFrom(known)
            return report
        report = optimize_proto(net, self._options)
        copy = caffe2_pb2.NetDef()
        copy.CopyFrom(net)
        self._known[key] = copy, report
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return report


def _seen(net: caffe2_pb2.NetDef) -> Tuple[Any, ...]:
    """What the workspace has of the blobs that the net reads."""
    return tuple(
        (blob, workspace_blobs.shape(blob), workspace_blobs.kind(blob)) for blob in read_before_written(net.op)
    )
