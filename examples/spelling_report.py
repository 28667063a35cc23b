"""What is said of pronunciations, in words: of one, and of how many are right."""

from typing import List

from pronunciation_errors import Rates
from spelling_dictionary import Entry, Pronunciation


def verdict(entry: Entry, said: Pronunciation) -> str:
    if not entry.pronunciations:
        return "not listed"
    return "right" if said in entry.pronunciations else "wrong"


def fields(entry: Entry, said: Pronunciation) -> List[str]:
    """The word, what was said, whether that is right, and what is listed."""
    return [entry.word, " ".join(said), verdict(entry, said), " or ".join(map(" ".join, entry.pronunciations))]


def comparison(reached: Rates, baseline: Rates) -> List[str]:
    """Two lines: the rates, and how far they are from those of the baseline."""
    templates = ["phoneme error rate {:.1%}", "{:.1%} of the words right"]
    return [
        "{}, {:.1f} points {} the letter-context baseline of {:.1%}".format(
            template.format(rate), 100 * abs(rate - other), "below" if rate < other else "above", other
        )
        for template, rate, other in zip(templates, reached, baseline)
    ]
