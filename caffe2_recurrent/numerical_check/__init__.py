"""Comparing the gradients of a net with numerical ones.

net -> roles of its inputs (roles.py) -> values (values.py) -> slopes (slopes.py) -> report (report.py)
"""

from caffe2_recurrent.numerical_check.check import GradientsDiffer, gradcheck
from caffe2_recurrent.numerical_check.report import BlobCheck, GradientReport

__all__ = ["BlobCheck", "GradientReport", "GradientsDiffer", "gradcheck"]
