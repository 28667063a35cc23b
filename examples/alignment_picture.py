"""The picture of what a network looked at: a map for each word, with its letters across and what was said downwards."""

from typing import NamedTuple, Sequence, Tuple

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from example_pictures import new_figure, png

COLUMNS = 3
COLOURS = "Blues"


class Alignment(NamedTuple):
    title: str
    letters: str
    phonemes: Tuple[str, ...]
    weights: np.ndarray  # [phonemes, letters], each row of sum 1


def draw(alignments: Sequence[Alignment]) -> bytes:
    """A PNG: the darker a square is, the more of the phoneme's context came from the letter."""
    columns = min(COLUMNS, len(alignments))
    rows = -(-len(alignments) // columns)
    figure = new_figure(4 * columns + 0.8, 4 * rows)
    shades = ScalarMappable(Normalize(0, 1), COLOURS)
    shades.set_array(np.empty(0))  # older matplotlib wants one
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(alignments) :]:
        axes.set_visible(False)
    for axes, alignment in zip(grid.flat, alignments):
        axes.pcolormesh(alignment.weights, cmap=COLOURS, norm=shades.norm, edgecolors="0.88", linewidth=0.8)
        axes.invert_yaxis()  # time goes down the page
        axes.set_xticks(np.arange(len(alignment.letters)) + 0.5)
        axes.set_xticklabels(alignment.letters)
        axes.set_yticks(np.arange(len(alignment.phonemes)) + 0.5)
        axes.set_yticklabels(alignment.phonemes)
        axes.tick_params(length=0, labelsize=12)
        axes.set_title(alignment.title, fontsize=12)
    for axes in grid[:, 0]:
        axes.set_ylabel("phoneme said")
    # The lowest of each column.
    for axes in grid.flat[max(0, len(alignments) - columns) : len(alignments)]:
        axes.set_xlabel("letter")
    figure.subplots_adjust(hspace=0.3, wspace=0.3)
    figure.colorbar(shades, ax=grid.ravel().tolist(), shrink=0.6, pad=0.02, label="attention weight")
    return png(figure)
