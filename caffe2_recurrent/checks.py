"""Checks of the arguments of a layer: each notes what is wrong, and all of it is raised at once."""

from typing import Any, List, Mapping, Optional, Sequence, Tuple

from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.arguments import (
    AUTO,
    Blob,
    OutputsWithGrads,
    is_blob,
    is_integer,
    outer_name,
    read_flag,
    read_number,
    read_outputs_with_grads,
)
from caffe2_recurrent.problems import Problems, given
from caffe2_recurrent.recurrent import check_positions
from caffe2_recurrent.stack import Shape


class Checks:
    """The faults found in one call of `caller`; `done` raises `TypeError` for types, else `ValueError` for values.

    The methods return the argument in the form that the builders use. What they return for a faulty argument must not
    be used; `done` comes first.
    """

    def __init__(self, caller: str) -> None:
        self.types = Problems(caller)
        self.values = Problems(caller)

    def done(self) -> None:
        self.types.raise_if_any(TypeError)
        self.values.raise_if_any()

    def model(self, value: Any) -> None:
        if not isinstance(value, ModelHelper):
            self.types.add("model must be a ModelHelper or CNNModelHelper; got {}", given(value))

    def blob(self, role: str, value: Any) -> str:
        if not is_blob(value):
            self.types.add("{} must be a blob or its name; got {}", role, given(value))
            return ""
        return self._name(role, value)

    def _name(self, role: str, blob: Blob) -> str:
        if not str(blob):
            self.values.add("{} is an empty name", role)
        return outer_name(blob)

    def optional_blob(self, role: str, value: Any) -> Optional[str]:
        return None if value is None else self.blob(role, value)

    def choice(self, role: str, value: Any, choices: Mapping[str, Any]) -> None:
        if not is_integer(value) or value not in choices.values():
            listed = ", ".join("{} ({})".format(name, choice) for name, choice in choices.items())
            self.values.add("{} must be one of {}; got {}", role, listed, given(value))

    def lengths(self, role: str, value: Any) -> Optional[str]:
        if value is not None and not is_blob(value):
            self.types.add("{} must be a blob, its name, or None for full length; got {}", role, given(value))
            return None
        return None if value is None else self._name(role, value)

    def states(self, value: Any, names: Sequence[str], loops: int = 1) -> Optional[Tuple[str, ...]]:
        """The initial states of each loop in turn; None if they are to be parameters."""
        return None if value is None else self.given_states(value, names, loops, " or None")

    def given_states(
        self, value: Any, names: Sequence[str], loops: int = 1, otherwise: str = ""
    ) -> Optional[Tuple[str, ...]]:
        """As `states` where there must be some, or what `otherwise` says."""
        wanted = "({})".format(", ".join(names))
        listed = wanted + " blobs" if len(names) > 1 else "a tuple of one blob for each loop, like ('h0',)"
        states = list(value) if isinstance(value, (tuple, list)) else None
        if states is None or not all(is_blob(state) for state in states):
            self.types.add("initial_states must be {}{}; got {}", listed, otherwise, given(value))
            return None
        count = len(names) * loops
        if len(states) != count:
            number = {1: "one blob", 2: "two blobs"}.get(count, "{} blobs".format(count))
            each = " " + wanted
            if loops > 1:
                each = ": {} of each of the {} layers or directions".format(" and ".join(names), loops)
            self.values.add("initial_states must be {}{}; got {}", number, each, len(states))
        return tuple(self._name("initial_states[{}]".format(index), state) for index, state in enumerate(states))

    def size(self, role: str, value: Any) -> int:
        if not is_integer(value):
            self.types.add("{} must be a whole number; got {}", role, given(value))
            return 1
        if value < 1:
            self.values.add("{} must be 1 or more; got {}", role, value)
        return int(value)

    def sizes(self, role: str, value: Any) -> Tuple[int, ...]:
        """A size for each layer; a single one for one layer."""
        if not isinstance(value, (list, tuple)):
            return (self.size(role, value),)
        if not value:
            self.values.add("{} is an empty list; give the size of each layer", role)
        return tuple(self.size("{}[{}]".format(role, index), size) for index, size in enumerate(value))

    def ratio(self, role: str, value: Any) -> float:
        ratio = self.number(role, value)
        if not 0 <= ratio < 1:
            self.values.add("{} must be 0 or more and less than 1; got {}", role, value)
        return ratio

    def stack(self, dim_in: Any, dim_out: Any, bidirectional: Any, dropout_ratio: Any, is_test: Any) -> Shape:
        return Shape(
            self.size("dim_in", dim_in),
            self.sizes("dim_out", dim_out),
            self.flag("bidirectional", bidirectional),
            self.ratio("dropout_ratio", dropout_ratio),
            self.flag("is_test", is_test),
        )

    def scope(self, value: Any) -> str:
        if not isinstance(value, str):
            self.types.add("scope must be a string; got {}", given(value))
        elif not value:
            self.values.add("scope is empty; parameters need a prefix that tells this layer from others")
        return str(value)

    def number(self, role: str, value: Any) -> float:
        number = read_number(role, value, self.types, self.values)
        return 0.0 if number is None else number

    def flag(self, role: str, value: Any) -> bool:
        return read_flag(role, value, self.types)

    def positions(self, value: Any, outputs: List[str]) -> OutputsWithGrads:
        """'auto' or a tuple, which every loop can go through anew."""
        positions = read_outputs_with_grads(value, self.types)
        check_positions(positions, outputs, self.values)
        return AUTO if positions is None else positions
