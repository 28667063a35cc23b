"""How to rewrite a net, as callers of `optimize` and of `install` say it."""

from typing import Any, List, NamedTuple, Sequence

from caffe2_recurrent.arguments import is_integer, is_iterable, read_flag
from caffe2_recurrent.problems import Problems, given, meant
from caffe2_recurrent.rewriting.promises import Promises
from caffe2_recurrent.rewriting.rule import Rule
from caffe2_recurrent.rewriting.rules import RULES


class Options(NamedTuple):
    """As the arguments of `optimize`; `rules` are those that are left."""

    rules: Sequence[Rule]
    even_if_slower: bool = False
    trials: bool = True
    promises: Promises = Promises()
    batch_parts: int = 1


def read_options(
    rules: Any,
    even_if_slower: Any,
    trials: Any,
    constant_threads: Any,
    without: Any,
    constant_weights: Any,
    batch_parts: Any,
    types: Problems,
    values: Problems,
) -> Options:
    """Check the arguments, and note what is wrong with them."""
    is_always = read_flag("even_if_slower", even_if_slower, types)
    has_trials = read_flag("trials", trials, types)
    promises = Promises(
        read_flag("constant_threads", constant_threads, types),
        read_flag("constant_weights", constant_weights, types),
    )
    parts = _read_parts(batch_parts, types, values)
    left_out = [] if without is None else _read_rules("without", without, types, values)
    chosen = [rule for rule in _read_rules("rules", rules, types, values) if rule not in left_out]
    return Options(chosen, is_always, has_trials, promises, parts)


def _read_rules(argument: str, names: Any, types: Problems, values: Problems) -> List[Rule]:
    """The rules of these names, in their order; all of them for None."""
    if names is None:
        return list(RULES)
    if isinstance(names, (str, bytes)) or not is_iterable(names):
        types.add("{} must be a list of names; got {}", argument, given(names))
        return []
    wanted = list(names)
    known = [rule.name for rule in RULES]
    for rule in wanted:
        if not isinstance(rule, str):
            types.add("{} must be a list of names; it has {}", argument, given(rule))
        elif rule not in known:
            values.add("'{}' is not a rule; {}", rule, meant(rule, known, "the rules are ", len(known)))
    return [rule for rule in RULES if rule.name in wanted]


def _read_parts(parts: Any, types: Problems, values: Problems) -> int:
    if not is_integer(parts):
        types.add("batch_parts must be a whole number; got {}", given(parts))
    elif parts < 1:
        values.add("batch_parts must be 1 or more; got {}", parts)
    else:
        return int(parts)
    return 1
