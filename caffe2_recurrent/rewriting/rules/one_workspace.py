"""One workspace for all steps."""

from typing import Iterable, Optional

from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.loops.surroundings import ONE_BY_ONE
from caffe2_recurrent.operator_arguments import WORKSPACES, argument, integer, set_arguments
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import overlap


class OneWorkspace(Rule):
    """RecurrentNetwork whose steps take turns in two workspaces, each with operators of its own

    =>  in one

    One step runs after the other, so they have no use for two; and what a step has for the next one lies in outer
    blobs. There are half as many operators and tensors to come into the caches, and where operators of steps are made
    in each run, or lay out weights, they do so once. With `backward_loop` that is so in both passes.

    Source: the argument num_workspaces in caffe2/operators/rnn/recurrent_network_op.h; a Caffe2 that does not know it
    takes two.
    """

    name = "one_workspace"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if argument(loop.forward, WORKSPACES) is None:
            yield Site("steps", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if loop.gradient is not None and loop.gradient.turned is None:
            return "each of its steps has a workspace of its own"
        if integer(loop.forward, ENABLE, 0):
            return "the RNN executor may run several of its steps at once"
        kinds = {loop.net.type} if loop.gradient is None else {loop.net.type, loop.gradient.net.type}
        others = kinds.difference(ONE_BY_ONE)
        if others:
            return "its steps are nets of type '{}', which may not be done when the next one begins".format(min(others))
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        # Who turns it on later would have it run steps side by side in one workspace.
        overlap.take_executor_off(loop)
        set_arguments(loop.forward, {WORKSPACES: 1})
