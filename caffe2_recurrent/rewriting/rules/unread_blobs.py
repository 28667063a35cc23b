"""Blobs of a step that the backward step does not read, in memory that all steps share."""

from typing import Iterable, List, Optional, Set

from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import SHOWING
from caffe2_recurrent.rewriting.rule import Rule, Site


class UnreadBlobs(Rule):
    """step: B = operator(..), kept by each step until the backward pass, which does not read it

    =>  B in the workspace that all steps share

    Less memory, and what a step writes and reads again stays in the cache. It follows the rules that change what the
    backward step reads.
    """

    name = "unread_blobs"

    def sites(self, loop: Loop) -> Iterable[Site]:
        blobs = _unread(loop)
        if blobs:
            yield Site(", ".join("'{}'".format(blob) for blob in blobs), blobs)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        loop.shared += site.where


def _unread(loop: Loop) -> List[str]:
    gradient = loop.gradient
    if gradient is None:
        # Steps then take turns in a few workspaces, if not in one.
        return []
    backward = {blob for operator in gradient.operators for blob in [*operator.input, *operator.output]}
    linked = {link.inner for link in loop.links}
    # A name that an outer blob has too is left alone, and what the step net exports is there to be looked at.
    outer = {*loop.inputs, *loop.outputs, loop.timestep, *loop.net.external_output}
    kept = backward | linked | outer | set(loop.shared) | _not_held_back(loop) | _shown(loop, backward)
    written = dict.fromkeys(blob for operator in loop.operators for blob in operator.output)
    return [blob for blob in written if blob not in kept]


def _shown(loop: Loop, backward: Set[str]) -> Set[str]:
    """Blobs whose memory the backward step reads by another name.

    The RNN executor, which goes by names, lets a step overwrite them while another one reads them so.
    """
    executor = bool(integer(loop.forward, ENABLE, 0))
    needed = set(backward)
    shown = set()
    for operator in reversed(loop.operators):
        if operator.type in SHOWING and (executor or not needed.isdisjoint(operator.output)):
            needed.update(operator.input)
            shown.update(operator.input[:1])
    return shown


def _not_held_back(loop: Loop) -> Set[str]:
    """Blobs that the RNN executor may let a step overwrite while another one writes them.

    It holds an operator back until the step before has read what it overwrites. Where the inputs are there from the
    start and nothing reads the output, there is nothing to wait for.
    """
    from_outside = loop.references | {loop.timestep}
    read = {blob for operator in loop.operators for blob in operator.input}
    return {
        blob
        for operator in loop.operators
        if from_outside.issuperset(operator.input) and read.isdisjoint(operator.output)
        for blob in operator.output
    }
