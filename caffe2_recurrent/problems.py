"""Collecting everything that is wrong with a call, so that one error can name it all."""

import difflib
from typing import Any, Collection, List, Type

MOST_NAMES = 12


class Problems:
    """The faults found in one call of `caller`; raised together by `raise_if_any`."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._texts: List[str] = []

    def add(self, text: str, *values: Any) -> None:
        """Note one fault; `values` fill the `{}` of `text`."""
        text = text.format(*values)
        if text not in self._texts:
            self._texts.append(text)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def raise_if_any(self, error: Type[Exception] = ValueError) -> None:
        """Raise `error` with all that was noted: on one line if it is one thing, else as a list."""
        if not self._texts:
            return
        if len(self._texts) == 1:
            raise error("{}: {}".format(self._caller, self._texts[0]))
        listed = "".join("\n  - {}".format(text) for text in self._texts)
        raise error("{}: {} problems:{}".format(self._caller, len(self._texts), listed))


def names(blobs: Any, most: int = MOST_NAMES) -> str:
    """Names as an error shows them: quoted, in order, the first dozen or `most`, `nothing` if there are none."""
    quoted = ["'{}'".format(blob) for blob in blobs]
    left_out = " and {} more".format(len(quoted) - most) if len(quoted) > most else ""
    return (", ".join(quoted[:most]) or "nothing") + left_out


def meant(name: str, known: Collection[str], otherwise: str, most: int = MOST_NAMES) -> str:
    """What may have been meant by a name that is not among `known`, or `otherwise` and the first `most` of these."""
    alike = difflib.get_close_matches(name, known)
    if alike:
        return "did you mean {}?".format(" or ".join("'{}'".format(other) for other in alike))
    return otherwise + names(known, most)


def first_line(error: Exception) -> str:
    """What an error of the engine says before it lists operators and addresses."""
    lines = str(error).strip().splitlines()
    return lines[0].split(" (Error from operator:")[0].rstrip(". ") if lines else type(error).__name__


def given_array(value: Any) -> str:
    """The same of what should be an array or a tensor of other elements, whose numbers would say nothing."""
    if not getattr(value, "ndim", 0):
        return given(value)
    return "{} {} of {}".format(type(value).__name__, list(value.shape), value.dtype)


def given(value: Any) -> str:
    """A value of the wrong type as an error shows it: itself, shortened, and its type."""
    shown = repr(value)
    return "{} of type {}".format(shown if len(shown) <= 60 else shown[:57] + "...", type(value).__name__)
