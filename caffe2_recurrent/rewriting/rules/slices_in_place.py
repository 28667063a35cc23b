"""One slice that a step of a backward pass sees by two names."""

from typing import Iterable, List, Optional, Tuple

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import renamed
from caffe2_recurrent.rewriting import backward_pass
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import in_place
from caffe2_recurrent.wiring import Link


class SlicesInPlace(Rule):
    """backward pass, a loop of its own: B is slice t of M, and dB = operator(B, ..) is slice t of M too

    =>  B = operator(B, ..)

    `gradient_buffer` keeps for a step what it needs in the memory of what it makes. The engine's gradient operator has
    its links of either pass by themselves; in a loop of its own each is an operator of a step, and one is enough.
    """

    name = "slices_in_place"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for read, written in _pairs(loop):
            yield Site("'{}' and '{}'".format(read.inner, written.inner), (read, written))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.gradient is not None
        read, written = site.where
        return in_place.why_not_one_blob(loop.gradient.operators, read.inner, written.inner)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None
        read, written = site.where
        names = {written.inner: read.inner}
        gradient.operators[:] = [renamed(operator, names) for operator in gradient.operators]
        gradient.net.external_output[:] = [names.get(blob, blob) for blob in gradient.net.external_output]
        gradient.net.external_input[:] = [blob for blob in gradient.net.external_input if blob not in names]
        for links in (gradient.links, gradient.backward_links):
            links[:] = [link for link in links if link.inner not in names]


def _pairs(loop: Loop) -> List[Tuple[Link, Link]]:
    """Links of a backward step to one slice: of what it reads, and of what it writes there."""
    gradient = loop.gradient
    if gradient is None or gradient.turned is None:
        return []
    links = backward_pass.links(loop)
    made = {blob for operator in gradient.operators for blob in operator.output}
    return [
        (read, written)
        for written in links
        for read in links
        if (read.outer, read.offset) == (written.outer, written.offset)
        and read.inner not in made
        and written.inner in made
    ]
