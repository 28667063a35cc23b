"""Whether the RNN executor can run steps of a loop side by side, and taking it off."""

from typing import Dict, Optional, Set

from caffe2_recurrent.executor import ENABLE, THREADS
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import argument, integer, remove_arguments


def has_threads_given(loop: Loop) -> bool:
    """Whether somebody has said how many threads the executor is to have."""
    return bool(integer(loop.forward, ENABLE, 0)) and argument(loop.forward, THREADS) is not None


def why_executor_stays(loop: Loop) -> Optional[str]:
    """That it has a number of threads, of the caller's or of `executor_threads`, which rules leave as it is."""
    if not has_threads_given(loop):
        return None
    threads = integer(loop.forward, THREADS, 0)
    return "the RNN executor runs its steps, with {}".format(
        "one thread" if threads == 1 else "{} threads".format(threads)
    )


def why_executor_pays(loop: Loop) -> Optional[str]:
    """Why it would be a loss to take the executor off; None if it is off, or steps have to wait for each other."""
    reason = why_steps_may_overlap(loop) if integer(loop.forward, ENABLE, 0) else None
    return None if reason is None else "it would take the RNN executor off: {}".format(reason)


def take_executor_off(loop: Loop) -> None:
    """For good: without a setting of it, who turns it on for all loops that have one leaves this one alone.

    It would write what steps share while an operator reads a view of that, of which it does not know.
    """
    for operator in loop.outer_operators:
        remove_arguments(operator, [ENABLE])


def why_steps_may_overlap(loop: Loop) -> Optional[str]:
    """A state that leaves room for it; None where each step has to wait for all of the one before."""
    reached = _reached(loop)
    for state, others in reached.items():
        missing = set(reached) - others
        if missing:
            return "'{}' does not depend on '{}', so steps may run side by side".format(state, min(missing))
    return None


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
