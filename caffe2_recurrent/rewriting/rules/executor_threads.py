"""How many threads the RNN executor takes, and whether it pays at all."""

from typing import Dict, Iterable, Optional, Set

from caffe2_recurrent.executor import set_rnn_executor_config
from caffe2_recurrent.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.sizes import Sizes

THREADS = "rnn_executor.num_threads"
ENABLE = "enable_rnn_executor"
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
        reached = _reached(loop)
        for state, others in reached.items():
            missing = set(reached) - others
            if missing:
                return "'{}' does not depend on '{}', so steps may run side by side".format(state, min(missing))
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        for operator in [loop.forward] + ([loop.gradient.operator] if loop.gradient is not None else []):
            enabled = argument(operator, ENABLE)
            if enabled is not None and _elements(loop, sizes) >= MANY_ELEMENTS:
                enabled.i = 0
            else:
                set_rnn_executor_config(operator, num_threads=1)


def _elements(loop: Loop, sizes: Sizes) -> int:
    """How many elements the largest state has; 0 if that is not known."""
    widths = [shape[-1] for shape in (sizes.shape(state.outer_initial) for state in loop.states) if shape]
    return (sizes.batch(loop) or 0) * max(widths, default=0)


def _reached(loop: Loop) -> Dict[str, Set[str]]:
    """For each state blob the state blobs whose earlier values it depends on, over any number of steps."""
    states = {state.outer_states for state in loop.states}
    before = {link.inner: {link.outer} for link in loop.links if link.outer in states and link.offset == 0}
    depends: Dict[str, Set[str]] = dict(before)
    for operator in loop.operators:
        sources = set().union(*(depends.get(blob, set()) for blob in operator.input))
        for blob in operator.output:
            depends[blob] = sources
    after = {link.outer: link.inner for link in loop.links if link.outer in states and link.offset == 1}
    # A buffer is written by each step and read by none.
    carried = {outer for outers in before.values() for outer in outers if outer in after}
    reached = {outer: depends.get(after[outer], set()) & carried for outer in carried}
    for _ in reached:
        reached = {outer: found.union(*(reached[other] for other in found)) for outer, found in reached.items()}
    return reached
