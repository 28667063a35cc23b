"""The FC that makes the first sequence of a loop for this loop alone, so that another one may take its place."""

from typing import Optional

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import integer
from caffe2_recurrent.operators import copied
from caffe2_recurrent.wiring import Link, own_prefix

# What a rule has made in the place of a sequence like that, which is like that too.
OWN = "own sequence"


def source_of(loop: Loop, sequence: str) -> Optional[caffe2_pb2.OperatorDef]:
    """The FC that makes the sequence for this loop alone, if there is one."""
    if sequence in loop.surroundings.sources:
        (source,) = loop.surroundings.products[loop.surroundings.sources[sequence]]
        return source
    if sequence == loop.made.get(OWN):
        return next(operator for operator in loop.before if sequence in operator.output)
    return None


def why_not_own(loop: Loop, link: Link, may_be_read_whole: bool = False) -> Optional[str]:
    """Why what the link shows slices of cannot be replaced by another sequence.

    `may_be_read_whole`: operators that rules have put around the loop may have the other one as well.
    """
    scope = own_prefix(loop.forward)
    if not scope or not link.outer.startswith(scope):
        return "'{}' is not of the loop's own scope, so somebody may want to see it".format(link.outer)
    source = source_of(loop, link.outer)
    if source is None:
        return "'{}' is not made by an FC for this loop alone".format(link.outer)
    if integer(source, "axis_w", 1) != 1:
        return "the weights that make '{}' are laid out in another way (axis_w)".format(link.outer)
    if [other.inner for other in loop.links if other.outer == link.outer] != [link.inner]:
        return "'{}' is linked more than once".format(link.outer)
    if _is_needed_elsewhere(loop, link.outer, may_be_read_whole):
        return "'{}' is needed as a whole too".format(link.outer)
    return None


def take_source(loop: Loop) -> caffe2_pb2.OperatorDef:
    """A copy of the FC that makes the first sequence; the FC itself is gone."""
    sequence = loop.inputs[0]
    source = source_of(loop, sequence)
    assert source is not None
    if sequence in loop.surroundings.sources:
        loop.surroundings.products[loop.surroundings.sources.pop(sequence)] = []
    else:
        loop.before[:] = [operator for operator in loop.before if operator is not source]
    return copied(source)


def replace(loop: Loop, old: str, inner: str, source: caffe2_pb2.OperatorDef) -> None:
    """Have both steps see slices of what `source` makes, in `inner`, where they saw `old`."""
    for operators in loop.steps:
        for operator in operators:
            operator.input[:] = [inner if blob == old else blob for blob in operator.input]
    gradient = loop.gradient
    seen_again = gradient is not None and any(link.inner == old for link in gradient.links)
    loop.made[OWN] = source.output[0]
    loop.replace_first_sequence(source.output[0], inner, source)
    if gradient is not None and seen_again:
        gradient.links.append(Link(inner, source.output[0], 0))


def _is_needed_elsewhere(loop: Loop, sequence: str, may_be_read_whole: bool) -> bool:
    """Whether the loop sees it in another way than slice by slice, or operators that rules have put around it do."""
    by_position = [state.outer_initial for state in loop.states]
    if loop.gradient is not None:
        by_position += [parameter.outer for parameter in loop.gradient.parameters]
    by_the_loop = loop.inputs.count(sequence) > 1 or sequence in by_position or loop.is_reference(sequence)
    around = [operator for operator in [*loop.before, *loop.after_gradient] if sequence in operator.input]
    of_shape = all(loop.known.of_shape.issuperset(operator.output) for operator in around)
    return by_the_loop or not (of_shape or may_be_read_whole)
