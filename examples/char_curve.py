"""The picture of a training run: bits per character against the epochs."""

from typing import List

import numpy as np

from example_pictures import new_figure, png, smoothed


def draw(losses: List[float], held_out: List[float], unigram: float, batches_per_epoch: int) -> bytes:
    """A PNG: the loss over the batches, the held-out figure after each epoch, the baseline, all in bits."""
    figure = new_figure(8, 5)
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
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # room for the number
    axes.set_title("Character-level LSTM")
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)
