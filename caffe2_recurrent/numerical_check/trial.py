"""Running a net for outputs and gradients, in the current workspace."""

from typing import Any, Dict, List, Mapping, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent import executor
from caffe2_recurrent.gradient_check import check_gradients


class Trial:
    """A net with values for its inputs, as a function of some of them."""

    def __init__(self, net: caffe2_pb2.NetDef, values: Mapping[str, Any], outputs: Sequence[str]) -> None:
        self._proto = net
        self.values = dict(values)
        self._outputs = list(outputs)
        self._net = _copy(net)
        # It now and then fails where one run follows close behind another, and here there are thousands.
        for operator in self._net.Proto().op:
            executor.switch_off(operator)
        written = {blob for operator in net.op for blob in operator.output}
        # What the net changes must be put back before each run.
        self._changed = {blob: value for blob, value in self.values.items() if blob in written}
        for blob, value in self.values.items():
            workspace.FeedBlob(blob, value)
        workspace.CreateNet(self._net)

    def outputs(self, moved: Mapping[str, np.ndarray]) -> List[np.ndarray]:
        """The outputs in float64, with the values of some inputs replaced for this run."""
        for blob, value in {**self._changed, **moved}.items():
            workspace.FeedBlob(blob, value)
        workspace.RunNet(self._net)
        found = [workspace.FetchBlob(output).astype(np.float64) for output in self._outputs]
        for blob in moved:
            workspace.FeedBlob(blob, self.values[blob])
        return found

    def gradients(self, weights: Sequence[np.ndarray]) -> Dict[str, np.ndarray]:
        """The net's own gradients of the sum of its weighted outputs, of all inputs that get one."""
        net = _copy(self._proto)
        read = {blob for operator in self._proto.op for blob in operator.input}
        given = {}
        for position, (output, weight) in enumerate(zip(self._outputs, weights)):
            name = net.NextScopedBlob("gradcheck_weight_{}".format(position))
            workspace.FeedBlob(name, weight)
            # Of an output that others are made of, Caffe2 would drop the gradient that it is given.
            weighted = net.Copy(output, net.NextScopedBlob(name + "_of")) if output in read else output
            given[core.BlobReference(str(weighted))] = net.AddExternalInput(name)
        try:
            gradients = net.AddGradientOperators(given)
        except ValueError as error:
            raise ValueError("gradcheck: {}".format(error)) from error
        check_gradients(net, gradients)
        for blob, value in self._changed.items():
            workspace.FeedBlob(blob, value)
        workspace.RunNetOnce(net)
        return {
            blob: _dense(gradients[core.BlobReference(blob)], value)
            for blob, value in self.values.items()
            if core.BlobReference(blob) in gradients
        }


def _copy(net: caffe2_pb2.NetDef) -> core.Net:
    copy = caffe2_pb2.NetDef()
    copy.CopyFrom(net)
    # A name of its own: later nets of the caller's keep theirs.
    copy.name = "caffe2_recurrent_gradcheck"
    return core.Net(copy)


def _dense(gradient: Any, value: np.ndarray) -> np.ndarray:
    if not isinstance(gradient, core.GradientSlice):
        fetched: np.ndarray = workspace.FetchBlob(str(gradient))
        return fetched
    dense = np.zeros_like(value)
    np.add.at(dense, workspace.FetchBlob(str(gradient.indices)), workspace.FetchBlob(str(gradient.values)))
    return dense
