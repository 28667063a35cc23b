"""Cases in which each two values of two parameters meet once, in the place of all combinations."""

import pytest
from allpairspy import AllPairs


def every_pair(test):
    """To be put above the `parametrize` marks of a test whose combinations would take too long.

    Of 2 x 3 x 45 cases it leaves 135, and of 5 x 3 x 2 x 4 it leaves 20. What only three values together get wrong is
    for the tests whose cases are drawn.
    """
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    cases = [
        pytest.param(*(value for case in chosen for value in case.values), id="-".join(case.id for case in chosen))
        for chosen in AllPairs([_cases(*mark.args, **mark.kwargs) for mark in marks])
    ]
    names = [name for mark in marks for name in _names(mark.args[0])]
    indirect = [name for mark in marks if mark.kwargs.get("indirect") for name in _names(mark.args[0])]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    return pytest.mark.parametrize(names, cases, indirect=indirect)(test)


def _names(given):
    return [name.strip() for name in given.split(",")]


def _cases(names, values, ids=None, indirect=False):
    """One `pytest.param` for each of the values, with an id as pytest would give it."""
    several = len(_names(names)) > 1
    found = []
    for index, value in enumerate(values):
        parts = tuple(value) if several else (value,)
        if callable(ids):
            own = "-".join(map(ids, parts))
        elif ids is not None:
            own = list(ids)[index]
        else:
            own = "-".join(_id(part, name, index) for name, part in zip(_names(names), parts))
        found.append(pytest.param(*parts, id=own))
    return found


def _id(value, name, index):
    if value is None or isinstance(value, (str, bool, int, float)):
        return str(value)
    return getattr(value, "__name__", "{}{}".format(name, index))
