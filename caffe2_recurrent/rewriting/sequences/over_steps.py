"""What a step-net blob holds in all steps, as one outer blob `[T, N, k]`, for operators that run after the loop.

a sequence, or its gradient          the outer blob itself
a state, before or after the step    slices 0..T-1 or 1..T of the state blob
any other blob of the step           linked to a buffer of its own
"""

from typing import Callable, NamedTuple, Optional, Sequence, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.rewriting.sequences import state_slices
from caffe2_recurrent.rewriting.steps import dataflow
from caffe2_recurrent.wiring import Link

# Slices 0..T-1 and 1..T of T + 1, by the first of them.
SLICES = (0, 1)


class OverSteps(NamedTuple):
    """A way to get at all values of a blob; `take` changes the loop, and gives the outer blob.

    `take` wants a function that gives the outer blob `[k]` by which a new buffer is sized.
    """

    take: Callable[[Callable[[], str]], str]


def of_forward(loop: Loop, inner: str) -> Union[OverSteps, str]:
    """The values that the backward step reads of a blob of the forward step, or why not."""
    assert loop.gradient is not None
    link = loop.link(inner)
    if link is not None:
        states = [state.outer_states for state in loop.states]
        if link.offset not in (SLICES if link.outer in states else (0,)):
            return "'{}' is linked to another slice of '{}' than that of the step".format(inner, link.outer)
        return OverSteps(lambda sized: _slice(loop, link) if link.outer in states else link.outer)
    if inner in loop.shared or dataflow.writer(loop.gradient.operators, inner) is not None:
        return "'{}' is not kept, but computed again in the backward pass".format(inner)
    if dataflow.writer(loop.operators, inner) is None:
        return "'{}' is no blob of the step".format(inner)
    refusal = _why_not_linked(loop.operators, inner, "the step")
    if refusal is not None:
        return refusal

    def take(sized: Callable[[], str]) -> str:
        link = loop.add_buffer(inner, sized())
        loop.links.append(link)
        return _slice(loop, link)

    return OverSteps(take)


def of_gradient(loop: Loop, inner: str, before: int) -> Union[OverSteps, str]:
    """The values that the backward operator at position `before` reads of a gradient blob, or why not."""
    gradient = loop.gradient
    assert gradient is not None
    if any(inner in operator.output for operator in gradient.operators[before + 1 :]):
        return "'{}' is changed after it has been read".format(inner)
    if inner in gradient.of_parameters:
        return "'{}' is the gradient of a parameter too".format(inner)
    links = [link for link in gradient.backward_links if link.inner == inner]
    if links:
        (link,) = links[:1]
        if not _is_state_gradient(loop, link):
            return OverSteps(lambda sized: link.outer)
        if link.offset == 0:
            return "'{}' is the gradient of a state, which other steps add to".format(inner)
        return OverSteps(lambda sized: _slice(loop, link))
    if dataflow.writer(gradient.operators, inner) is None:
        return "'{}' is not computed by the backward step".format(inner)
    refusal = _why_not_linked(gradient.operators, inner, "the backward step")
    if refusal is not None:
        return refusal

    def take(sized: Callable[[], str]) -> str:
        assert gradient is not None
        link = loop.add_buffer(inner, sized())
        gradient.backward_links.append(link)
        values = _slice(loop, link)
        # The view is made by the forward operator, but whoever reads it has to wait for the backward steps.
        gradient.others.append(values)
        return values

    return OverSteps(take)


def _why_not_linked(operators: Sequence[caffe2_pb2.OperatorDef], blob: str, step: str) -> Optional[str]:
    """Why what `operators` write to `blob` cannot be written to slices of a buffer, or None."""
    writers = [operators[position] for position in dataflow.writers(operators, blob)]
    # A blob that is linked can have one size only. Operators in place keep it.
    if sum(blob not in writer.input for writer in writers) > 1:
        return "'{}' is the name of several values of {}, which may be of different sizes".format(blob, step)
    if writers[-1].type == "ATen":
        return "'{}' is written by ATen, which cannot write to a slice of an outer blob".format(blob)
    return None


def vector_along(loop: Loop, outer: str, axis: int, dimensions: int) -> str:
    """A one-dimensional outer blob as long as `outer` along `axis` of its `dimensions`; buffers are sized by such."""
    if dimensions == 1:
        return outer
    # Not a slice of it: there is none of what is for no sequences.
    size = loop.add_before("Shape", [outer], "{}_size_{}".format(outer, axis), axes=[axis])
    return loop.add_before("ConstantFill", [size], "{}_vector_{}".format(outer, axis), input_as_shape=1, value=0.0)


def known(loop: Loop, inner: str) -> Optional[str]:
    """The outer blob that has been taken with all values of a gradient blob, if there is one."""
    assert loop.gradient is not None
    taken = [loop.made.get(_key(link)) for link in loop.gradient.backward_links if link.inner == inner]
    return taken[0] if len(taken) == 1 else None


def _is_state_gradient(loop: Loop, link: Link) -> bool:
    gradient = loop.gradient
    assert gradient is not None
    both = {other.offset for other in gradient.backward_links if other.outer == link.outer}
    return both != {0} or link.offset == 1


def _slice(loop: Loop, link: Link) -> str:
    """The slices that a state blob or buffer showed to the steps, as a blob made after the loop."""
    key = _key(link)
    if key not in loop.made:
        alias = next(
            (alias for alias in loop.aliases if alias.outer_states == link.outer and alias.offset == link.offset == 1),
            None,
        )
        loop.made[key] = alias.outer_output if alias is not None else _sliced(loop, link)
    return loop.made[key]


def _key(link: Link) -> Tuple[str, str, int]:
    return "slice", link.outer, link.offset


def _sliced(loop: Loop, link: Link) -> str:
    if all(link.outer != state.outer_states for state in loop.states):
        # The gradient of a state: neither operator names it as its output, but the net has to know where it is from.
        assert loop.gradient is not None
        loop.gradient.others.append(link.outer)
    else:
        loop.add_output(link.outer)
    target = loop.new_blob(link.outer + ("_before" if link.offset == 0 else "_after"))
    loop.after_gradient.append(state_slices.operator(loop, link.outer, target, link.offset))
    return target
