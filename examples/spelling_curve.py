"""The picture of a training run: the loss, and below it the phoneme error rate, against the epochs."""

from typing import List

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from example_pictures import new_figure, png, smoothed


def draw(losses: List[float], held_out: List[float], baseline: float, batches_per_epoch: int) -> bytes:
    """A PNG: the loss over the batches; the held-out error rate after each epoch, and that of the baseline."""
    figure = new_figure(8, 7)
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(*smoothed(losses, batches_per_epoch), color="tab:blue", linewidth=1.2, label="training words")
    above.set_yscale("log")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_locator(NullLocator())
    above.set_ylabel("loss, nats per phoneme")
    above.set_title("Spelling to pronunciation")
    percent = [100 * rate for rate in held_out]
    epochs = np.arange(1, len(percent) + 1)
    below.plot(epochs, percent, "o-", color="tab:orange", label="held-out words, greedy")
    for epoch, rate in zip(epochs, percent):
        below.annotate(
            "{:.1f}".format(rate),
            (epoch, rate),
            xytext=(0, -18),
            textcoords="offset points",
            ha="center",
            color="tab:orange",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    below.axhline(
        100 * baseline,
        color="black",
        linestyle="--",
        linewidth=1,
        label="letter context, {:.1f}".format(100 * baseline),
    )
    below.set_ylabel("phoneme errors, %")
    below.set_xlabel("epoch")
    below.set_xlim(left=0)
    below.set_ylim(0, 1.1 * below.get_ylim()[1])
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    return png(figure)
