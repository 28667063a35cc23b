"""Which sequences have not ended yet, for all steps at once."""

from typing import Optional, Set

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.rewriting.steps.rows import DIMENSIONS
from caffe2_recurrent.wiring import Link


def why_no_mask(loop: Loop, lengths: Optional[str], timestep: str, sizes: Sizes) -> Optional[str]:
    """Why the functions below cannot say what an operator that gets these lengths and this step number does."""
    if lengths is None:
        return None
    if not loop.is_reference(lengths):
        return "its lengths '{}' are not the same in all steps".format(lengths)
    if timestep != loop.timestep:
        return "it counts the steps by '{}', not by the loop's '{}'".format(timestep, loop.timestep)
    shape = sizes.shape(loop.inputs[0])
    if shape is not None and len(shape) != DIMENSIONS:
        return "the first sequence '{}' has {} dimensions".format(loop.inputs[0], len(shape))
    return None


def step_mask(loop: Loop, lengths: str) -> str:
    """A step-net blob `[1, N, 1]`, 1 where step t is inside the sequence and 0 past its end; `lengths` is int32 `[N]`.

    before the loop: mask [T, N, 1] = t < lengths[n], from the shape of the first sequence
    step: its slice t
    """
    key = ("mask", lengths)
    if key not in loop.made:
        loop.made[key] = step_of(loop, mask(loop, lengths, loop.inputs[0]), "mask_t")
    return loop.made[key]


def step_outside(loop: Loop, lengths: str) -> str:
    """A step-net blob `[1, N, 1]`, 0 where step t is inside the sequence and 1 past its end."""
    key = ("outside", lengths)
    if key not in loop.made:
        loop.made[key] = step_of(loop, outside(loop, mask(loop, lengths, loop.inputs[0])), "outside_t")
    return loop.made[key]


def mask(loop: Loop, lengths: str, sequence: str) -> str:
    """An outer blob `[T, N, 1]`, 1 inside of sequences and 0 past their ends, from the shape of `sequence` `[T, N, k]`.

    It is computed before the loop; the same one if it is asked for again, of whatever sequence.
    """
    key = ("whole mask", lengths)
    if key not in loop.made:
        loop.made[key] = _mask(loop, lengths, sequence)
    return loop.made[key]


def _mask(loop: Loop, lengths: str, sequence: str) -> str:
    column = loop.add_before("Slice", [sequence], "mask_column", starts=[0, 0, 0], ends=[-1, -1, 1])
    loop.known.of_shape.add(column)
    ones = loop.add_before("ConstantFill", [column], "mask_ones", value=1.0)
    by_sequence = loop.add_before("Transpose", [ones], "mask_by_sequence", axes=[1, 0, 2])
    cut = loop.add_before(
        "SequenceMask",
        [by_sequence, lengths],
        "mask_cut",
        mode="sequence",
        axis=1,
        fill_val=0.0,
    )
    return loop.add_before("Transpose", [cut], "mask", axes=[1, 0, 2])


def outside(loop: Loop, inside: str) -> str:
    """An outer blob, 0 where the mask `inside` is 1, and 1 where it is 0."""
    ones = loop.add_before("ConstantFill", [inside], "outside_ones", value=1.0)
    return loop.add_before("Sub", [ones, inside], "outside")


def outer_masks(loop: Loop) -> Set[str]:
    """The outer blobs of which steps see slices by `step_of`: sequences in which all are numbers."""
    return {blob for key, blob in loop.made.items() if key[0] == "outer mask"}


def step_of(loop: Loop, outer: str, name: str) -> str:
    """A step-net blob that is slice t of a mask."""
    loop.add_reference(outer)
    loop.made[("outer mask", outer)] = outer
    inner = loop.new_blob(name)
    loop.links.append(Link(inner, outer, 0))
    return inner
