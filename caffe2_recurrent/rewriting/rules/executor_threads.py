"""How many threads the RNN executor takes, and whether it pays at all."""

from typing import Iterable, Optional

from caffe2_recurrent.executor import set_rnn_executor_config
from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.rewriting.overlap import ENABLE, THREADS, why_steps_may_overlap
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

# From here on operators are worth several threads each, which those of the executor do not get. On one thread the
# executor gains nothing with states of this size; with two, an LSTM of 32 x 256 trains in half the time without it.
MANY_ELEMENTS = 8192


class ExecutorThreads(Rule):
    """RNN executor with four threads    =>    with one, where each step waits for the one before; off for large states

    The executor runs steps side by side. Where every state depends on every other one there is nothing to run side by
    side, and its threads hand the step's operators to each other, each with a cache of its own. What
    `set_rnn_executor_config` has set stays.
    """

    name = "executor_threads"

    def sites(self, loop: Loop) -> Iterable[Site]:
        enabled = integer(loop.forward, ENABLE, 0)
        if enabled and argument(loop.forward, THREADS) is None:
            yield Site("RNN executor", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        return why_steps_may_overlap(loop)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        for operator in loop.outer_operators:
            enabled = argument(operator, ENABLE)
            if enabled is not None and _elements(loop, sizes) >= MANY_ELEMENTS:
                enabled.i = 0
            else:
                set_rnn_executor_config(operator, num_threads=1)


def _elements(loop: Loop, sizes: Sizes) -> int:
    """How many elements the largest state has; 0 if that is not known."""
    widths = [shape[-1] for shape in (sizes.shape(state.outer_initial) for state in loop.states) if shape]
    return (sizes.batch(loop) or 0) * max(widths, default=0)
