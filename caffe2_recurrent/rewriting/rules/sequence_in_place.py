"""What a step writes over the slice of a sequence that it has read, in a blob of its own."""

from typing import Iterable, List, Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operators import SUM, copied
from caffe2_recurrent.rewriting import gradient_memory
from caffe2_recurrent.rewriting.rule import Rule, Site
from caffe2_recurrent.rewriting.sequences import own_sequence
from caffe2_recurrent.rewriting.steps import dataflow, versions
from caffe2_recurrent.rewriting.steps.dataflow import Operators
from caffe2_recurrent.rewriting.steps.repeatable import REPEATABLE


class SequenceInPlace(Rule):
    """before the loop: X = FC(x, V, c)
    step: y = FC(h, W, b);  x_t = Sum(x_t, y), in place of the slice of X
    backward step: reads x_t

    =>  step: y = FC(h, W, b);  y = Sum(y, x_t)
        backward step: the same again, since the steps share y;  reads y

    This is how `LSTM` keeps its gates with `memory_optimization`. The sequence has to stay what it is for rules that
    have the gates made in another way. `gradient_buffer` keeps y in the memory of its gradient, and then nothing is
    computed again; where it could not, the sequence is left as it is.
    """

    name = "sequence_in_place"

    def sites(self, loop: Loop) -> Iterable[Site]:
        for position, operator in enumerate(loop.operators):
            link = loop.link(operator.output[0]) if operator.type == SUM else None
            if link is not None and link.outer == loop.inputs[0] and link.inner in operator.input:
                yield Site("'{}'".format(link.inner), (position, link))

    def refusal(self, loop: Loop, site: Site, sizes: Sizes) -> Optional[str]:
        position, link = site.where
        why_not = own_sequence.why_not_own(loop, link)
        if why_not is not None:
            return why_not
        others = [blob for blob in loop.operators[position].input if blob != link.inner]
        if len(others) != 1:
            return "it is not the sum of the slice and one other blob"
        (other,) = others
        making = dataflow.writers(loop.operators, other)
        if len(making) != 1 or dataflow.readers(loop.operators, other, making[0]) != [position]:
            return "'{}' is not made for this sum alone".format(other)
        if link.inner in loop.net.external_output or other in loop.net.external_output or loop.link(other) is not None:
            return "'{}' and '{}' are needed behind the step too".format(link.inner, other)
        version = versions.of_step(loop, position, link.inner)
        if isinstance(version, str):
            return version
        if dataflow.writers(loop.operators, link.inner) != [position]:
            return "other operators write '{}' too".format(link.inner)
        if loop.gradient is None:
            return None
        if link not in loop.gradient.links:
            return "the backward step does not see the slice of '{}'".format(link.outer)
        again = _made_again(loop, position)
        rest = _not_in(loop.gradient.operators, [loop.operators[index] for index in again])
        if any(other in [*operator.input, *operator.output] for operator in rest):
            return "the backward step uses '{}' too".format(other)
        for index in again:
            operator = loop.operators[index]
            if operator.type not in REPEATABLE:
                return "{}, which makes '{}', is not known to give the same each time it runs".format(
                    operator.type, operator.output[0]
                )
            changed = [blob for blob in operator.input if dataflow.writers(loop.operators[index + 1 :], blob)]
            if changed:
                return "'{}', of which it is made, is overwritten later".format(changed[0])
        return gradient_memory.why_no_room(loop, sizes)

    def rewrite(self, loop: Loop, site: Site, sizes: Sizes) -> None:
        position, link = site.where
        total = loop.operators[position]
        version = versions.of_step(loop, position, link.inner)
        assert not isinstance(version, str)
        (other,) = (blob for blob in total.input if blob != link.inner)
        again = [loop.operators[index] for index in _made_again(loop, position)]
        versions.rename(version, link.inner, other)
        total.input[:], total.output[:] = [other, link.inner], [other]
        if loop.gradient is None:
            return
        if other not in loop.shared:
            loop.shared.append(other)
        backward = loop.gradient.operators
        backward[:] = [*map(copied, again), *_not_in(backward, again)]


def _not_in(operators: Operators, others: Operators) -> List[caffe2_pb2.OperatorDef]:
    return [operator for operator in operators if operator not in others]


def _made_again(loop: Loop, position: int) -> List[int]:
    """Where the step makes that sum, and those of its parts that the steps share."""
    earlier = loop.operators[:position]
    return [*dataflow.leading_to(earlier, loop.operators[position].input, through=loop.shared), position]
