"""What a rewriting rule is: a docstring that states before and after, then match, check, rewrite.

A rule looks at one loop at a time. `sites` are the places that it is about, `refusal` says why one of them has to
stay as it is, `rewrite` changes the loop. The pass asks for sites anew after each rewrite, so a rule may change
whatever it likes; what it has refused once it is not asked about again.
"""

import abc
from typing import Any, Iterable, NamedTuple, Optional

from caffe2_recurrent.optimize.loop import Loop
from caffe2_recurrent.optimize.sizes import Sizes


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
        """Why this place stays as it is; None if it can be rewritten."""

    @abc.abstractmethod
    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        """Rewrite one place."""
