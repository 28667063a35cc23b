"""Where gradients differ, whether they agree once steps are smaller: then a kink or a bend was within the steps."""

from typing import Callable, NamedTuple, Optional

import numpy as np

from caffe2_recurrent.numerical_check.slopes import Slope, is_moved

# The smallest steps are so many times smaller.
MOST = 64
# By how many times less gradients have to differ.
MUCH = 4


class Agreement(NamedTuple):
    """A slope that agrees with the gradient, and how far they may be apart with its step."""

    slope: Slope
    allowed: float


def agreement(
    look: Callable[[float], Slope],
    rounding: Callable[[Slope, float], float],
    value: np.ndarray,
    own: float,
    difference: float,
    relative: float,
    step: float,
) -> Optional[Agreement]:
    """The first one with steps smaller than `step`, by which the net's `own` gradient differed by `difference`.

    `look` gives the slope at an element for a step, `rounding` its error in float32, which grows as steps get smaller.
    What differs by less than that is not looked at: rounding could pass for agreement there; nor is what float32 does
    not change the `value` of the element by. `relative` is what gradients may differ by beside it.
    """
    times = 2
    while times <= MOST and is_moved(value, step / times):
        slope = look(step / times)
        error = rounding(slope, step / times)
        if error > difference:
            return None
        if abs(own - slope.value) <= min(error + relative, difference / MUCH):
            return Agreement(slope, error + relative)
        times *= 2
    return None
