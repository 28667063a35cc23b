"""`gradcheck`: the gradients of a net beside numerical ones, element by element."""

from typing import Any, Collection, List, Mapping, Optional, Sequence, Union

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import Blob, check_once, known_name, read_blobs
from caffe2_recurrent.nets import AnyNet, init_net_of, read_net
from caffe2_recurrent.numerical_check.comparison import compare
from caffe2_recurrent.numerical_check.report import GradientReport
from caffe2_recurrent.numerical_check.roles import read_inputs
from caffe2_recurrent.numerical_check.settings import Settings, check_settings
from caffe2_recurrent.numerical_check.slopes import is_moved
from caffe2_recurrent.numerical_check.values import WORKSPACE, find_values, read_values
from caffe2_recurrent.operators import outputs_of
from caffe2_recurrent.problems import Problems, meant, names
from caffe2_recurrent.scratch_workspace import scratch_workspace


class GradientsDiffer(AssertionError):
    """Gradients that are not those of the net; `report` has all of them."""

    def __init__(self, report: GradientReport) -> None:
        wrong = [check.blob for check in report.checks if not check.passes]
        super().__init__("gradcheck: the gradient of {} is wrong\n{}".format(names(wrong), report))
        self.report = report


def gradcheck(
    model_or_net: AnyNet,
    outputs: Union[Blob, Sequence[Blob]],
    values: Optional[Mapping[Blob, Union[np.ndarray, Sequence[int]]]] = None,
    blobs: Optional[Sequence[Blob]] = None,
    rtol: float = 1e-3,
    atol: Optional[float] = None,
    step: float = 2.0**-6,
    most_elements: int = 500,
    seed: int = 0,
) -> GradientReport:
    """Compare the gradients of every input, initial state and parameter of a net with numerical ones.

    The net is the one that computes `outputs`, before `AddGradientOperators`. The loss is a sum of all elements of
    the outputs with random weights; it is differentiated by the net's own gradient operators, and by central
    differences of two step sizes. Net, model and workspace stay as they were.

    Args:
        model_or_net: a `core.Net` or a `NetDef`, or a `ModelHelper`, whose `param_init_net` makes the parameters that
            are neither in `values` nor in the workspace.
        outputs: the float32 blob or blobs through which gradients come, as `hidden_all`.
        values: an array for an input, or its shape, as `{'x': (5, 2, 3)}`, for which normal numbers are drawn. Inputs
            that are not named are taken from the workspace. Integer inputs, as lengths, need an array.
        blobs: the inputs to check; default all of type float32.
        rtol, atol: how far the gradients of an element may be apart: `atol + rtol * m`, with m the largest numerical
            gradient of that blob. Default for `atol`: 3e-5 times the root of the number of elements of the outputs,
            or four roundings of the weighted outputs divided by `step` if they are large: several times what float32
            does. A loss is best given as what it is the sum of.
        step: how far an element is moved at first, and then twice as far; where gradients differ, by less as well, down
            to a 64th, as there may be a kink. Smaller steps suit stronger curvature, larger ones less rounding.
        most_elements: of a larger blob, so many elements are drawn at random.
        seed: of the values, the weights, and the elements drawn.

    Returns:
        A `GradientReport`: the worst element of each blob, both gradients there, and its place.

    Raises:
        GradientsDiffer: an `AssertionError` with the report as its text.
        TypeError, ValueError: all that is wrong with the arguments, inputs without a value, values that float32 does
            not change by `step`, a net that does not run with them or whose outputs change from run to run, and
            gradients that `check_gradients` finds lost.

    Source of the two step sizes: Richardson's extrapolation of central differences, as in slopes.py.
    """
    types, problems = Problems("gradcheck"), Problems("gradcheck")
    proto = read_net("model_or_net", model_or_net, types)
    wanted_outputs = read_blobs("outputs", outputs, types)
    wanted_blobs = None if blobs is None else read_blobs("blobs", blobs, types)
    given_values = read_values(values, types)
    settings = Settings(rtol, atol, step, most_elements, seed)
    check_settings(settings, types, problems)
    types.raise_if_any(TypeError)
    problems.raise_if_any()
    assert proto is not None
    inputs = read_inputs(proto)
    written = outputs_of(proto.op)
    wanted_outputs = [known_name(blob, written) for blob in wanted_outputs]
    if wanted_blobs is not None:
        wanted_blobs = [known_name(blob, inputs) for blob in wanted_blobs]
    given_values = {known_name(blob, inputs): value for blob, value in given_values.items()}
    _check_outputs(proto, written, wanted_outputs, problems)
    found = find_values(inputs, given_values, init_net_of(model_or_net), seed, problems)
    chosen = _choose(found, wanted_blobs, problems)
    _check_step(found, chosen, step, problems)
    problems.raise_if_any()
    with scratch_workspace(WORKSPACE):
        report = compare(proto, found, wanted_outputs, chosen, settings)
    if not report.passes:
        raise GradientsDiffer(report)
    return report


def _check_outputs(
    net: caffe2_pb2.NetDef, written: Collection[str], outputs: Sequence[str], problems: Problems
) -> None:
    if any(operator.is_gradient_op for operator in net.op):
        problems.add("net '{}' has gradient operators already; check it before AddGradientOperators", net.name)
    if not outputs:
        problems.add("outputs is empty; name at least one blob that the net computes")
    for blob in outputs:
        if blob not in written:
            problems.add("net '{}' does not compute '{}'; {}", net.name, blob, meant(blob, written, "it computes "))
    check_once("outputs", outputs, problems)


def _choose(found: Mapping[str, Any], wanted: Optional[Sequence[str]], problems: Problems) -> List[str]:
    """The inputs to check."""
    floats = [blob for blob, value in found.items() if isinstance(value, np.ndarray) and value.dtype == np.float32]
    if wanted is None:
        chosen = [blob for blob in floats if found[blob].size]
    else:
        chosen = list(wanted)
        others = [blob for blob in wanted if blob not in floats]
        if others:
            problems.add("blobs has {}; float32 inputs of the net are {}", names(others), names(floats))
    if wanted is not None and not chosen:
        problems.add("blobs is empty; float32 inputs of the net are {}", names(floats))
    elif not chosen:
        problems.add("there is nothing to check: the net has no float32 input")
    return chosen


def _check_step(found: Mapping[str, Any], blobs: Sequence[str], step: float, problems: Problems) -> None:
    """Note values that are the same in float32 with the step and without it."""
    for blob in blobs:
        value = found.get(blob)
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            lost = value[np.isfinite(value) & ~is_moved(value, step)]
            if lost.size:
                largest = lost[np.argmax(np.abs(lost))]
                problems.add("'{}' has {:g}, which float32 does not change by a step of {:g}", blob, largest, step)
