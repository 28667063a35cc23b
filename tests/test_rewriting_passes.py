"""How often a rule is asked about its places in a loop."""

import types

import pytest

from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import passes
from caffe2_recurrent.rewriting.rule import Rule, Site


class OfNumbers(Rule):
    """A loop of numbers: one of those in `rewritable` becomes None, once there is None or nothing behind it."""

    name = "of_numbers"

    def __init__(self, rewritable):
        self.rewritable, self.asked = set(rewritable), 0

    def sites(self, loop):
        for position, number in enumerate(loop.numbers):
            if number is not None:
                yield Site(str(number), position)

    def refusal(self, loop, site, sizes):
        self.asked += 1
        behind = loop.numbers[site.where + 1 :][:1]
        return None if int(site.what) in self.rewritable and behind in ([], [None]) else "not yet"

    def rewrite(self, loop, site, sizes):
        loop.numbers[site.where] = None


def applied(rewritable, numbers):
    """What was rewritten, what was left alone, and how often the rule was asked."""
    rule, loop = OfNumbers(rewritable), types.SimpleNamespace(name="loop", numbers=list(numbers))
    made, left = passes.apply(rule, loop, Sizes({}))
    return [rewrite.what for rewrite in made], [refusal.what for refusal in left], rule.asked


def test_what_was_refused_is_asked_about_again_once_something_behind_it_is_rewritten():
    made, left, _ = applied({0, 1, 2}, range(3))
    assert (made, left) == (["2", "1", "0"], [])
    made, left, _ = applied({0, 2}, range(3))
    assert (made, left) == (["2"], ["0", "1"])


def test_places_of_one_name_are_not_taken_for_each_other():
    made, left, _ = applied({7}, [7, 3, 7, None, 7])
    assert (made, left) == (["7", "7"], ["7", "3"])


@pytest.mark.parametrize("many", [10, 40])
def test_what_lies_in_front_of_many_rewrites_is_not_looked_at_after_each(many):
    """Every other place is rewritten; those between are looked at once on the way, and once in the end."""
    numbers = [number for place in range(many) for number in (2 * place, 2 * place + 1, None)]
    made, left, asked = applied(range(1, 2 * many, 2), numbers)
    assert (len(made), len(left), asked) == (many, many, 3 * many)
