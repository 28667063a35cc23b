"""The picture of the times: one panel for each pass and number of threads, a group of bars for each shape."""

import io
import itertools
from typing import Any, Dict, List, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from layers import OPTIMISED, OURS, PASSES, STOCK
from reporting import Times, rivals
from sections import PRODUCTS, threads_text
from targets import OF_PRODUCTS

TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)
COLOURS = {STOCK: "tab:gray", OURS: "tab:cyan", OPTIMISED: "tab:orange"}
OTHER_COLOURS = ("tab:red", "tab:purple", "tab:green", "tab:brown", "tab:pink", "tab:olive")


def draw(section: Dict[str, Any]) -> bytes:
    """A PNG of the LSTM's best times, as multiples of the products alone, or of stock Caffe2 without those."""
    all_times = [Times(record) for record in section["records"] if record["cell"] == "LSTM"]
    threads = list(dict.fromkeys(times.threads for times in all_times))
    titles = {rival.name: rival.title for rival in rivals(section)}
    names = [name for name in [*titles, OURS, OPTIMISED] if any(name in times.rounds for times in all_times)]
    unit = PRODUCTS if all(PRODUCTS in times.rounds for times in all_times) else STOCK
    colours = _colours(names)
    figure = Figure(figsize=(13, 4.2 * len(threads) + 0.8), dpi=110)
    FigureCanvasAgg(figure)  # draws without a screen, and without touching pyplot's global state
    panels = figure.subplots(len(threads), len(PASSES), squeeze=False, sharey=True)
    for row, count in zip(panels, threads):
        for axes, pass_ in zip(row, PASSES):
            rows = [times for times in all_times if times.threads == count and times.pass_ == pass_]
            _panel(axes, rows, {name: titles.get(name, name) for name in names}, colours, unit)
            axes.set_title("{}, {}".format(pass_, threads_text(count)))
        row[0].set_ylabel("time / {}".format(unit))
    if unit == PRODUCTS:
        # What has its gates and products in one pass may take less time than the products by themselves.
        least = min(times.ratio(name, unit, by_median=False) or 1.0 for times in all_times for name in names)
        panels.flat[0].set_ylim(bottom=min(0.5, 0.9 * least))
    legend: Dict[str, Any] = {}
    for axes in panels.flat:
        handles, labels = axes.get_legend_handles_labels()
        legend.update(zip(labels, handles))
    figure.legend(legend.values(), legend, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.1 / len(threads), 1, 1))
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _colours(names: Sequence[str]) -> Dict[str, str]:
    others = itertools.cycle(OTHER_COLOURS)
    return {name: COLOURS[name] if name in COLOURS else next(others) for name in names}


def _panel(axes: Any, rows: Sequence[Times], titles: Dict[str, str], colours: Dict[str, str], unit: str) -> None:
    # Some have a forward pass only, and leave no gap elsewhere.
    names = [name for name in titles if any(name in times.rounds for times in rows)]
    width = 0.84 / max(1, len(names))
    for index, name in enumerate(names):
        heights: List[float] = [times.ratio(name, unit, by_median=False) or 0.0 for times in rows]
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(rows))]
        axes.bar(places, heights, width, label=titles[name], color=colours[name])
        for place, height in zip(places, heights):
            if height:
                text = "{:.1f}".format(height) if height < 10 else "{:.0f}".format(height)
                axes.annotate(
                    text,
                    (place, height),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                    # Or the line at the limit would cross it.
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
                )
    # The time of N = 1 is a large multiple of its small products.
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "{:g}".format(value)))
    if unit == PRODUCTS:
        limit = "{} times the products alone".format(OF_PRODUCTS)
        axes.axhline(OF_PRODUCTS, color="black", linestyle=":", linewidth=1, label=limit)
        # Room for the number on the longest bar.
        axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.set_xticks(range(len(rows)))
    axes.set_xticklabels([times.shape for times in rows], fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
