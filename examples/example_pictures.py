"""What the examples' pictures have in common."""

import io
from typing import List, Tuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

POINTS_PER_EPOCH = 40


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that draws without a screen, and without touching pyplot's global state."""
    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    return picture.getvalue()


def smoothed(losses: List[float], batches_per_epoch: int) -> Tuple[List[float], List[float]]:
    """Means over short runs of batches, each placed at the epoch in which its run ends."""
    width = max(1, batches_per_epoch // POINTS_PER_EPOCH)
    starts = range(0, len(losses), width)
    means = [float(np.mean(losses[start : start + width])) for start in starts]
    epochs = [min(start + width, len(losses)) / batches_per_epoch for start in starts]
    return epochs, means
