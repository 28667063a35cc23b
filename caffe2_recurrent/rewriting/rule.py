"""What a rewriting rule is: a docstring that states before and after, then match, check, rewrite.

A rule looks at one loop at a time. `sites` are the places that it is about, `refusal` says why one of them cannot be
rewritten, `loss` why it had better not be, `rewrite` changes the loop. The pass asks for sites anew after each rewrite,
so a rule may change whatever it likes, and is asked again about what it has refused before.
"""

import abc
from typing import Any, Iterable, NamedTuple, Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes


class Site(NamedTuple):
    """A place in a loop: what is shown to people, and what the rule needs to find it again."""

    what: str
    where: Any


class Rule(abc.ABC):
    """One way of rewriting a loop. `name` is what callers choose it by."""

    name: str

    @abc.abstractmethod
    def sites(self, loop: Loop) -> Iterable[Site]:
        """The places that the rule is about, whether it can rewrite them or not."""

    @abc.abstractmethod
    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        """Why this place cannot be rewritten; None if it can."""

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        """Why rewriting this place, which could be done, would not make the loop faster; None if it would."""
        return None

    @abc.abstractmethod
    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        """Rewrite one place."""
