"""Does what has been fed fit a net and its loops?

workspace -> what is missing, factors of products (check.py) -> loop by loop: what its steps say of their states, and
what they read (steps.py, operands.py); sequences, initial values and lengths beside each other (loops.py)
"""

from caffe2_recurrent.input_check.check import check_inputs

__all__ = ["check_inputs"]
