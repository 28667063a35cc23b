"""The RNN executor and the step workspaces of the engine, seen from Python."""

import collections
import re
import warnings
from typing import Any, FrozenSet, List, NamedTuple, Optional

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.arguments import DEFAULT_TIMESTEP, is_integer
from caffe2_recurrent.gradient_maker import GRADIENT_OPERATOR, OPERATOR
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operator_arguments import set_arguments, string, strings
from caffe2_recurrent.problems import Problems, given, names


def set_rnn_executor_config(
    rnn_op: caffe2_pb2.OperatorDef, num_threads: Optional[int] = None, max_cuda_streams: Optional[int] = None
) -> None:
    """Say with how many threads or CUDA streams the RNN executor runs the steps of one loop.

    Set on the forward operator before `AddGradientOperators`, it holds for the gradient operator as well. A second
    call replaces what the first one set; nets that have been created already keep what they had.

    Args:
        rnn_op: a RecurrentNetwork or RecurrentNetworkGradient operator, as in `net.Proto().op`.
        num_threads: 1 or more, for loops on the CPU. None: leave as it is; without a setting the engine starts 4.
        max_cuda_streams: 1 or more, for loops on a GPU. None: leave as it is; without a setting there are 2.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: the operator is neither of the two, or a number is below 1.

    Source: caffe2/operators/rnn/recurrent_network_executor.h.
    """
    types, values = Problems("set_rnn_executor_config"), Problems("set_rnn_executor_config")
    settings = {"num_threads": num_threads, "max_cuda_streams": max_cuda_streams}
    if not isinstance(rnn_op, caffe2_pb2.OperatorDef):
        types.add("rnn_op must be an operator, as in net.Proto().op; got {}", given(rnn_op))
    elif rnn_op.type not in (OPERATOR, GRADIENT_OPERATOR):
        values.add("rnn_op must be a {} or {} operator; got '{}'", OPERATOR, GRADIENT_OPERATOR, rnn_op.type)
    for name, value in settings.items():
        if value is not None and not is_integer(value):
            types.add("{} must be a whole number or None; got {}", name, given(value))
        elif value is not None and value < 1:
            values.add("{} must be 1 or more; got {}", name, value)
    types.raise_if_any(TypeError)
    values.raise_if_any()
    given_settings = {"rnn_executor." + name: int(value) for name, value in settings.items() if value is not None}
    set_arguments(rnn_op, given_settings)


class _Loop(NamedTuple):
    """A RecurrentNetwork operator: the blob of its step workspaces, and what these hold."""

    workspaces: str
    timestep: str
    own: FrozenSet[str]


def retrieve_step_blobs(net: core.Net, prefix: str = "rnn") -> List[bytes]:
    """Copy what each step's workspace holds into the current workspace; call it after the net has run.

    A step's blob `b` becomes `<prefix>_b<step>`. If an earlier loop of the net has a blob of that name, all blobs of
    this one, the n-th loop of the net, become `<prefix>_<n>_b<step>`: nothing of the earlier one is overwritten. The
    steps' numbers, which are the same in all loops, do not count. `<prefix>_<n>` itself lists the names.

    Args:
        net: a net with RecurrentNetwork operators, run in the current workspace.
        prefix: what the names begin with.

    Returns:
        The names of the blobs made, as Caffe2 stores strings: bytes. Blobs that are linked, and so are views into
        outer blobs, are among them as copies. What the backward step computes is not: all steps share it.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: the loops that have not run.

    Warns:
        UserWarning: names that two blobs share all the same (`x1` at step 0, `x` at step 10); the later one is kept.

    Source: caffe2/operators/rnn/recurrent_network_blob_fetcher_op.h.
    """
    loops = _read(net, prefix)
    found: List[bytes] = []
    seen: FrozenSet[str] = frozenset()
    counts: collections.Counter[str] = collections.Counter()
    for number, loop in enumerate(loops, start=1):
        listing = "{}_{}".format(prefix, number)
        beginning = prefix if seen.isdisjoint(loop.own) else listing
        fetched = _fetch(loop.workspaces, beginning, listing)
        step_number = re.compile(re.escape("{}_{}".format(beginning, loop.timestep)) + r"(_rnnexec_t\d+)?\d+$")
        counts.update(name for name in map(bytes.decode, fetched) if not step_number.match(name))
        seen = seen.union(loop.own)
        found.extend(fetched)
    ambiguous = [name for name, count in counts.items() if count > 1]
    if ambiguous:
        warnings.warn(
            "retrieve_step_blobs: different blobs of the steps are called {} here; only the last of each is kept: "
            "rename those in the step net that end in a digit".format(names(ambiguous)),
            stacklevel=2,
        )
    return found


def _fetch(workspaces: str, prefix: str, listing: str) -> List[bytes]:
    workspace.RunOperatorOnce(
        core.CreateOperator(
            "RecurrentNetworkBlobFetcher",
            [core.BlobReference(workspaces)],
            [core.BlobReference(listing)],
            prefix=prefix,
        )
    )
    fetched: List[bytes] = workspace.FetchBlob(listing).tolist()
    return fetched


def _read(net: Any, prefix: Any) -> List[_Loop]:
    types, values = Problems("retrieve_step_blobs"), Problems("retrieve_step_blobs")
    if not isinstance(net, core.Net):
        types.add("net must be a core.Net; got {}", given(net))
    if not isinstance(prefix, str):
        types.add("prefix must be a string; got {}", given(prefix))
    types.raise_if_any(TypeError)
    loops = [_read_loop(operator) for operator in net.Proto().op if operator.type == OPERATOR]
    not_run = [loop.workspaces for loop in loops if not _has_run(loop)]
    if not_run:
        values.add("net '{}' has not run in this workspace; there is nothing in {}", net.Name(), names(not_run))
    values.raise_if_any()
    return loops


def _has_run(loop: _Loop) -> bool:
    # Fetched, a blob that holds no tensor is a description of its type.
    return workspace.HasBlob(loop.workspaces) and b"ScratchWorkspaces" in bytes(workspace.FetchBlob(loop.workspaces))


def _read_loop(operator: caffe2_pb2.OperatorDef) -> _Loop:
    own = {output for step_operator in net_argument(operator, "step_net").op for output in step_operator.output}
    own.update(strings(operator, "link_internal"))
    timestep = string(operator, "timestep", DEFAULT_TIMESTEP)
    return _Loop(operator.output[-1], timestep, frozenset(own - {timestep}))
