"""What is to be reached, as ratios of time (theirs / ours optimised), and whether it is."""

from typing import Dict, NamedTuple, Optional, Tuple

from layers import STOCK, TRAINING
from memory import TORCH

# A time within so many times that of the products alone will do as well.
OF_PRODUCTS = 1.3
# Time with `memory_optimization` over that without.
RECOMPUTE = 1.15
KEPT = 4  # bytes a step
# Past the targets, against another torch.
AIM = 1.0

OTHER_TORCH = "other torch"

# (training, forward)
Pair = Tuple[float, float]


class Targets(NamedTuple):
    stock: Pair
    torch: Pair
    other_torch: Pair

    def ratio(self, rival: str, pass_: str) -> Optional[float]:
        pair = {STOCK: self.stock, TORCH: self.torch, OTHER_TORCH: self.other_torch}.get(rival)
        return None if pair is None else pair[0 if pass_ == TRAINING else 1]


LARGE = Targets((1.6, 1.7), (1.25, 1.2), (1.0, 1.0))
TARGETS: Dict[str, Targets] = {
    "20,128,40,800": LARGE,
    "100,64,512,512": LARGE,
    "50,32,128,256": Targets((2.0, 2.4), (1.5, 1.25), (1.0, 0.95)),
    "100,16,64,128": Targets((2.2, 2.5), (2.0, 1.35), (0.8, 0.7)),
    "25,1,64,100": Targets((1.6, 1.3), (4.0, 2.0), (1.0, 1.0)),
}

MET, MET_BY_PRODUCTS, MISSED = "met", "met by the limit", "not met"


def target(shape: str, rival: str, pass_: str) -> Optional[float]:
    """None where nothing was asked for."""
    targets = TARGETS.get(shape)
    return None if targets is None else targets.ratio(rival, pass_)


def verdict(ratio: float, wanted: float, of_products: Optional[float]) -> str:
    """`of_products` is our time over that of the products alone. Ratios are compared as they are printed."""
    if round(ratio, 2) >= wanted:
        return MET
    if of_products is not None and round(of_products, 2) <= OF_PRODUCTS:
        return MET_BY_PRODUCTS
    return MISSED
