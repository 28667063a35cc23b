"""Text as numbers: reading a corpus, splitting it, cutting it into columns, and its unigram entropy."""

import hashlib
from typing import List, NamedTuple, Optional

import numpy as np

from example_errors import CorpusError

TRAINING_TENTHS = 9  # of ten; the rest, the end of the text, is held out
UNKNOWN = 0  # id of every character that the training part does not have
UNKNOWN_GLYPH = "\ufffd"


class Corpus(NamedTuple):
    name: str
    fingerprint: str  # SHA-256 of the text, in hex
    alphabet: str  # the character with id i stands at i
    training: np.ndarray  # ids, [characters] int32
    held_out: np.ndarray  # ids, [characters] int32

    @property
    def size(self) -> int:
        """How many characters the whole text has."""
        return len(self.training) + len(self.held_out)


def load(path: Optional[str]) -> Corpus:
    """The corpus in the UTF-8 file `path`, or the default one for None."""
    if path is None:
        return from_text("the standard library's pydoc_data.topics", library_prose())
    return from_text(path, read_text(path))


def library_prose() -> str:
    """The language reference that Python carries for `help()`, each paragraph once.

    A fifth of the topics' text also stands in another topic. Left in, it would be in the training part and in
    the held-out part, and the held-out figure would look better than it is.
    """
    from pydoc_data.topics import topics

    paragraphs = (part.strip("\n") for title in sorted(topics) for part in topics[title].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as stream:
            text = stream.read()
    except OSError as error:
        raise CorpusError("cannot read corpus {}: {}".format(path, error.strerror)) from error
    except UnicodeDecodeError as error:
        raise CorpusError("corpus {} is not UTF-8 text: {}".format(path, error.reason)) from error
    if not text:
        raise CorpusError("corpus {} is empty".format(path))
    return text


def from_text(name: str, text: str) -> Corpus:
    cut = len(text) * TRAINING_TENTHS // 10
    alphabet = UNKNOWN_GLYPH + "".join(sorted(set(text[:cut])))
    ids = {character: number for number, character in enumerate(alphabet) if number != UNKNOWN}
    numbers = np.array([ids.get(character, UNKNOWN) for character in text], dtype=np.int32)
    fingerprint = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Corpus(name, fingerprint, alphabet, numbers[:cut], numbers[cut:])


def require_length(corpus: Corpus, batch: int, steps: int) -> None:
    """Refuses a corpus whose training part does not fill `batch` columns of `steps` characters."""
    training_needed = batch * steps + 1
    needed = max(-(-training_needed * 10 // TRAINING_TENTHS), 11)  # 11 leave 2 held out: one to predict
    if corpus.size < needed:
        raise CorpusError(
            "corpus {} is too short: {:,} characters, and --batch {} with --steps {} needs {:,}".format(
                corpus.name, corpus.size, batch, steps, needed
            )
        )


def columns(ids: np.ndarray, count: int) -> np.ndarray:
    """`count` consecutive stretches of `ids` side by side: [L + 1, count].

    Row t + 1 is what follows row t, so rows 0..L-1 are inputs and rows 1..L their targets. The last character
    of a column is the first of the next one; fewer than `count` characters at the end are left out.
    """
    length = (len(ids) - 1) // count
    stretches: List[np.ndarray] = [ids[i * length : (i + 1) * length + 1] for i in range(count)]
    return np.stack(stretches, axis=1)


def unigram_entropy(ids: np.ndarray) -> float:
    """Bits per character of the best code that looks at no context, made for these very `ids`.

    Frequencies taken from the measured text itself, not from the training text, make it the harder baseline.
    """
    counts = np.bincount(ids)
    shares = counts[counts > 0] / len(ids)
    return float(-(shares * np.log2(shares)).sum())
