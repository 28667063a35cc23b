"""What a caller promises of the runs of a net, as no operator tells it."""

from typing import NamedTuple


class Promises(NamedTuple):
    """As the arguments of `optimize`."""

    constant_threads: bool = False
    constant_weights: bool = False
