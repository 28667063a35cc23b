"""What `optimize` did and what it left alone, with the reasons."""

from collections import Counter
from dataclasses import dataclass
from typing import Dict, NamedTuple, Tuple


class Rewrite(NamedTuple):
    """A place in a loop that a rule has rewritten, or would with `dry_run=False`."""

    rule: str
    loop: str
    what: str


class Refusal(NamedTuple):
    """A place in a loop that a rule is about and has left as it was, and why."""

    rule: str
    loop: str
    what: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The outcome of `optimize`.

    `loops` names the loops by their first output, `rewrites` and `refusals` are in the order in which they were made.
    `trials` says whether anything could be tried out. `counts` maps each rule that was asked for to the number of its
    rewrites, `total` is their sum. `without_gradient` are the loops that have been rewritten with a backward step, but
    no gradient operator in the net: it cannot be added any more.
    """

    loops: Tuple[str, ...]
    rules: Tuple[str, ...]
    rewrites: Tuple[Rewrite, ...]
    refusals: Tuple[Refusal, ...]
    dry_run: bool
    trials: bool
    without_gradient: Tuple[str, ...] = ()

    @property
    def counts(self) -> Dict[str, int]:
        counted = Counter(rewrite.rule for rewrite in self.rewrites)
        return {rule: counted[rule] for rule in self.rules}

    @property
    def total(self) -> int:
        return len(self.rewrites)

    def __str__(self) -> str:
        if not self.loops:
            return "no RecurrentNetwork operator in the net"
        verb = "would be rewritten" if self.dry_run else "rewritten"
        lines = ["{} {} in {}".format(_number(self.total, "place"), verb, _number(len(self.loops), "loop"))]
        if not self.trials:
            lines.append("nothing was tried out: what only a trial can tell counts as no faster")
        for loop in self.loops:
            lines.append("loop {}".format(loop))
            if loop in self.without_gradient:
                lines.append("  there is no gradient operator of it, and none can be added afterwards")
            for rewrite in self.rewrites:
                if rewrite.loop == loop:
                    lines.append("  {}: {}".format(rewrite.rule, rewrite.what))
            refusals = [refusal for refusal in self.refusals if refusal.loop == loop]
            lines += ["  left alone:"] if refusals else []
            lines += ["    {}: {}: {}".format(refusal.rule, refusal.what, refusal.reason) for refusal in refusals]
        return "\n".join(lines)


def _number(count: int, what: str) -> str:
    return "{} {}{}".format(count or "no", what, "" if count == 1 else "s")
