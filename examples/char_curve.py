"""The picture of a training run: bits per character against the epochs."""

import io
from typing import List, Tuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

POINTS_PER_EPOCH = 40


def draw(losses: List[float], held_out: List[float], unigram: float, batches_per_epoch: int) -> bytes:
    """A PNG: the loss over the batches, the held-out figure after each epoch, the baseline, all in bits."""
    figure = Figure(figsize=(8, 5), dpi=120)
    FigureCanvasAgg(figure)  # draws without a screen, and without touching pyplot's global state
    axes = figure.add_subplot(1, 1, 1)
    epochs, means = smoothed(losses, batches_per_epoch)
    axes.plot(epochs, means, color="tab:blue", linewidth=1.2, label="training text")
    axes.plot(np.arange(1, len(held_out) + 1), held_out, "o-", color="tab:orange", label="held-out text")
    axes.axhline(unigram, color="black", linestyle="--", linewidth=1, label="unigram entropy, {:.2f}".format(unigram))
    if held_out:
        axes.annotate(
            "{:.2f}".format(held_out[-1]),
            (len(held_out), held_out[-1]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color="tab:orange",
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("bits per character")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title("Character-level LSTM")
    axes.grid(alpha=0.3)
    axes.legend()
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
