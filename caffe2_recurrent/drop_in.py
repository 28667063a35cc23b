"""Ours in the place of `caffe2.python.recurrent`, for scripts that are not to be changed: `install`, `uninstall`.

    where                      before                                       while installed
    caffe2.python.recurrent    recurrent_net and its helpers: Caffe2's      ours
                               LSTM, MILSTM, ...: gone since 2017           ours
    caffe2.python.attention    a name with the parameters of 2017           ours
                               a name with other parameters or members      as it was
    any module                 what it imported by name from either         ours
    caffe2.python.workspace    what hands nets to the engine                with `optimize`: the same, optimised

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
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import caffe2_recurrent
from caffe2_recurrent import optimized_runs
from caffe2_recurrent.arguments import read_flag
from caffe2_recurrent.optimized_once import Optimizer
from caffe2_recurrent.problems import Problems, given
from caffe2_recurrent.rewriting import Report
from caffe2_recurrent.rewriting.options import read_options

RECURRENT = "caffe2.python.recurrent"
WORKSPACE = "caffe2.python.workspace"
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


class Installation:
    """What `install` returns; as a context manager it ends what that call began."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        _take_back([change for change in _changes if change.call is self])


class _Change(NamedTuple):
    """A name in the dictionary of a module that was given one of our objects by a call of `install`."""

    call: Installation
    namespace: Dict[str, Any]
    name: str
    before: Any
    ours: Any


# What is to be taken back, in the order in which it was done.
_changes: List[_Change] = []


def install(
    *,
    optimize: bool = False,
    rules: Optional[Iterable[str]] = None,
    even_if_slower: bool = False,
    trials: bool = True,
    constant_threads: bool = False,
    constant_weights: bool = False,
    without: Optional[Iterable[str]] = None,
    batch_parts: int = 1,
    on_report: Optional[Callable[[Report], Any]] = None,
) -> Installation:
    """Let everybody who uses `caffe2.python.recurrent` use ours, whether they imported it before or will later.

    A second call changes nothing, but for modules that Caffe2's own came into meanwhile (`importlib.reload`), and what
    the arguments below ask for.

    Args:
        optimize: from now on optimise each net that goes through `workspace.CreateNet`, `RunNetOnce` or `RunPlan`, as
            `caffe2_recurrent.optimize` does, with the sizes that are known by then. The engine gets a copy, the same
            for the same net and sizes; the caller's net stays as it was built. Left as they are: nets with a loop that
            has a backward step and no gradient operator, which may come in a net of its own.
        rules, even_if_slower, trials, constant_threads, constant_weights, without, batch_parts: with `optimize`: as
            for `caffe2_recurrent.optimize`.
        on_report: with `optimize`: a function that gets the `Report` of each net with loops, each time it comes.

    Returns:
        A context manager that takes back what this call has changed.

    Raises:
        TypeError: flags that are none, rules that are no list of names, parts that are no number, or an `on_report`
            that cannot be called.
        ValueError: names of no rules, or less than one part. Nothing is changed.
    """
    types, values = Problems("install"), Problems("install")
    wanted = read_flag("optimize", optimize, types)
    options = read_options(
        rules, even_if_slower, trials, constant_threads, without, constant_weights, batch_parts, types, values
    )
    _check_function(on_report, types)
    types.raise_if_any(TypeError)
    values.raise_if_any()
    call = Installation()
    for module, names in _modules():
        for name, ours in _ours(names):
            _put(call, vars(module), name, ours)
    if wanted:
        _put_runners(call, optimized_runs.Settings(Optimizer(options), on_report))
    replacements = {id(change.before): change.ours for change in _changes if change.before is not _ABSENT}
    for namespace in _namespaces():
        for name, value in list(namespace.items()):
            if id(value) in replacements:
                _put(call, namespace, name, replacements[id(value)])
    return call


def uninstall() -> None:
    """Take back what `install` did; what somebody else has changed since then stays. Does nothing the second time.

    A module that imported ours by name while it was installed keeps it.
    """
    _take_back(list(_changes))


def _take_back(changes: Sequence[_Change]) -> None:
    for change in reversed(changes):
        position = next(at for at, other in enumerate(_changes) if other is change)
        del _changes[position]
        later = [at for at in range(position, len(_changes)) if _is_same_name(_changes[at], change)]
        if later:
            # What it found is what there is to go back to, unless that was put there by the change that goes.
            following = _changes[later[0]]
            if following.before is change.ours:
                _changes[later[0]] = following._replace(before=change.before)
        elif change.namespace.get(change.name) is change.ours:
            _restore(change)


def _is_same_name(one: _Change, other: _Change) -> bool:
    return one.namespace is other.namespace and one.name == other.name


def _restore(change: _Change) -> None:
    if change.before is _ABSENT:
        del change.namespace[change.name]
    else:
        change.namespace[change.name] = change.before


def _check_function(on_report: Any, types: Problems) -> None:
    if on_report is not None and not callable(on_report):
        types.add("on_report must be a function that takes a Report; got {}", given(on_report))


def _put_runners(call: Installation, settings: optimized_runs.Settings) -> None:
    namespace = vars(importlib.import_module(WORKSPACE))
    for name in optimized_runs.NAMES:
        if isinstance(namespace[name], optimized_runs.Runner):
            _put(call, vars(namespace[name]), "settings", settings)
        else:
            _put(call, namespace, name, optimized_runs.Runner(namespace[name], settings))


def _put(call: Installation, namespace: Dict[str, Any], name: str, ours: Any) -> None:
    before = namespace.get(name, _ABSENT)
    if before is not ours:
        _changes.append(_Change(call, namespace, name, before, ours))
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
    return ((name, getattr(caffe2_recurrent, name)) for name in names)


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
