"""The baseline, without a network: each letter is said as it most often is between the same neighbours.

Training words are aligned, letter by letter, with their phonemes. A letter then stands for what it most often stood
for there among the same four letters to either side; where these were never seen around it, among the same three,
and so on down to the letter alone.
"""

from typing import Dict, List, NamedTuple, Sequence

import numpy as np

from letter_alignment import align, phonemes_of

RADII = (4, 3, 2, 1, 0)  # letters to either side, widest first


class Table(NamedTuple):
    contexts: np.ndarray  # int64, ascending
    chunks: np.ndarray  # the most frequent one of each context


class LetterContext:
    """`alphabet` is how many different letters there are, `kinds` how many different phonemes."""

    def __init__(
        self, letters: Sequence[np.ndarray], phonemes: Sequence[np.ndarray], alphabet: int, kinds: int
    ) -> None:
        """Learns from words as ids of letters, and as ids of phonemes."""
        self.alphabet, self.kinds = alphabet, kinds
        chunks = np.concatenate(align(letters, phonemes, kinds))
        self.tables: Dict[int, Table] = {
            radius: most_frequent(self._contexts(letters, radius), chunks) for radius in RADII
        }

    def say(self, letters: Sequence[np.ndarray]) -> List[List[int]]:
        """The ids of the phonemes of each word."""
        chosen = np.full(sum(len(word) for word in letters), -1)
        for radius, table in self.tables.items():
            contexts = self._contexts(letters, radius)
            places = np.searchsorted(table.contexts, contexts).clip(max=len(table.contexts) - 1)
            found = (chosen < 0) & (table.contexts[places] == contexts)
            chosen[found] = table.chunks[places[found]]
        said, start = [], 0
        for word in letters:
            chunks = chosen[start : start + len(word)].clip(min=0)  # a letter never seen is silent
            said.append([phoneme for chunk in chunks for phoneme in phonemes_of(int(chunk), self.kinds)])
            start += len(word)
        return said

    def _contexts(self, letters: Sequence[np.ndarray], radius: int) -> np.ndarray:
        """For each letter of each word, in turn, a number that stands for it and its neighbours."""
        edge = np.zeros(radius, dtype=np.int64)
        line = np.concatenate([part for word in letters for part in (edge, word + 1, edge)])
        (places,) = np.nonzero(line)
        contexts = np.zeros(len(places), dtype=np.int64)
        for offset in range(-radius, radius + 1):
            contexts = contexts * (self.alphabet + 1) + line[places + offset]
        return contexts


def most_frequent(contexts: np.ndarray, chunks: np.ndarray) -> Table:
    """The most frequent chunk of each context; of equally frequent ones that of the lowest number."""
    order = np.lexsort((chunks, contexts))
    contexts, chunks = contexts[order], chunks[order]
    starts = np.flatnonzero(changes(contexts) | changes(chunks))
    counts = np.diff(np.append(starts, len(contexts)))
    contexts, chunks = contexts[starts], chunks[starts]
    order = np.lexsort((chunks, -counts, contexts))
    contexts, chunks = contexts[order], chunks[order]
    first = changes(contexts)
    return Table(contexts[first], chunks[first])


def changes(values: np.ndarray) -> np.ndarray:
    """True where a value is not the one before it, and for the first."""
    return np.append(True, values[1:] != values[:-1])
