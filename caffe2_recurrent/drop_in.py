"""Ours in the place of `caffe2.python.recurrent`, for scripts that are not to be changed: `install`, `uninstall`.

    where                      before                                       while installed
    caffe2.python.recurrent    recurrent_net and its helpers: Caffe2's      ours
                               LSTM, MILSTM, ...: gone since 2017           ours
    caffe2.python.attention    a name with the parameters of 2017           ours
                               a name with other parameters or members      as it was
    any module                 what it imported by name from either         ours

The attention functions of later Caffe2s take `encoder_lengths` and return three things instead of two, and
`AttentionType` has four members: `caffe2.python.rnn_cell` relies on all of this, so there they stay. The ones of 2017
could be had from `recurrent` too, and there they are ours.

`caffe2.python.rnn_cell` keeps its own cells, whose loops our `recurrent_net` then builds. `control_ops_util` is left
alone: its `get_external_blob_names` is called by Caffe2 itself.
"""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Tuple

import caffe2_recurrent

RECURRENT = "caffe2.python.recurrent"
ATTENTION = "caffe2.python.attention"
NAMES_IN_ATTENTION = ("AttentionType", "apply_recurrent_attention", "apply_regular_attention")
NAMES_IN_RECURRENT = (
    *NAMES_IN_ATTENTION,
    "GetLSTMParamNames",
    "InitFromLSTMParams",
    "LSTM",
    "LSTMWithAttention",
    "MILSTM",
    "cudnn_LSTM",
    "recurrent_net",
    "retrieve_step_blobs",
    "set_rnn_executor_config",
)

_ABSENT = object()


class _Change(NamedTuple):
    """A name in the dictionary of a module that was given one of our objects."""

    namespace: Dict[str, Any]
    name: str
    before: Any
    ours: Any


# What is to be taken back, in the order in which it was done.
_changes: List[_Change] = []


class Installation:
    """What `install` returns; as a context manager it ends what that call began."""

    def __init__(self, began: bool) -> None:
        self._began = began

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        if self._began:
            uninstall()


def install() -> Installation:
    """Let everybody who uses `caffe2.python.recurrent` use ours, whether they imported it before or will later.

    A second call changes nothing, but for modules that Caffe2's own came into meanwhile (`importlib.reload`).

    Returns:
        A context manager that uninstalls, unless ours was installed before this call.
    """
    began = not _changes
    for module, names in _modules():
        for name, ours in _ours(names):
            _put(vars(module), name, ours)
    replacements = {id(change.before): change.ours for change in _changes if change.before is not _ABSENT}
    for namespace in _namespaces():
        for name, value in list(namespace.items()):
            if id(value) in replacements:
                _put(namespace, name, replacements[id(value)])
    return Installation(began)


def uninstall() -> None:
    """Take back what `install` did; what somebody else has changed since then stays. Does nothing the second time.

    A module that imported ours by name while it was installed keeps it.
    """
    while _changes:
        change = _changes.pop()
        if change.namespace.get(change.name) is not change.ours:
            continue
        if change.before is _ABSENT:
            del change.namespace[change.name]
        else:
            change.namespace[change.name] = change.before


def _put(namespace: Dict[str, Any], name: str, ours: Any) -> None:
    before = namespace.get(name, _ABSENT)
    if before is not ours:
        _changes.append(_Change(namespace, name, before, ours))
        namespace[name] = ours


def _modules() -> List[Tuple[ModuleType, Iterable[str]]]:
    """The modules to change, each with the names that are ours there."""
    found: List[Tuple[ModuleType, Iterable[str]]] = [(importlib.import_module(RECURRENT), NAMES_IN_RECURRENT)]
    try:
        attention = importlib.import_module(ATTENTION)
    except ImportError:  # Caffe2 was without it until 2017
        return found
    old = [name for name, ours in _ours(NAMES_IN_ATTENTION) if _is_old(getattr(attention, name, None), ours)]
    return [*found, (attention, old)]


def _ours(names: Iterable[str]) -> Iterator[Tuple[str, Any]]:
    return ((name, getattr(caffe2_recurrent, name)) for name in names if hasattr(caffe2_recurrent, name))


def _is_old(theirs: Any, ours: Any) -> bool:
    """Whether code that uses `theirs` can use ours: it is from before `encoder_lengths`, and has no more members."""
    if isinstance(ours, type):
        return isinstance(theirs, type) and _members(theirs) <= _members(ours)
    return inspect.isfunction(theirs) and "encoder_lengths" not in inspect.signature(theirs).parameters


def _members(kind: type) -> FrozenSet[str]:
    return frozenset(name for name in vars(kind) if not name.startswith("_"))


def _namespaces() -> List[Dict[str, Any]]:
    # Read as dictionaries: to ask some modules for an attribute would make them import something.
    return [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
