"""Heat maps side by side on one colour scale, as a picture file that stands alone: in a document, on a slide.

The drawings of `svg.py` take their colours from the page around them; a file of its own has to bring them, and has
those of the page in daylight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wardround.report.svg import margin, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, PAPER, ABOVE, BELOW = "#1a212b", "#596473", "#ffffff", "#0b4a80", "#b04a00"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#c05c93", "#d18f00", "#3d9bd1", "#857400", "#6b7280")  # of lines and dots
WIDE, TALL, GAP, TITLE = 56.0, 26.0, 16.0, 24.0  # of a cell, between heat maps, of a title; in points
ABREAST = 3  # heat maps in a row, where each is complete in itself
MOST_NUMBERS = 24  # rows or columns up to which cells hold their numbers
FLAT = 8  # letters of a column's name that fit above a cell without a slant

STYLE: Any = {"font.size": 11, "text.parse_math": False, "figure.facecolor": PAPER, "text.color": INK}


@dataclass(frozen=True)
class HeatMap:
    """One heat map.

    Attributes:
        title: above it.
        rows, columns: the names.
        values: `(rows, columns)`; NaN leaves a dash.
        bold: `(rows, columns)`, True where the number is in bold type; None for nowhere.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: NDArray[np.float64]
    bold: NDArray[np.bool_] | None = None

    @property
    def flat(self) -> bool:
        """Whether the columns' names need no slant."""
        return all(len(name) <= FLAT for name in self.columns)

    @property
    def edges(self) -> tuple[float, float, float]:
        """Points that the names need at the left, with the title at the top, and at the right."""
        names = 0.0 if self.flat else margin([shorten(name) for name in self.columns])
        return margin([shorten(name) for name in self.rows]), TITLE + (20.0 if self.flat else 0.7 * names), 0.6 * names

    @property
    def cells(self) -> tuple[float, float]:
        """Width and height of all cells, in points."""
        return WIDE * len(self.columns), TALL * len(self.rows)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of everything, in points."""
        (left, top, right), (wide, tall) = self.edges, self.cells
        return max(left + wide + right, 7.0 * len(self.title)), top + tall


def save_heatmaps(file: Path, grid: Sequence[Sequence[HeatMap]], text: Callable[[float], str]) -> None:
    """Draw rows of heat maps into `file`; its ending says the format (`.png`, `.svg`, `.pdf`).

    All share one colour scale: paper at 0, blue at the largest distance from 0, orange for values below 0.

    Args:
        file: its folder is made when absent.
        grid: rows of heat maps.
        text: how a value is written in its cell.
    """
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    known = [np.abs(one.values[np.isfinite(one.values)]) for row in grid for one in row]
    extreme = float(np.concatenate([*known, np.zeros(1)]).max())
    with matplotlib.rc_context(STYLE):
        figure, places = _layout(grid)
        for axes, heatmap in places:
            _cells(axes, heatmap, extreme, text)
            _names(axes, heatmap)
        figure.savefig(file, dpi=150)


def save_trained(file: Path, found: Mapping[str, Any]) -> None:
    """Draw `trained.json`: the clients' feature distances after training with each method, and before it.

    Methods that began with the same network share one picture of that; else each has a row with its own.
    """
    clients, systems = found["clients"], found["systems"]

    def heatmap(system: Mapping[str, Any], when: str, title: str) -> HeatMap:
        return HeatMap(title, clients, clients, np.array(system[when], dtype=np.float64))

    if all(system["before"] == systems[0]["before"] for system in systems):
        maps = [heatmap(systems[0], "before", "before training")]
        maps += [heatmap(system, "after", system["label"]) for system in systems]
        grid = [maps[start : start + ABREAST] for start in range(0, len(maps), ABREAST)]
    else:
        grid = [[heatmap(s, when, f"{s['label']}, {when} training") for when in ("before", "after")] for s in systems]
    save_heatmaps(file, grid, lambda value: f"{value:.2f}")


def _layout(grid: Sequence[Sequence[HeatMap]]) -> tuple[Figure, list[tuple[Axes, HeatMap]]]:
    """A figure that holds all heat maps, and the axes of each, which cover its cells."""
    from matplotlib.figure import Figure

    width = max(sum(one.size[0] + GAP for one in row) for row in grid) + GAP
    heights = [max(one.size[1] for one in row) + GAP for row in grid]
    height = sum(heights) + GAP
    figure, places, top = Figure(figsize=(width / 72, height / 72)), [], height - GAP
    for row, tall in zip(grid, heights, strict=True):
        left = GAP
        for one in row:
            place = (left + one.edges[0], top - one.size[1], *one.cells)
            box = tuple(value / whole for value, whole in zip(place, (width, height) * 2, strict=True))
            places.append((figure.add_axes(box), one))  # type: ignore[arg-type]
            left += one.size[0] + GAP
        top -= tall
    return figure, places


def _cells(axes: Axes, heatmap: HeatMap, extreme: float, text: Callable[[float], str]) -> None:
    """One rectangle and one number for each value; on a deep cell the number is in the paper's colour."""
    from matplotlib.patches import Rectangle

    numbers = max(heatmap.values.shape) <= MOST_NUMBERS
    for (row, column), value in np.ndenumerate(heatmap.values):
        if not np.isfinite(value):
            axes.text(column, row, "–", color=MUTED, ha="center", va="center")
            continue
        depth = abs(value) / extreme if extreme else 0.0
        colour = ABOVE if value >= 0 else BELOW
        axes.add_patch(Rectangle((column - 0.49, row - 0.48), 0.98, 0.96, facecolor=colour, alpha=0.04 + 0.96 * depth))
        ink = PAPER if depth > 0.65 else INK
        weight = "bold" if heatmap.bold is not None and heatmap.bold[row, column] else "normal"
        axes.text(column, row, text(value) if numbers else "", color=ink, weight=weight, ha="center", va="center")


def _names(axes: Axes, heatmap: HeatMap) -> None:
    """The title, the rows' names at the left and the columns' above."""
    columns, rows = [shorten(name) for name in heatmap.columns], [shorten(name) for name in heatmap.rows]
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    if not heatmap.flat:
        for label in axes.get_xticklabels():
            label.set(rotation=40, ha="left", rotation_mode="anchor")
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    left, top, _ = heatmap.edges
    axes.annotate(
        heatmap.title, (0, 1), (-left, top - 10), xycoords="axes fraction", textcoords="offset points", weight="bold"
    )
