"""How many threads the RNN executor takes, and whether it pays at all."""

import functools
from typing import Dict, Iterable, List, Optional

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.executor import ENABLE, set_rnn_executor_config
from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer, set_arguments
from caffe2_recurrent.recurrent import recurrent_net
from caffe2_recurrent.rewriting import trial
from caffe2_recurrent.rewriting.overlap import THREADS, why_steps_may_overlap
from caffe2_recurrent.rewriting.rows import FEATURES
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.subjects import WORKSPACE, Seconds, Subject
from caffe2_recurrent.sizes import Shape, Sizes

# From here on operators are worth several threads each, which those of the executor do not get. On one thread the
# executor gains nothing with states of this size; with two, an LSTM of 32 x 256 trains in half the time without it.
MANY_ELEMENTS = 8192
# A trial must be faster by this factor with the executor for it to stay: what its thread takes to wake up varies, and
# is more when the machine is busy. With threads set by `torch.set_num_threads` alone, trials of the same loop said 0.6
# to 1.2 times as fast, and once a net took 15 ms in place of 9.
GAIN = 1.2
# Steps of a trial; with more, time is in proportion to them.
ENOUGH = 50


class ExecutorThreads(Rule):
    """RNN executor with four threads    =>    with one, where each step waits for the one before; or off

    The executor runs steps side by side. Where every state depends on every other one there is nothing to run side by
    side, and its threads hand the step's operators to each other, each with a cache of its own. And each brings threads
    of OpenMP, so that there are more than cores, and they wait for each other. It goes off for large states, and unless
    a trial finds it faster: of a small loop with states of these sizes. What `set_rnn_executor_config` has set stays.
    """

    name = "executor_threads"

    def sites(self, loop: Loop) -> Iterable[Site]:
        enabled = integer(loop.forward, ENABLE, 0)
        if enabled and argument(loop.forward, THREADS) is None:
            yield Site("RNN executor", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        return why_steps_may_overlap(loop)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        goes_off = _goes_off(sizes.steps(loop), sizes.batch(loop), _largest(loop, sizes))
        for operator in loop.outer_operators:
            enabled = argument(operator, ENABLE)
            if enabled is not None and goes_off:
                enabled.i = 0
            else:
                set_rnn_executor_config(operator, num_threads=1)


def _largest(loop: Loop, sizes: Sizes) -> Optional[int]:
    """D of the largest state that is known; those that no step reads are none."""
    read = {link.outer for link in loop.links if link.inner not in loop.written}
    shapes = (sizes.shape(state.outer_initial) for state in loop.states if state.outer_states in read)
    return max((shape[-1] for shape in shapes if shape), default=None)


def _goes_off(steps: Optional[int], batch: Optional[int], size: Optional[int]) -> bool:
    if batch is None or size is None:
        return False
    if batch * size >= MANY_ELEMENTS:
        return True
    if steps is None:
        return False
    found: Dict[bool, Seconds] = _tried(min(steps, ENOUGH), batch, size)
    return GAIN * found[True].step > found[False].step


@trial.remembered
def _tried(steps: int, batch: int, size: int) -> Dict[bool, Seconds]:
    """With and without the executor."""
    subject = functools.partial(_subject, steps, batch, size)
    # The executor's threads are there as long as its net is.
    return trial.in_turn(
        {executor: functools.partial(subject, executor) for executor in (True, False)}, one_by_one=True
    )


def _subject(steps: int, batch: int, size: int, executor: bool) -> Subject:
    """h_t = tanh(columns of h W + b + x_t), with as many columns as an LSTM has for its gates.

    The sequence is a product too: after such a one the threads of OpenMP are awake.
    """
    columns = 4 * size
    shapes: Dict[str, Shape] = {"rows": (steps, batch, size), "h_0": (1, batch, size)}
    shapes.update({"w": (columns, size), "b": (columns,)})
    # Whatever scopes the caller is in.
    with core.NameScope("", reset=True), core.DeviceScope(core.DeviceOption(caffe2_pb2.CPU)):
        operators = _small_loop()
    set_arguments(operators[-1], {ENABLE: int(executor)})
    set_rnn_executor_config(operators[-1], num_threads=1)
    return Subject(operators, shapes)


def _small_loop() -> List[caffe2_pb2.OperatorDef]:
    net, cell_net = core.Net(WORKSPACE), core.Net(WORKSPACE + "_step")
    x, h = cell_net.AddScopedExternalInputs("x_t", "h_prev")
    total = cell_net.Sum([cell_net.FC([h, "w", "b"], "product", axis=FEATURES), x], "total")
    parts = cell_net.Split(total, ["part_{}".format(part) for part in range(4)], axis=FEATURES)
    sequence = net.FC(["rows", "w", "b"], "sequence", axis=FEATURES)
    links = {h: cell_net.Tanh(parts[0], "h_t")}
    recurrent_net(net, cell_net, [(x, sequence)], [(h, "h_0")], links, scope="trial", forward_only=True)
    return list(net.Proto().op)
