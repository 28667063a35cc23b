"""Gradients of states that go from step to step in one blob."""

from typing import Iterable, Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Carried
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import renamed
from caffe2_recurrent.rewriting.backward_pass import state_gradients
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import in_place, step_shapes


class CarriedStates(Rule):
    """backward pass, a loop of its own: dS of the new state is slice t of dS `[T + 1, N, D]`, that of the old one
    slice t + 1

    =>  both are one blob `[1, N, D]` outside of the loop, which a step finds as the one before has left it

    A link is an operator of each step: it takes as long as a sum of two thousand numbers. Nothing reads the gradients
    of a state between the last step and the first. And where a step copies the result of a product by oneDNN to dS, for
    the next step to read, that result itself can be there instead (`kept_filters.result_itself`). It follows
    `backward_loop`, which has refused gradients that something else reads.
    """

    name = "carried_states"

    def sites(self, loop: Loop) -> Iterable[Site]:
        if loop.gradient is not None and loop.gradient.turned is not None:
            for outer, of in state_gradients(loop).items():
                yield Site("'{}'".format(of.outer), (outer, of))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        assert loop.gradient is not None
        _, of = site.where
        why_not = in_place.why_not_one_blob(loop.gradient.operators, of.incoming, of.outgoing)
        if why_not is not None:
            return why_not
        # To the engine the shape of what is written to a slice does not matter; to the next step it does.
        larger = sizes.when_larger()
        shape = step_shapes.shapes_written(loop, larger).get(of.outgoing, ())
        if shape[:-1] != (1, larger.batch(loop)) or of.outgoing not in step_shapes.shapes_written(loop, sizes):
            return "'{}' is not known to be a row for each sequence".format(of.outgoing)
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None and gradient.turned is not None
        outer, of = site.where
        size = step_shapes.shapes_written(loop, sizes)[of.outgoing][-1]
        blob = loop.new_blob(of.outer + "_carried")
        names = {of.incoming: blob, of.outgoing: blob}
        gradient.operators[:] = [renamed(operator, names) for operator in gradient.operators]
        gradient.net.external_output[:] = [name for name in gradient.net.external_output if name not in names]
        gradient.net.external_input[:] = [name for name in gradient.net.external_input if name not in names]
        gradient.backward_links[:] = [link for link in gradient.backward_links if link.outer != of.outer]
        loop.known.always_rows[blob] = size
        carried = of._replace(incoming=blob, outgoing=blob)
        gradient.turned.carried[outer] = Carried(carried, loop.add_shape_of_rows(size))
