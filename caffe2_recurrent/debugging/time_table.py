"""What `step_times` found, as a value that prints as a table."""

from typing import List, NamedTuple, Sequence, Tuple

STEPS = ("step", "backward step")


class OperatorTime(NamedTuple):
    """The time of one operator of a step.

    `step` is 'step' or 'backward step', `position` that among the operators there, `calls` how often it ran in one run
    of the loop, `microseconds` what one call took.
    """

    step: str
    position: int
    type: str
    outputs: Tuple[str, ...]
    calls: int
    microseconds: float

    @property
    def microseconds_per_run(self) -> float:
        return self.calls * self.microseconds


class LoopTime(NamedTuple):
    """The time of one run of a loop's operator, in microseconds.

    `in_order`: its operators one after the other, as `step_times` measures them, without the clock between them.
    `as_set`: as the net runs it, which for most nets is by the RNN executor.
    """

    step: str
    type: str
    in_order: float
    as_set: float


class StepTimes(NamedTuple):
    """The times of a loop's operators, in the order in which they run, and of the loop as a whole.

    Times are medians over the runs. `clock` is what two readings of the clock in a row take, in microseconds; each
    operator's time includes as much.
    """

    loop: str
    steps: int
    runs: int
    clock: float
    operators: Tuple[OperatorTime, ...]
    loops: Tuple[LoopTime, ...]

    @property
    def slowest(self) -> List[OperatorTime]:
        """The operators by their time in one run, the slowest first."""
        return sorted(self.operators, key=lambda operator: -operator.microseconds_per_run)

    def share(self, operator: OperatorTime) -> float:
        """The part that an operator has in the time of all operators, those of both steps: 0 to 1."""
        return operator.microseconds_per_run / sum(other.microseconds_per_run for other in self.operators)

    def of_operators(self, step: str) -> float:
        """What all operators of 'step' or 'backward step' take together in one run, in microseconds."""
        return sum(operator.microseconds_per_run for operator in self.operators if operator.step == step)

    def __str__(self) -> str:
        head = "loop '{}', {} steps; microseconds, medians of {} runs".format(self.loop, self.steps, self.runs)
        operators = [("per call", "calls", "per run", "share", "operator")]
        operators += [
            (
                "{:.1f}".format(operator.microseconds),
                str(operator.calls),
                "{:.0f}".format(operator.microseconds_per_run),
                "{:.1%}".format(self.share(operator)),
                "{} {}: {} -> {}".format(
                    operator.step, operator.position, operator.type, ", ".join(operator.outputs) or "nothing"
                ),
            )
            for operator in self.slowest
        ]
        loops = [("operators", "in order", "as set", "of the loop")]
        loops += [
            (
                "{:.0f}".format(self.of_operators(loop.step)),
                "{:.0f}".format(loop.in_order),
                "{:.0f}".format(loop.as_set),
                loop.type,
            )
            for loop in self.loops
        ]
        clock = "Each operator's time includes a reading of the clock, {:.2f} microseconds.".format(self.clock)
        return "\n".join([head, "", *_aligned(operators), "", *_aligned(loops), "", clock])


def _aligned(rows: Sequence[Tuple[str, ...]]) -> List[str]:
    """Columns of numbers to the right, the last column as it is."""
    widths = [max(map(len, column)) for column in zip(*rows)][:-1]
    return ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
