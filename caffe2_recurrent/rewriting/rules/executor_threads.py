"""How many threads the RNN executor takes, and whether it pays at all."""

import copy
from typing import Iterable, Optional

from caffe2_recurrent.executor import ENABLE, set_rnn_executor_config
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.rewriting import loop_trial, passes
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.rules.backward_loop import BackwardLoop
from caffe2_recurrent.rewriting.rules.chained_steps import ChainedSteps
from caffe2_recurrent.rewriting.rules.one_workspace import OneWorkspace
from caffe2_recurrent.rewriting.rules.unrolled_steps import UnrolledSteps
from caffe2_recurrent.rewriting.steps import step_counts
from caffe2_recurrent.rewriting.steps.overlap import THREADS, take_executor_off, why_steps_may_overlap
from caffe2_recurrent.rewriting.trials import trial

# From here on operators are worth several threads each, which those of the executor do not get. On one thread the
# executor gains nothing with states of this size; with two, an LSTM of 32 x 256 trains in half the time without it.
MANY_ELEMENTS = 8192
ON, OFF = "one thread", "off"
# What may apply to loops without the executor, if it was chosen too.
WITHOUT_IT = (BackwardLoop(), OneWorkspace(), UnrolledSteps(), ChainedSteps())


class ExecutorThreads(Rule):
    """RNN executor with four threads    =>    with one, where each step waits for the one before; or off

    The executor runs steps side by side. Where every state depends on every other one there is nothing to run side by
    side, and its threads hand the step's operators to each other, each with a cache of its own. And each brings threads
    of OpenMP, so that there are more than cores, and they wait for each other. It goes off for large states, and unless
    a trial of the loop finds it faster with one thread than without the executor and with the rules that then apply.
    That it may be: a net of type `simple`, as steps are, prepares a line of log for each operator that it runs, wanted
    or not, which the executor does not. What `set_rnn_executor_config` has set stays.

    Source: SimpleNet::Run in caffe2/core/net_simple.cc.
    """

    name = "executor_threads"

    def sites(self, loop: Loop) -> Iterable[Site]:
        enabled = integer(loop.forward, ENABLE, 0)
        if enabled and argument(loop.forward, THREADS) is None:
            yield Site("RNN executor", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        return why_steps_may_overlap(loop)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        if _goes_off(loop, sizes):
            take_executor_off(loop)
        else:
            _give_one_thread(loop)


def _give_one_thread(loop: Loop) -> None:
    for operator in loop.outer_operators:
        set_rnn_executor_config(operator, num_threads=1)


def _goes_off(loop: Loop, sizes: Sizes) -> bool:
    elements = step_counts.elements(loop, sizes)
    if elements is None:
        return False
    if elements >= MANY_ELEMENTS:
        return True
    if sizes.steps(loop) is None or not trial.are_wanted():
        return False
    on, off = copy.deepcopy(loop), copy.deepcopy(loop)
    _give_one_thread(on)
    take_executor_off(off)
    passes.apply_chosen(WITHOUT_IT, off, sizes)
    found = loop_trial.seconds(loop, {ON: on, OFF: off}, sizes)
    # What cannot be tried is not slower with one thread than it was with four.
    return not isinstance(found, str) and found[OFF].step < found[ON].step
