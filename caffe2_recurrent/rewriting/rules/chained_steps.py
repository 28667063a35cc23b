"""Steps as one chain of operators, which runs without lines of log."""

from typing import Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.executor import ENABLE
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import BACKWARD_STEP_NET, STEP_NET, integer
from caffe2_recurrent.rewriting import backward_pass, calling_thread, chains
from caffe2_recurrent.rewriting.products import kept_filters, thread_numbers
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import overlap
from caffe2_recurrent.step_workspaces import workspaces_in_turn

WRITTEN_OUT = "steps that are written out"
STEPS = {STEP_NET: "steps", BACKWARD_STEP_NET: "steps of the backward pass"}


class ChainedSteps(Rule):
    """If there are T steps: a net of type `simple` of their operators;    a step of a loop, if steps share a workspace

    =>  a net of type `dag` of the same operators, each waiting for the one before it;    an `If` that runs such a net,
                                                                                          which makes the links, too

    Such a net prepares no line of log for each operator. It has a thread of its own, which costs more than that, but
    where `calling_thread.FLAG` is set as the net is created. What fails in it is reported as before.
    """

    name = "chained_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.unrolled is not None:
            if not loop.unrolled.is_chain:
                yield Site(WRITTEN_OUT, None)
            return
        is_turned = loop.gradient is not None and loop.gradient.turned is not None
        for step in (STEP_NET, BACKWARD_STEP_NET) if is_turned else (STEP_NET,):
            if step not in loop.chained:
                yield Site(STEPS[step], step)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if site.where is None:
            return next(filter(None, (chains.why_not(operators, False) for operators in loop.steps)), None)
        if integer(loop.forward, ENABLE, 0):
            return "the RNN executor runs its steps, and prepares no lines of log"
        if loop.gradient is not None and loop.gradient.turned is None:
            return "each of its steps has a workspace of its own, and would have such a net"
        operators = _operators(loop, site.where)
        if kept_filters.are_in(operators) and thread_numbers.matter():
            if not kept_filters.stay(loop):
                return "its operators are made anew in each run, and those of such a net take longer to make"
            if workspaces_in_turn(loop.forward) > 1:
                return "its filters are for a number of OpenMP's threads, which is set in one of its workspaces alone"
        return chains.why_not(operators)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        links = backward_pass.links(loop) if site.where == BACKWARD_STEP_NET else loop.links
        if site.where is not None and not chains.pays(_operators(loop, site.where), len(links)):
            return "it has too few operators"
        if not calling_thread.runs_chains():
            return "the net would have a thread of its own; before it is optimised and created, pass {} to {}".format(
                calling_thread.FLAG, "workspace.GlobalInit"
            )
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        if site.where is not None:
            # Its steps would wait for each other by links only, of which there are none beside the chain.
            overlap.take_executor_off(loop)
            if kept_filters.are_in(_operators(loop, site.where)) and thread_numbers.matter():
                thread_numbers.set_in_chain(loop)
            loop.chained[site.where] = next(iter(loop.chained.values()), None) or chains.add_always(loop)
            return
        assert loop.unrolled is not None
        loop.unrolled = loop.unrolled._replace(is_chain=True)


def _operators(loop: Loop, step: str) -> List[caffe2_pb2.OperatorDef]:
    return dict(zip(STEPS, loop.steps))[step]
