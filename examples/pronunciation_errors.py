"""How wrong pronunciations are: edit distances, and the rates made of them."""

from typing import NamedTuple, Sequence, Tuple

from spelling_dictionary import Entry, Pronunciation


class Rates(NamedTuple):
    """Shares from 0 to 1; the first can be above 1."""

    phoneme_errors: float  # phonemes to insert, delete or replace, of those of the references
    right_words: float


def distance(said: Sequence[str], reference: Sequence[str]) -> int:
    """How many phonemes must be inserted, deleted or replaced to make one of the other."""
    above = list(range(len(reference) + 1))
    for row, phoneme in enumerate(said, start=1):
        current = [row]
        for column, expected in enumerate(reference):
            current.append(min(above[column] + (phoneme != expected), above[column + 1] + 1, current[column] + 1))
        above = current
    return above[-1]


def nearest(said: Pronunciation, entry: Entry) -> Tuple[int, Pronunciation]:
    """The least distance to a listed pronunciation of the word, and the first one at that distance."""
    if said in entry.pronunciations:
        return 0, said
    return min(((distance(said, listed), listed) for listed in entry.pronunciations), key=lambda pair: pair[0])


def rates(said: Sequence[Pronunciation], entries: Sequence[Entry]) -> Rates:
    """Each word is compared with the listed pronunciation that is nearest to what was said."""
    compared = [nearest(one, entry) for one, entry in zip(said, entries)]
    errors = sum(count for count, _ in compared)
    return Rates(
        errors / sum(len(reference) for _, reference in compared),
        sum(count == 0 for count, _ in compared) / len(compared),
    )
