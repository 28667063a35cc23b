"""The step workspaces of a loop that has run, seen from Python.

With a backward step each step has a workspace of its own; without one, steps take turns in a few.
"""

import collections
import functools
import operator
import re
import warnings
from typing import Any, Counter, FrozenSet, List, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.loops.loop import Loop, stands_for_loop
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.selection import note_no_loops
from caffe2_recurrent.nets import AnyNet, read_net
from caffe2_recurrent.operator_arguments import WORKSPACES, integer
from caffe2_recurrent.operators import LINK
from caffe2_recurrent.problems import Problems, given, names
from caffe2_recurrent.workspace_blobs import shape

# Without a backward step, steps take turns in this many workspaces, if the operator does not say in how many; the
# executor works on several steps at once.
# Source: caffe2/operators/rnn/recurrent_network_op.h.
WORKSPACES_IN_TURN = 2
WORKSPACES_IN_TURN_OF_EXECUTOR = 4


def retrieve_step_blobs(net: AnyNet, prefix: str = "rnn") -> List[bytes]:
    """Copy what each step's workspace holds into the current workspace; call it after the net has run.

    A step's blob `b` becomes `<prefix>_b<step>`. If an earlier loop of the net has a blob of that name, all blobs of
    this one, the n-th loop of the net, become `<prefix>_<n>_b<step>`: nothing of the earlier one is overwritten. The
    steps' numbers, which are the same in all loops, do not count. `<prefix>_<n>` itself lists the names.

    Args:
        net: a net with RecurrentNetwork operators, run in the current workspace; its model, or its proto.
        prefix: what the names begin with.

    Returns:
        The names of the blobs made, as Caffe2 stores strings: bytes. Blobs that are linked, and so are views into
        outer blobs, are among them as copies. What the backward step computes is not: all steps share it.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: the loops that have not run, and those without a backward step that ran fewer steps than they have
            workspaces, 2 or, with the RNN executor, 4: all of them. A loop with a blob that no operator has written. A
            net whose only loops `optimize` has written out step by step.

    Warns:
        UserWarning: names that two blobs share all the same (`x1` at step 0, `x` at step 10); the later one is kept.

    Source: caffe2/operators/rnn/recurrent_network_blob_fetcher_op.h.
    """
    found, ambiguous = copy_step_blobs("retrieve_step_blobs", _read(net, prefix), prefix)
    if ambiguous:
        warnings.warn(
            "retrieve_step_blobs: different blobs of the steps are called {} here; only the last of each is kept: "
            "rename those in the step net that end in a digit".format(names(ambiguous)),
            stacklevel=2,
        )
    return found


def copy_step_blobs(caller: str, loops: Sequence[Loop], prefix: str) -> Tuple[List[bytes], List[str]]:
    """The names of the copies, and those that several blobs have, of which only the last is kept.

    Raises `ValueError`, in the name of `caller`, where the engine cannot copy a blob; those made by then are gone.
    """
    before = frozenset(workspace.Blobs())
    found: List[bytes] = []
    seen: FrozenSet[str] = frozenset()
    counts: Counter[str] = collections.Counter()
    for number, loop in enumerate(loops, start=1):
        own = _own_blobs(loop)
        listing = "{}_{}".format(prefix, number)
        beginning = prefix if seen.isdisjoint(own) else listing
        try:
            fetched = _fetch(loop.workspaces, beginning, listing)
        except RuntimeError as error:
            for blob in frozenset(workspace.Blobs()) - before:
                workspace.C.Workspace.current.remove_blob(blob)
            raise ValueError(
                "{}: the engine cannot copy what the steps of loop '{}' keep: an operator has an output that it does "
                "not write, as Dropout has its mask with is_test=1".format(caller, loop.name)
            ) from error
        step_number = re.compile(re.escape("{}_{}".format(beginning, loop.timestep)) + r"(_rnnexec_t\d+)?\d+$")
        counts.update(name for name in map(bytes.decode, fetched) if not step_number.match(name))
        seen = seen.union(own)
        found.extend(fetched)
    return found, [name for name, count in counts.items() if count > 1]


def has_run(loop: Loop) -> bool:
    """Whether a run came to its end, where the engine sizes the outputs by the states.

    A step that failed can have left the places of later workspaces empty, and the engine crashes where it copies one.
    """
    # Fetched, a blob that holds no tensor is a description of its type.
    blob = loop.workspaces
    if not workspace.HasBlob(blob) or b"ScratchWorkspaces" not in bytes(workspace.FetchBlob(blob)):
        return False
    outputs = [alias for alias in loop.aliases if alias.offset >= 0]
    shapes = [(shape(alias.outer_states), shape(alias.outer_output), alias.offset) for alias in outputs]
    return all(
        states is not None
        and output is not None
        and _elements(output) * states[0] == _elements(states) * (states[0] - offset)
        for states, output, offset in shapes
    )


def steps_of_last_run(loop: Loop) -> int:
    """T of a loop that has run, by the states: the sequence may have been fed anew since.

    A backward pass that has none sees the slices from 1 on of the memory of its sequence's gradient.
    """
    if not loop.states:
        seen = [(made.input[1], integer(made, "offset", 0)) for made in loop.operators if made.type == LINK]
        # The sequence may have been fed anew.
        outer, offset = max([(loop.inputs[0], 0), *seen], key=lambda link: (link[1], link[0] != loop.inputs[0]))
        slices = shape(outer)
        assert slices is not None
        return slices[0] - offset
    states, initial = (shape(outer) for outer in loop.states[0])
    assert states is not None
    return states[0] - (initial[0] if initial is not None and len(initial) == 3 else 1)


def workspaces_in_turn(forward: caffe2_pb2.OperatorDef) -> int:
    """In how many workspaces steps of a RecurrentNetwork operator without a backward step take turns."""
    usual = WORKSPACES_IN_TURN_OF_EXECUTOR if integer(forward, ENABLE, 0) else WORKSPACES_IN_TURN
    return integer(forward, WORKSPACES, usual)


def _read(net: Any, prefix: Any) -> List[Loop]:
    types, values = Problems("retrieve_step_blobs"), Problems("retrieve_step_blobs")
    proto = read_net("net", net, types)
    if not isinstance(prefix, str):
        types.add("prefix must be a string; got {}", given(prefix))
    types.raise_if_any(TypeError)
    assert proto is not None
    loops = list(read_loops(proto).values())
    if not loops and any(map(stands_for_loop, proto.op)):
        note_no_loops("net '{}'".format(proto.name), proto, values)
    not_run = [loop for loop in loops if not has_run(loop)]
    if not_run:
        listed = names(loop.workspaces for loop in not_run)
        values.add("net '{}' has not run in this workspace; there is nothing in {}", proto.name, listed)
    for loop in loops:
        if loop not in not_run:
            _check_no_workspace_is_empty(loop, values)
    values.raise_if_any()
    return loops


def _check_no_workspace_is_empty(loop: Loop, problems: Problems) -> None:
    # The engine crashes where it copies a workspace that no step has had.
    workspaces = workspaces_in_turn(loop.forward)
    if not loop.has_backward_step and steps_of_last_run(loop) < workspaces:
        problems.add(
            "loop '{}' is forward only, and ran fewer steps ({}) than it has workspaces ({}): the engine cannot copy "
            "what they keep; run it over a longer sequence, or build it without forward_only",
            loop.name,
            steps_of_last_run(loop),
            workspaces,
        )


def _own_blobs(loop: Loop) -> FrozenSet[str]:
    """What lies in a step's workspace, or is seen from there through a link, but for the step's number."""
    return frozenset(loop.written.union(link.inner for link in loop.links) - {loop.timestep})


def _fetch(workspaces: str, prefix: str, listing: str) -> List[bytes]:
    # Whatever device the caller is about to build for.
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CPU)):
        fetcher = core.CreateOperator(
            "RecurrentNetworkBlobFetcher",
            [core.BlobReference(workspaces)],
            [core.BlobReference(listing)],
            prefix=prefix,
        )
    workspace.RunOperatorOnce(fetcher)
    fetched: List[bytes] = workspace.FetchBlob(listing).tolist()
    return fetched


def _elements(sizes: Tuple[int, ...]) -> int:
    return functools.reduce(operator.mul, sizes, 1)
