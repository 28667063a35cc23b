"""The arguments of `recurrent_net`, checked for type and turned into plain names.

Blobs may come as `BlobReference` or `str`. A string means what it means to every Caffe2 operator: the current
`NameScope` goes before it. For a blob of the step net the name as written counts first, because `AddExternalInput`
does not add the scope.

`inner_X` is a name in the step net, `outer_X` one in the net around it, here and in all of the package.
"""

import collections
import collections.abc
import functools
import numbers
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Collection, Dict, FrozenSet, List, Optional, Sequence, Tuple, TypeVar, Union, cast

import numpy as np
from caffe2.python import core

from caffe2_recurrent.problems import Problems, given

Blob = Union[str, core.BlobReference]
OutputsWithGrads = Union[str, Sequence[int]]
Function = TypeVar("Function", bound=Callable[..., Any])

AUTO = "auto"
DEFAULT_TIMESTEP = "timestep"
PLACE_OF_SCRATCH_SIZES = 5


@dataclass(frozen=True)
class Request:
    """What a caller of `recurrent_net`, or of a layer, asked for, as plain names and numbers; `caller` is its name.

    `sequences` and `initial_states` are pairs (inner name, outer name); `links` maps a state input of the step to
    the step output that becomes its next value. `outputs_with_grads` is None where whatever arrives is passed back.
    """

    caller: str
    net: core.Net
    cell_net: core.Net
    sequences: Tuple[Tuple[str, str], ...]
    initial_states: Tuple[Tuple[str, str], ...]
    links: Dict[str, str]
    timestep: Optional[str]
    scope: Optional[str]
    outputs_with_grads: Optional[Tuple[int, ...]]
    recompute: Tuple[str, ...]
    forward_only: bool


def is_blob(value: Any) -> bool:
    return isinstance(value, (str, core.BlobReference))


def is_integer(value: Any) -> bool:
    """Python's and numpy's whole numbers; no flags and no arrays."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Python's and numpy's real numbers; no flags and no arrays."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_iterable(value: Any) -> bool:
    """Whether it can be gone through; an array without dimensions only says so."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def read_blobs(role: str, value: Any, problems: Problems, wanted: str = "a blob or a list of blobs") -> List[str]:
    """The names in a list of blobs, or of one blob; notes what is neither."""
    listed = [value] if is_blob(value) else value
    if isinstance(listed, bytes) or not is_iterable(listed):
        problems.add("{} must be {}; got {}", role, wanted, given(value))
        return []
    blobs = list(listed)
    for blob in blobs:
        if not is_blob(blob):
            problems.add("{} takes blobs or their names; got {}", role, given(blob))
    return [str(blob) for blob in blobs]


def check_once(role: str, blobs: Sequence[str], problems: Problems) -> None:
    """Note names that are given more than once."""
    for blob, count in collections.Counter(blobs).items():
        if count > 1:
            problems.add("{} names '{}' twice", role, blob)


def outer_name(blob: Blob) -> str:
    """The name of a blob of the outer net; a string gets the current `NameScope`, as in any operator.

    An empty one stays empty, so that it can be refused.
    """
    return core.ScopedName(blob) if isinstance(blob, str) and blob else str(blob)


def known_name(blob: Blob, known: Collection[str]) -> str:
    """The name as written, unless only the one under the current `NameScope` is `known`."""
    name, scoped = str(blob), outer_name(blob)
    return scoped if name not in known and scoped in known else name


def read_outputs_with_grads(value: Any, problems: Problems) -> Optional[Tuple[int, ...]]:
    """The positions in `outputs_with_grads`, or None for 'auto'."""
    if isinstance(value, str) and value == AUTO:
        return None
    if isinstance(value, (str, bytes)) or not is_iterable(value):
        problems.add("outputs_with_grads takes positions of outputs, like (0, 2), or 'auto'; got {}", given(value))
        return ()
    positions = list(value)
    for position in positions:
        if not is_integer(position):
            problems.add("outputs_with_grads takes whole numbers; got {}", given(position))
    return tuple(int(position) for position in positions if is_integer(position))


def read_flag(role: str, value: Any, problems: Problems) -> bool:
    """True or False; 0 and 1 count, as in older scripts."""
    if not isinstance(value, (bool, np.bool_)) and not (is_integer(value) and value in (0, 1)):
        problems.add("{} must be True or False; got {}", role, given(value))
        return False
    return bool(value)


def read_number(role: str, value: Any, types: Problems, values: Problems) -> Optional[float]:
    """A finite number; None, with a note, for anything else."""
    if not is_number(value):
        types.add("{} must be a number; got {}", role, given(value))
    elif not abs(value) <= sys.float_info.max:
        values.add("{} must be a finite number; got {}", role, value)
    else:
        return float(value)
    return None


class _Reader:
    """Turns the arguments of one call into names, noting what is of the wrong type."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self._inner_names: FrozenSet[str] = frozenset()

    def nets(self, net: Any, cell_net: Any) -> None:
        for role, value in (("net", net), ("cell_net", cell_net)):
            if isinstance(value, core.Net):
                continue
            hint = "; pass its .net" if isinstance(getattr(value, "net", None), core.Net) else ""
            self.problems.add("{} must be a core.Net; got {}{}", role, given(value), hint)
        if isinstance(cell_net, core.Net):
            proto = cell_net.Proto()
            written = (output for operator in proto.op for output in operator.output)
            self._inner_names = frozenset(proto.external_input).union(written)

    def inner(self, blob: Blob) -> str:
        return known_name(blob, self._inner_names)

    def pairs(self, role: str, value: Any, sizes_allowed: bool = False) -> Tuple[Tuple[str, str], ...]:
        if not self._is_list(role, value, "(step-net blob, outer blob) pairs"):
            return ()
        pairs: List[Tuple[str, str]] = []
        for item in value:
            parts = list(item) if isinstance(item, (tuple, list)) else []
            if len(parts) == 3 and sizes_allowed and is_blob(parts[0]) and is_blob(parts[1]):
                _deprecated("a size as the third element of an initial_cell_inputs entry")
                parts = parts[:2]
            if len(parts) == 2 and all(is_blob(part) for part in parts):
                pairs.append((self.inner(parts[0]), outer_name(parts[1])))
            else:
                self.problems.add("{} takes (step-net blob, outer blob) pairs; got {}", role, given(item))
        return tuple(pairs)

    def links(self, value: Any) -> Dict[str, str]:
        if not isinstance(value, collections.abc.Mapping):
            self.problems.add("links must map state inputs of the step to its outputs; got {}", given(value))
            return {}
        links: Dict[str, str] = {}
        for state, output in value.items():
            if not (is_blob(state) and is_blob(output)):
                self.problems.add("links takes blobs or their names; got {}: {}", given(state), given(output))
                continue
            inner_input = self.inner(state)
            if links.get(inner_input, self.inner(output)) != self.inner(output):
                self.problems.add("links names state '{}' twice", inner_input)
            links[inner_input] = self.inner(output)
        return links

    def timestep(self, value: Any) -> Optional[str]:
        if value is None:
            scoped = self.inner(DEFAULT_TIMESTEP)
            return scoped if scoped in self._inner_names else None
        if not is_blob(value):
            self.problems.add("timestep must be a blob or its name; got {}", given(value))
            return None
        return self.inner(value)

    def scope(self, value: Any) -> Optional[str]:
        if value is not None and not is_blob(value):
            self.problems.add("scope must be a string; got {}", given(value))
            return None
        return None if value is None else str(value)

    def recompute(self, value: Any) -> Tuple[str, ...]:
        role = "recompute_blobs_on_backward"
        if value is None or not self._is_list(role, value, "step-net blobs"):
            return ()
        blobs = list(value)
        for blob in blobs:
            if not is_blob(blob):
                self.problems.add("{} takes blobs or their names; got {}", role, given(blob))
        return tuple(dict.fromkeys(self.inner(blob) for blob in blobs if is_blob(blob)))

    def sizes(self, value: Any) -> None:
        if value is not None:
            _deprecated("scratch_sizes")

    def flag(self, role: str, value: Any) -> bool:
        return read_flag(role, value, self.problems)

    def _is_list(self, role: str, value: Any, of: str) -> bool:
        if is_iterable(value) and not is_blob(value) and not isinstance(value, (bytes, dict)):
            return True
        self.problems.add("{} must be a list of {}; got {}", role, of, given(value))
        return False


def read(
    caller: str,
    net: Any,
    cell_net: Any,
    inputs: Any,
    initial_cell_inputs: Any,
    links: Any,
    timestep: Any,
    scope: Any,
    outputs_with_grads: Any,
    recompute_blobs_on_backward: Any,
    forward_only: Any,
    scratch_sizes: Any,
) -> Request:
    """Check the types of all arguments at once; raises `TypeError` naming each that is wrong."""
    problems = Problems(caller)
    reader = _Reader(problems)
    reader.sizes(scratch_sizes)
    reader.nets(net, cell_net)
    request = Request(
        caller=caller,
        net=net,
        cell_net=cell_net,
        sequences=reader.pairs("inputs", inputs),
        initial_states=reader.pairs("initial_cell_inputs", initial_cell_inputs, sizes_allowed=True),
        links=reader.links(links),
        timestep=reader.timestep(timestep),
        scope=reader.scope(scope),
        outputs_with_grads=read_outputs_with_grads(outputs_with_grads, problems),
        recompute=reader.recompute(recompute_blobs_on_backward),
        forward_only=reader.flag("forward_only", forward_only),
    )
    problems.raise_if_any(TypeError)
    return request


def takes_scratch_sizes_before_timestep(function: Function) -> Function:
    """Let `recurrent_net` be called by position as in 2016, when a list of sizes stood between `links` and `timestep`.

    (..., links, [40], timestep, scope)    =>    (..., links, timestep, scope, scratch_sizes=[40])
    """

    @functools.wraps(function)
    def shifted(*values: Any, **named: Any) -> Any:
        if len(values) > PLACE_OF_SCRATCH_SIZES and isinstance(values[PLACE_OF_SCRATCH_SIZES], (list, tuple, dict)):
            named.setdefault("scratch_sizes", values[PLACE_OF_SCRATCH_SIZES])
            values = values[:PLACE_OF_SCRATCH_SIZES] + values[PLACE_OF_SCRATCH_SIZES + 1 :]
        return function(*values, **named)

    return cast(Function, shifted)


def _deprecated(what: str) -> None:
    # For a method of _Reader: it, `read`, `recurrent_net` and `shifted` stand between here and the caller's line.
    warnings.warn(
        "recurrent_net ignores {}: the engine finds sizes by itself".format(what), DeprecationWarning, stacklevel=6
    )
