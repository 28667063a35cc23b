"""Whether the memory of the sequence's gradient `[T, N, K]` can hold something else until the gradient is there."""

from typing import Optional

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes

TAKEN = "the sequence's gradient holds another blob already"


def is_taken(loop: Loop) -> bool:
    """Whether it holds something else already."""
    assert loop.gradient is not None
    return any(state.outer_states == loop.gradient.sequence for state in loop.states)


def why_not_of_sequence(loop: Loop, of_blob: str) -> Optional[str]:
    """Why the gradient `of_blob` is not what the backward step puts there."""
    assert loop.gradient is not None
    links = [link for link in loop.gradient.backward_links if link.inner == of_blob]
    if [link.outer for link in links] != [loop.gradient.sequence]:
        return "'{}' is not the gradient of the first sequence".format(of_blob)
    return None


def why_no_room(loop: Loop, sizes: Sizes) -> Optional[str]:
    """Why each step of the loop, which has a gradient, cannot keep a blob in the slice of its sequence's gradient."""
    gradient = loop.gradient
    assert gradient is not None
    if gradient.sequence in loop.surroundings.busy:
        return "other operators use '{}' before it holds the sequence's gradient".format(gradient.sequence)
    if is_taken(loop):
        return TAKEN
    shape = sizes.shape(gradient.like)
    if shape is None or len(shape) != 3:
        return "the shape of the sequence '{}' is not known; give shapes".format(gradient.like)
    return None
