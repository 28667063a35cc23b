"""From ln p of the next phoneme to pronunciations: beam search, which with a beam of one is greedy.

Of the beginnings of a pronunciation it keeps the likeliest few, lets each go on with every phoneme, keeps the
likeliest few of these, and so on until the best one has ended: going on makes none likelier. The likeliest of all may
have been dropped on the way, the more rarely the wider the beam is.
"""

from typing import Callable, List, NamedTuple, Tuple

import numpy as np

# From (rows, previous) to ln p of what comes next, [R, P]: row r goes on where row rows[r] of the step before had come
# to, and reads symbol previous[r]. Before the first step there is one row for each word.
Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Hypothesis(NamedTuple):
    """The beginning of a pronunciation, or all of it once it has ended."""

    score: float  # ln p
    symbols: Tuple[int, ...]  # without the boundary
    ended: bool
    row: int  # of the step that said the last symbol


def beam_search(step: Step, words: int, width: int, boundary: int, longest: int) -> List[Tuple[int, ...]]:
    """The symbols of the best hypothesis for each word; one that does not end is cut off after `longest` symbols."""
    beams = [[Hypothesis(0.0, (), False, word)] for word in range(words)]
    for _ in range(longest):
        going_on = [[one for one in beam if not one.ended] if not beam[0].ended else [] for beam in beams]
        live = [one for beam in going_on for one in beam]
        if not live:
            break
        read = [one.symbols[-1] if one.symbols else boundary for one in live]
        scores = step(np.array([one.row for one in live]), np.array(read))
        likeliest = np.argsort(-scores, axis=1, kind="stable")[:, :width]
        row = 0
        for word, beam in enumerate(beams):
            longer = [one for one in beam if one.ended]
            for one in going_on[word]:
                longer += [extended(one, symbol, scores[row, symbol], boundary, row) for symbol in likeliest[row]]
                row += 1
            beams[word] = sorted(longer, key=lambda one: -one.score)[:width]
    return [beam[0].symbols for beam in beams]


def extended(one: Hypothesis, symbol: int, score: float, boundary: int, row: int) -> Hypothesis:
    ended = symbol == boundary
    return Hypothesis(one.score + score, one.symbols if ended else (*one.symbols, int(symbol)), ended, row)
