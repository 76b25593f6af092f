"""How fast the systems of a comparison learn, as a picture file that stands alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wardround.report.figures import CONVERGENCE, EPOCH, convergence_lines
from wardround.report.pictures import INK, MUTED, SERIES, STYLE
from wardround.report.plots import DASHES, Series
from wardround.report.reading import Record
from wardround.report.svg import marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, TALL = 360, 270  # of a panel with its axes, in points
ABREAST, ENTRY = 3, 16  # entries of the legend in a row, and the height of such a row in points


def save_convergence(file: Path, record: Record) -> Path | None:
    """Draw means over clients of accuracy and balanced accuracy over local epochs into `file`, a line a system.

    Its ending says the format. Nothing is drawn, and None returned, where nothing has been evaluated.
    """
    import matplotlib

    found = {title: convergence_lines(record, metric) for metric, title in CONVERGENCE.items()}
    panels = {title: lines for title, lines in found.items() if lines}
    if not panels:
        return None
    with matplotlib.rc_context(STYLE):
        _figure(panels).savefig(file, dpi=150)
    return file


def _figure(panels: Mapping[str, Sequence[Series]]) -> Figure:
    """The panels side by side, one legend below them."""
    from matplotlib.figure import Figure

    lines = next(iter(panels.values()))
    legend = ENTRY * -(-len(lines) // ABREAST) + 14
    size = (WIDE * len(panels), TALL + legend)
    figure = Figure(figsize=(size[0] / 72, size[1] / 72))
    for number, (title, drawn) in enumerate(panels.items()):
        box = (WIDE * number + 52, legend + 44, WIDE - 72, TALL - 76)
        axes = figure.add_axes([value / size[i % 2] for i, value in enumerate(box)])  # type: ignore[call-overload]
        _panel(axes, f"{title}, %", drawn)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=ABREAST, frameon=False, labelcolor=INK)
    return figure


def _panel(axes: Axes, title: str, lines: Sequence[Series]) -> None:
    """One panel: a line a system with its band."""
    from matplotlib.ticker import MaxNLocator

    for one in lines:
        _line(axes, one)
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"{EPOCH}s", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, one: Series) -> None:
    """One line, with about eight markers however long, and a band of one standard deviation."""
    colour, (x, y) = SERIES[one.look % len(SERIES)], (np.asarray(one.x, float), np.asarray(one.y, float))
    every = max(1, len(one.x) // 8)
    dash = DASHES[one.dash % len(DASHES)]
    axes.plot(x, y, color=colour, linestyle=dash, marker=marker(one.look), markevery=every, ms=4, label=one.label)
    if any(one.spread):
        spread = np.asarray(one.spread, float)
        axes.fill_between(x, y - spread, y + spread, color=colour, alpha=0.13, linewidth=0)
