"""`every_pair`: which cases it leaves of all combinations, and how they are called."""

import itertools

import pytest

from every_pair import every_pair

CELL = pytest.mark.parametrize("cell", ["lstm", "gru", "milstm"])
SIZES = pytest.mark.parametrize("steps, batch", [(1, 2), (3, 4)])
EXECUTOR = pytest.mark.parametrize("executor", [True, False], ids=["executor", "plain"])
MAKE = pytest.mark.parametrize("make", [len, sorted], ids=lambda make: make.__name__, indirect=True)


def with_pairs(*marks):
    def test():
        pass

    for mark in marks:
        test = mark(test)
    return every_pair(test)


def the_mark(test):
    (found,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return found


def test_each_two_values_meet_in_fewer_cases_than_all():
    columns = [["lstm", "gru", "milstm"], [(1, 2), (3, 4)], [True, False]]
    names, cases = the_mark(with_pairs(CELL, SIZES, EXECUTOR)).args
    assert names == ["cell", "steps", "batch", "executor"]
    chosen = [(case.values[0], case.values[1:3], case.values[3]) for case in cases]
    for one, other in itertools.combinations(range(3), 2):
        met = {(case[one], case[other]) for case in chosen}
        assert met == set(itertools.product(columns[one], columns[other]))
    assert len(chosen) == len(set(chosen)) == 6


def test_cases_are_called_as_pytest_calls_combinations():
    _, cases = the_mark(with_pairs(CELL, SIZES, EXECUTOR)).args
    combinations = {
        "-".join(ids) for ids in itertools.product(["lstm", "gru", "milstm"], ["1-2", "3-4"], ["executor", "plain"])
    }
    assert {case.id for case in cases} < combinations


def test_other_marks_stay_and_fixtures_still_get_their_values():
    test = with_pairs(pytest.mark.slow, CELL, MAKE, pytest.mark.parametrize("value", [None, 1.5, {}]))
    assert [mark.name for mark in test.pytestmark] == ["slow", "parametrize"]
    assert the_mark(test).kwargs == {"indirect": ["make"]}
    ids = [case.id for case in the_mark(test).args[1]]
    assert {id.split("-")[1] for id in ids} == {"len", "sorted"}
    assert {id.split("-")[2] for id in ids} == {"None", "1.5", "value2"}


@pytest.fixture
def doubled(request):
    return 2 * request.param


@every_pair
@pytest.mark.parametrize("doubled", [1, 2], indirect=True)
@pytest.mark.parametrize("first", [10, 20])
@pytest.mark.parametrize("second", [100, 200])
def test_each_case_is_run(doubled, first, second):
    assert doubled in (2, 4) and first in (10, 20) and second in (100, 200)
