"""`numerical_check.smaller_steps`: when a gradient counts as right by smaller steps, and when it does not."""

import numpy as np
import pytest

from caffe2_recurrent.numerical_check.slopes import Slope
from caffe2_recurrent.numerical_check.smaller_steps import MOST, agreement

ROUNDING = 1e-4


def found(slopes, value=1.0, own=1.0, difference=0.5, relative=0.001):
    """What is found where `slopes` are those of a half of the step, a quarter and so on, and for which steps it is
    looked for. Rounding grows as steps get smaller.
    """
    looked = []

    def look(step):
        looked.append(step)
        return Slope(slopes[min(len(looked), len(slopes)) - 1], 0.0, 0.0)

    def rounding(_, step):
        return ROUNDING / step

    return agreement(look, rounding, np.float32(value), own, difference, relative, 1.0), looked


def test_the_first_slope_that_agrees():
    agreed, looked = found([1.5, 1.2, 1.0002])
    assert looked == [0.5, 0.25, 0.125]
    assert agreed.slope.value == 1.0002
    assert agreed.allowed == pytest.approx(8 * ROUNDING + 0.001)


def test_slopes_that_never_agree():
    agreed, looked = found([1.5])
    assert agreed is None
    assert looked[-1] == 1 / MOST


def test_what_is_not_much_nearer_does_not_agree():
    """Though it is within what is allowed."""
    agreed, _ = found([1.002], difference=0.004, relative=0.003)
    assert agreed is None
    agreed, _ = found([1.0009], difference=0.004, relative=0.003)
    assert agreed is not None


def test_what_rounding_explains_is_not_looked_for():
    agreed, looked = found([1.5, 1.5, 1.0], difference=0.0005)
    assert agreed is None
    # Rounding would be 0.0008 with the third.
    assert looked == [0.5, 0.25, 0.125]


def test_steps_that_float32_loses():
    agreed, looked = found([1.5], value=2.0**22 + 1)
    assert agreed is None
    assert looked == [0.5]


def test_a_gradient_that_is_no_number():
    agreed, _ = found([1.0], own=float("nan"), difference=float("nan"))
    assert agreed is None
