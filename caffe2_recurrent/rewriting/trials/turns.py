"""What candidates have taken in the turns that they have had, and who may still be the fastest.

On a machine that others use too all takes twice as long now and then, for some milliseconds or for half a second. So
a best time is compared with others only when it has been confirmed, and a turn with those beside it.
"""

import math
from typing import Any, Dict, Iterable, List, Optional

from caffe2_recurrent.rewriting.trials.timing import Seconds

# What takes more than so many times the least has lost.
CLOSE = 1.5
# The same after one turn, of what a slow phase may have met as a whole: what takes less than so many seconds.
DISTANT = 3.0
BRIEF = 0.02
# A time is confirmed by another one that is less than so many times as long.
CONFIRMED = 1.1


class Turns:
    """The times of candidates; `close` are those that have not lost.

    What counts is a step, with its share of what is done once if there are so many `steps`.
    """

    def __init__(self, names: Iterable[Any], steps: Optional[int]) -> None:
        self._steps = steps
        self._found: Dict[Any, List[Seconds]] = {name: [] for name in names}
        self.close: List[Any] = list(self._found)

    def add(self, name: Any, seconds: Seconds) -> None:
        self._found[name].append(seconds)

    def best(self) -> Dict[Any, Seconds]:
        """The best times of all that have had a turn, those that have lost among them."""
        return {
            name: Seconds(min(turn.once for turn in turns), min(turn.step for turn in turns))
            for name, turns in self._found.items()
            if turns
        }

    def of_interest(self) -> float:
        """How long a step may take and be close; it is not known how much is done once before that has been timed."""
        if self._steps is not None:
            return math.inf
        return CLOSE * min((seconds.step for seconds in self.best().values()), default=math.inf)

    def are_confirmed(self) -> bool:
        """Whether each that is close has had its best time twice."""
        for name in self.close:
            first, second = sorted(map(self._cost, self._found[name]))[:2]
            if second > CONFIRMED * first:
                return False
        return True

    def leave_out(self) -> None:
        """Those that are slower by their best times as well as in this turn, which another phase may have met."""
        best = self.best()
        all_turns = {name: self._cost(best[name]) for name in self.close}
        this_turn = {name: self._cost(self._found[name][-1]) for name in self.close}
        is_first = len(self._found[self.close[0]]) == 1
        factor = DISTANT if is_first and min(all_turns.values()) < BRIEF else CLOSE
        self.close = [
            name
            for name in self.close
            if any(costs[name] <= factor * min(costs.values()) for costs in (all_turns, this_turn))
        ]

    def _cost(self, seconds: Seconds) -> float:
        return seconds.step if self._steps is None else seconds.of_step(self._steps)
