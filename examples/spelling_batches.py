"""Words and pronunciations as ids, and training words side by side in batches."""

from typing import List, NamedTuple, Sequence

import numpy as np

from spelling_dictionary import Dictionary, Pronunciation


class Codes:
    """Ids of letters and phonemes: their places in the dictionary's lists."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.letters = {letter: number for number, letter in enumerate(dictionary.letters)}
        self.phonemes = {phoneme: number for number, phoneme in enumerate(dictionary.phonemes)}
        self._phonemes = dictionary.phonemes

    @property
    def boundary(self) -> int:
        """The id of what stands before and behind a pronunciation: one more than those of the phonemes."""
        return len(self.phonemes)

    def word(self, word: str) -> np.ndarray:
        return np.array([self.letters[letter] for letter in word])

    def pronunciation(self, phonemes: Pronunciation) -> np.ndarray:
        return np.array([self.phonemes[phoneme] for phoneme in phonemes])

    def said(self, ids: Sequence[int]) -> Pronunciation:
        return tuple(self._phonemes[number] for number in ids)


class Padded(NamedTuple):
    """Sequences of ids side by side; past the end of each stands 0."""

    ids: np.ndarray  # [longest, N]
    lengths: np.ndarray  # [N] int32


class Batch(NamedTuple):
    letters: Padded
    phonemes: Padded  # with the boundary behind each pronunciation


def side_by_side(sequences: Sequence[np.ndarray]) -> Padded:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    ids = np.zeros([lengths.max(), len(sequences)], dtype=np.int64)
    for column, sequence in enumerate(sequences):
        ids[: len(sequence), column] = sequence
    return Padded(ids, lengths)


class Batches:
    """Training words in batches of nearly equal lengths, so that little of a batch is padding.

    In each epoch the batches, and the words of equal lengths, come in another order, which depends on the seed and on
    the number of the epoch alone.
    """

    def __init__(
        self, words: Sequence[np.ndarray], pronunciations: Sequence[np.ndarray], boundary: int, size: int, seed: int
    ) -> None:
        self._words = words
        self._pronunciations = [np.append(said, boundary) for said in pronunciations]
        self._size, self._seed = size, seed
        self._letters = np.array([len(word) for word in words])
        self._phonemes = np.array([len(said) for said in self._pronunciations])

    def __len__(self) -> int:
        """How many there are in an epoch."""
        return -(-len(self._words) // self._size)

    def epoch(self, number: int) -> List[np.ndarray]:
        """For each batch of the epoch the places of its words."""
        random = np.random.RandomState([self._seed, number])
        by_length = self._by_length(random.permutation(len(self._words)))
        batches = np.split(by_length, range(self._size, len(by_length), self._size))
        return [batches[place] for place in random.permutation(len(batches))]

    def batch(self, places: np.ndarray) -> Batch:
        return Batch(
            side_by_side([self._words[place] for place in places]),
            side_by_side([self._pronunciations[place] for place in places]),
        )

    def typical(self) -> Batch:
        """A batch of the words that are neither short nor long."""
        start = max(0, (len(self._words) - self._size) // 2)
        return self.batch(self._by_length(np.arange(len(self._words)))[start : start + self._size])

    def _by_length(self, places: np.ndarray) -> np.ndarray:
        return places[np.lexsort((self._phonemes[places], self._letters[places]))]
