"""Links of the backward step that the forward step has made already."""

from typing import Iterable, Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.rule import Rule, Site


class ForwardLinks(Rule):
    """backward step: x_t -> x[t], h_prev -> h_states[t], ... again    =>    nothing

    The steps of both directions share one workspace each, where the forward step's views still are. Each link costs a
    backward step as much as a small operator.
    """

    name = "forward_links"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.gradient is not None and loop.gradient.links:
            yield Site("{} links".format(len(loop.gradient.links)), None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.gradient is not None
        unknown = [link.inner for link in loop.gradient.links if link not in loop.links]
        if unknown:
            return "'{}' is linked in another way than in the forward step".format(unknown[0])
        written = {blob for operator in loop.gradient.operators for blob in operator.output}
        again = [link.inner for link in loop.gradient.links if link.inner in written]
        if again:
            return "the backward step writes to '{}'".format(again[0])
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        assert loop.gradient is not None
        loop.gradient.links.clear()
