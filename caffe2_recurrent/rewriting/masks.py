"""Which sequences have not ended yet, for all steps at once."""

from caffe2_recurrent.rewriting.loop import Loop
from caffe2_recurrent.wiring import Link


def step_mask(loop: Loop, lengths: str) -> str:
    """A step-net blob `[1, N, 1]`, 1 where step t is inside the sequence and 0 past its end; `lengths` is int32 `[N]`.

    before the loop: mask [T, N, 1] = t < lengths[n], from the shape of the first sequence
    step: its slice t
    """
    key = ("mask", lengths)
    if key not in loop.made:
        beside, sequence = loop.forward, loop.inputs[0]
        column = loop.add_before("Slice", [sequence], "mask_column", beside, starts=[0, 0, 0], ends=[-1, -1, 1])
        ones = loop.add_before("ConstantFill", [column], "mask_ones", beside, value=1.0)
        by_sequence = loop.add_before("Transpose", [ones], "mask_by_sequence", beside, axes=[1, 0, 2])
        cut = loop.add_before(
            "SequenceMask",
            [by_sequence, lengths],
            "mask_cut",
            beside,
            mode="sequence",
            axis=1,
            fill_val=0.0,
        )
        outer = loop.add_before("Transpose", [cut], "mask", beside, axes=[1, 0, 2])
        loop.add_reference(outer)
        inner = loop.new_blob("mask_t")
        loop.links.append(Link(inner, outer, 0))
        loop.made[key] = inner
    return loop.made[key]
