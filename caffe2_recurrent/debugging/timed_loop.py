"""Runs of a loop on copies of its blobs, in a workspace of its own, with clocks around its operators or in its steps.

The three ways of running it take turns, so that what else goes on in the machine meets them all.
"""

from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.debugging.clock import Clocked, Reading, with_clock
from caffe2_recurrent.executor import switch_off
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import STEP_NETS, set_arguments
from caffe2_recurrent.operator_arguments import net as net_argument
from caffe2_recurrent.operators import OPERATOR, copied
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.rewriting.products import thread_numbers
from caffe2_recurrent.scratch_workspace import scratch_workspace
from caffe2_recurrent.wiring import link_arguments

# How the engine describes a blob that nothing has been put into.
EMPTY = b"nullptr (uninitialized)"
WORKSPACE = "caffe2_recurrent_step_times"
Blobs = Dict[str, np.ndarray]


class Run(NamedTuple):
    """Times of one turn: of the loop's operators (the gradient operator is the second) as the loop is set; of the same
    with their steps one after the other; of the operators in the step and in the backward step."""

    as_set: Reading
    in_order: Reading
    steps: List[Reading]


class _Way(NamedTuple):
    """A net around a loop, and the clocks in it."""

    net: caffe2_pb2.NetDef
    clocks: List[Clocked]


def copied_blobs(loop: Loop, problems: Problems) -> Blobs:
    """Copies of the outer blobs that a loop reads; notes what is missing."""
    operators = loop.outer_operators
    made = {blob for operator in operators for blob in operator.output}
    made.update(state.outer_states for state in loop.states)
    if loop.gradient is not None:
        # The engine wants to find the gradients of further sequences, in their size.
        made.difference_update(loop.gradient.others)
    # What is laid out for oneDNN cannot be copied, but laid out again.
    laying_out = loop.surroundings.laying_out
    made.update(blob for operator in laying_out for blob in operator.output)
    read = [blob for operator in [*laying_out, *operators] for blob in operator.input] + sorted(loop.references)
    wanted = [blob for blob in dict.fromkeys(read) if blob not in made]
    linked = [link.outer for link in loop.all_links if link.outer not in made]
    there = {blob: workspace.FetchBlob(blob) for blob in wanted + linked if workspace.HasBlob(blob)}
    filled = {blob: value for blob, value in there.items() if not _is_empty(value)}
    missing = [blob for blob in wanted if blob not in filled]
    if missing:
        problems.add(
            "loop '{}' has not run in this workspace, or only in an optimised copy of the net "
            "(install(optimize=True)): there is no {}",
            loop.name,
            names(missing),
        )
    tensors = {blob: value for blob, value in filled.items() if isinstance(value, np.ndarray)}
    if len(tensors) < len(filled):
        others = [blob for blob in filled if blob not in tensors]
        problems.add("loop '{}' reads {}, where there is no tensor to copy", loop.name, names(others))
    return tensors


def _is_empty(fetched: Any) -> bool:
    """Whether a blob is there only because a net that would fill it has been created."""
    return isinstance(fetched, bytes) and EMPTY in fetched


def timed_runs(loop: Loop, blobs: Blobs, runs: int) -> List[Run]:
    """`runs` turns, after one that does not count because it makes the steps."""
    ways = [_around_operators(loop, "as_set"), _around_operators(loop, "in_order", executor=False), _in_steps(loop)]
    found = []
    with scratch_workspace(WORKSPACE):
        for name, value in blobs.items():
            workspace.FeedBlob(name, value)
        # As in front of the loop, where steps do not do it themselves.
        for operator in [*thread_numbers.set_at_once("number"), *loop.surroundings.laying_out]:
            workspace.RunOperatorOnce(operator)
        for blob in thread_numbers.to_be_set(loop.operators):
            workspace.FeedBlob(blob, np.ones(1, dtype=bool))
        for way in ways:
            way.net.external_input.extend(blobs)
            way.net.external_input.extend(blob for operator in loop.surroundings.laying_out for blob in operator.output)
            _start(way)
            workspace.CreateNet(way.net)
        for _ in range(1 + runs):
            as_set, in_order, steps = (_run(way) for way in ways)
            found.append(Run(as_set[0], in_order[0], steps))
    return found[1:]


def _start(way: _Way) -> None:
    for clock in way.clocks:
        clock.start()


def _run(way: _Way) -> List[Reading]:
    _start(way)
    workspace.RunNet(way.net.name)
    return [clock.read() for clock in way.clocks]


def _around_operators(loop: Loop, name: str, executor: bool = True) -> _Way:
    operators = [copied(operator) for operator in loop.outer_operators]
    if not executor:
        for operator in operators:
            switch_off(operator)
    clocked = with_clock(operators, loop.names)
    return _way(name, clocked.operators, [clocked])


def _in_steps(loop: Loop) -> _Way:
    operators, clocks = [], []
    for operator, name, step in zip(map(copied, loop.outer_operators), STEP_NETS, loop.steps):
        step_net = net_argument(operator, name)
        clocked = with_clock(step, loop.names)
        del step_net.op[:]
        step_net.op.extend(clocked.operators)
        step_net.external_input.extend(clocked.outer)
        # The engine finds the nets of a step by their names; those without a clock are there as well.
        step_net.name += "_with_clock"
        step_net.type = "simple"
        set_arguments(operator, {name: step_net})
        if operator.type == OPERATOR:
            # Operators of a chain may have made them.
            set_arguments(operator, link_arguments("link", loop.links))
        switch_off(operator)
        operators.append(operator)
        clocks.append(clocked)
    return _way("in_steps", operators, clocks)


def _way(name: str, operators: Sequence[caffe2_pb2.OperatorDef], clocks: List[Clocked]) -> _Way:
    outer = [blob for clock in clocks for blob in clock.outer]
    return _Way(caffe2_pb2.NetDef(name=name, op=operators, external_input=outer), clocks)
