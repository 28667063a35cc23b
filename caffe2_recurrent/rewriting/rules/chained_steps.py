"""Steps that are written out as one chain, which runs without lines of log."""

from typing import Iterable, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import calling_thread
from caffe2_recurrent.rewriting.rule import Rule, Site


class ChainedSteps(Rule):
    """If there are T steps: a net of type `simple` of their operators

    =>  If there are T steps: a net of type `dag` of the same operators, each waiting for the one before it

    Such a net prepares no line of log for each operator. It has a thread of its own, which costs more than that, but
    where `calling_thread.FLAG` is set as the net is created. What fails in it is reported as before.
    """

    name = "chained_steps"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.unrolled is not None and not loop.unrolled.is_chain:
            yield Site("steps that are written out", None)

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        for operators in loop.steps:
            for operator in operators:
                if operator.device_option.device_type != caffe2_pb2.CPU:
                    return "'{}' is not the CPU's, and its thread would be another one".format(operator.type)
                if not operator.output:
                    return "the operator behind '{}' could not wait for it, as it has no outputs".format(operator.type)
        return None

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        if calling_thread.runs_chains():
            return None
        return "the net would have a thread of its own; before it is optimised and created, pass {} to {}".format(
            calling_thread.FLAG, "workspace.GlobalInit"
        )

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        assert loop.unrolled is not None
        loop.unrolled = loop.unrolled._replace(is_chain=True)
