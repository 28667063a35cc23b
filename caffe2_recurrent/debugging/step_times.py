"""How long each operator of a step takes, in the loop where it runs.

None of the engine's own ways of measuring gives this as numbers (torch 1.10.2). `TimeObserver` has one mean over all
operators of a net. `ProfileObserver` reaches into the steps, but writes to the log of the process, at a level that is
set when the process starts; so does the net type `prof_dag`, for each step by itself. But the engine has an operator
that reads the clock:

    loop -> on copies of its blobs (timed_loop.py), as it is, and with the clock in its steps (clock.py) -> times

With the clock, steps run one after the other, without the RNN executor: only then is what happens between two readings
one operator.
"""

from typing import Sequence, Tuple

import numpy as np
from caffe2.proto import caffe2_pb2

from caffe2_recurrent.arguments import is_integer
from caffe2_recurrent.debugging.time_table import STEPS, LoopTime, OperatorTime, StepTimes
from caffe2_recurrent.debugging.timed_loop import Run, copied_blobs, timed_runs
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.selection import AnyLoop, choose_loop
from caffe2_recurrent.nets import AnyNet
from caffe2_recurrent.problems import Problems, given

CALLER = "step_times"


def step_times(net: AnyNet, loop: AnyLoop = None, runs: int = 10) -> StepTimes:
    """Measure the operators of a loop's step, and of its backward step if `net` has that.

    The loop runs on copies of its blobs in a workspace of its own, `3 * (runs + 1)` times; the current workspace and
    its nets stay as they are. Operators are measured within the loop, while its steps run one after the other, as they
    do without the RNN executor. `print` the result for a table.

    Args:
        net: the net that has run in the current workspace: a `ModelHelper`, a `core.Net` or a `NetDef`.
        loop: which loop, if the net has several: its position among them, from 0 on, or one of its outputs.
        runs: of how many runs to take the median, 1 or more.

    Returns:
        `StepTimes`: the operators in order, or the `slowest` first; and the time of the whole loop. The difference is
        what the engine does beside the operators: links, and in the backward pass sums of parameter gradients.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: `runs` is below 1, the net has not run, the loop runs on a GPU, or reads what is no tensor.

    Source: WallClockTime in caffe2/operators/stats_ops.cc.
    """
    types, values = Problems(CALLER), Problems(CALLER)
    if not is_integer(runs):
        types.add("runs must be a whole number; got {}", given(runs))
    elif runs < 1:
        values.add("runs must be 1 or more; got {}", runs)
    chosen = choose_loop(net, loop, types, values)
    if _is_on_a_gpu(chosen):
        values.add("loop '{}' runs on a GPU, where operators return before they are done", chosen.name)
    blobs = copied_blobs(chosen, values)
    sequence = blobs.get(chosen.inputs[0])
    if sequence is not None and sequence.shape[:1] == (0,):
        values.add("loop '{}' runs over a sequence of no steps", chosen.name)
    values.raise_if_any()
    found = timed_runs(chosen, blobs, int(runs))
    return StepTimes(
        loop=chosen.name,
        steps=found[0].steps[0].calls,
        runs=int(runs),
        clock=float(np.median([step.clock / step.calls for run in found for step in run.steps])),
        operators=_operator_times(chosen, found),
        loops=_loop_times(chosen, found),
    )


def _is_on_a_gpu(loop: Loop) -> bool:
    operators = [loop.forward, *(operator for step in loop.steps for operator in step)]
    return any(operator.device_option.device_type not in (caffe2_pb2.CPU, caffe2_pb2.IDEEP) for operator in operators)


def _operator_times(loop: Loop, runs: Sequence[Run]) -> Tuple[OperatorTime, ...]:
    times = []
    for index, (name, operators) in enumerate(zip(STEPS, loop.steps)):
        readings = [run.steps[index] for run in runs]
        calls = readings[0].calls
        per_call = np.median([reading.operators / calls for reading in readings], axis=0)
        for position, (operator, microseconds) in enumerate(zip(operators, per_call)):
            outputs = tuple(operator.output)
            times.append(OperatorTime(name, position, operator.type, outputs, calls, float(microseconds)))
    return tuple(times)


def _loop_times(loop: Loop, runs: Sequence[Run]) -> Tuple[LoopTime, ...]:
    types = [operator.type for operator in loop.outer_operators]
    in_order = np.median([run.in_order.operators for run in runs], axis=0)
    as_set = np.median([run.as_set.operators for run in runs], axis=0)
    return tuple(LoopTime(*values) for values in zip(STEPS, types, in_order.tolist(), as_set.tolist()))
