"""What a step keeps for the backward pass, in the memory that its gradient will take."""

from typing import Dict, Iterable, Optional, Set

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import State
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting import gradient_memory
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.wiring import Link

# Position of the gates among their inputs, and of the gates' gradient among their outputs. They, and Mul, read each
# element before they write the gradient in its place.
GATES_OF = {"LSTMUnitGradient": (2, 2), "GRUUnitGradient": (1, 1)}
# A step keeps fewer elements than this in less time than it takes to link them.
FEWEST_ELEMENTS = 4096
IN_PLACE = frozenset(["LSTMUnitGradient", "GRUUnitGradient", "Mul"])


class GradientBuffer(Rule):
    """step: B (kept, or computed again in the backward step)
    backward step: dB = operator(B, ..) -> slice t of the sequence's gradient

    =>  step: B -> slice t of the sequence's gradient
        backward step: reads B there, and dB takes its place

    The sequence's gradient `[T, N, K]` has to be there in the end, so nothing is kept in addition, and nothing is
    computed again. For the gates of an LSTMUnit or GRUUnit, and for the factors that take their place.
    """

    name = "gradient_buffer"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for blob, of_blob in _candidates(loop).items():
            if loop.link(blob) is None:
                yield Site("'{}'".format(blob), (blob, of_blob))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        gradient = loop.gradient
        assert gradient is not None
        blob, of_blob = site.where
        why_not = gradient_memory.why_not_of_sequence(loop, of_blob)
        if why_not is not None:
            return why_not
        position, *others = dataflow.writers(gradient.operators, of_blob)
        if others:
            return "'{}' is written more than once".format(of_blob)
        reading = [index for index, operator in enumerate(gradient.operators) if blob in operator.input]
        if max(reading) > position or (max(reading) == position and gradient.operators[position].type not in IN_PLACE):
            return "'{}' is still read when its gradient is there".format(blob)
        writing = dataflow.writer(loop.operators, blob)
        assert writing is not None
        if loop.operators[writing].type == "ATen":
            return "'{}' is written by ATen, which cannot write to a slice of an outer blob".format(blob)
        return gradient_memory.why_no_room(loop, sizes)

    def loss(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        gradient, (blob, _) = loop.gradient, site.where
        assert gradient is not None
        shape = sizes.shape(gradient.like)
        assert shape is not None
        if blob not in loop.shared and shape[1] * shape[2] < FEWEST_ELEMENTS:
            return "for {} elements in a step the link costs more than it gains".format(shape[1] * shape[2])
        return None

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        gradient = loop.gradient
        assert gradient is not None
        shape = sizes.shape(gradient.like)
        assert shape is not None
        blob, _ = site.where
        # The forward operator makes its states; one slice more than the gradient has does no harm.
        loop.states.append(State(gradient.sequence, loop.add_zeros(shape[-1])))
        loop.links.append(Link(blob, gradient.sequence, 0))
        gradient.operators[:] = [operator for operator in gradient.operators if blob not in operator.output]
        loop.shared[:] = [other for other in loop.shared if other != blob]
        _remove_unread(loop)


def _candidates(loop: Loop) -> Dict[str, str]:
    """Blobs of the forward step and, of the same shape, their gradients or what else may take their memory."""
    if loop.gradient is None:
        return {}
    found = dict(loop.known.overwritten)
    for operator in loop.gradient.operators:
        if operator.type in GATES_OF:
            read, written = GATES_OF[operator.type]
            found[operator.input[read]] = operator.output[written]
    forward = {blob for operator in loop.operators for blob in operator.output}
    return {blob: of_blob for blob, of_blob in found.items() if blob in forward}


def _remove_unread(loop: Loop) -> None:
    """Drop operators at the head of the backward step that computed again what is now kept."""
    gradient = loop.gradient
    assert gradient is not None
    forward = {blob for operator in loop.operators for blob in operator.output}
    linked = {link.inner for link in gradient.backward_links}
    searching = True
    while searching:
        spent: Set[int] = set()
        for position, operator in enumerate(gradient.operators):
            if forward.issuperset(operator.output) and linked.isdisjoint(operator.output):
                if not any(dataflow.readers(gradient.operators, blob, position) for blob in operator.output):
                    spent.add(position)
        gradient.operators[:] = [
            operator for position, operator in enumerate(gradient.operators) if position not in spent
        ]
        searching = bool(spent)
