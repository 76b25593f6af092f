"""The pictures of an embedding: a dot an image, coloured by modality and by class."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wardround.report.pictures import GAP, INK, MUTED, SERIES, STYLE, TITLE
from wardround.report.svg import MARKERS, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]  # `embedding.json`

SIDE, ENTRY, LETTER = 250.0, 10.5, 4.6  # of a panel, a legend's line and its letter, in points
COLUMN = 26  # entries of a legend, one above the other
LONGEST = 34  # letters of an entry
GOLDEN = 0.618034  # of a turn: hues that follow each other are far apart


@dataclass(frozen=True)
class Colouring:
    """One way to colour the dots.

    Attributes:
        title: by what.
        of: each image's group, `(N,)`.
        names: of the groups that have images, by number.
    """

    title: str
    of: NDArray[np.int64]
    names: Mapping[int, str]

    def colour(self, group: int) -> str | tuple[float, float, float]:
        """Of one group: those of the page where they are enough, else hues a golden turn apart, dark and light."""
        place = list(self.names).index(group)
        if len(self.names) <= len(SERIES):
            return SERIES[place]
        return colorsys.hls_to_rgb(place * GOLDEN % 1, (0.38, 0.56, 0.7)[place % 3], 0.75)

    @property
    def columns(self) -> int:
        """Of its legend."""
        return -(-len(self.names) // COLUMN)

    @property
    def width(self) -> float:
        """Of its legend, in points."""
        longest = max(len(shorten(name, LONGEST)) for name in self.names.values())
        return self.columns * (18 + LETTER * longest) + GAP


def colourings(record: Record) -> list[Colouring]:
    """By modality, or by client where there is one modality; and by class."""
    several = len(set(record["groups"]["modality"]["of"])) > 1
    return [_colouring(record, kind) for kind in ("modality" if several else "client", "class")]


def _colouring(record: Record, kind: str) -> Colouring:
    group = record["groups"][kind]
    names = {number: group["names"][number] for number in sorted(set(group["of"]))}
    return Colouring(f"by {kind}", np.array(group["of"]), names)


def save_embedding(folder: Path, record: Record) -> list[Path]:
    """Draw `embedding-REPRESENTATION.png` for every representation: a row a run, a column a colouring.

    Returns:
        The files.
    """
    import matplotlib

    files = []
    for name in dict.fromkeys(one["representation"] for one in record["maps"]):
        maps = [one for one in record["maps"] if one["representation"] == name]
        files.append(folder / f"embedding-{name}.png")
        with matplotlib.rc_context(STYLE):
            _figure(maps, colourings(record)).savefig(files[-1], dpi=150)
    return files


def _figure(maps: Sequence[Mapping[str, Any]], ways: Sequence[Colouring]) -> Figure:
    """All panels of one representation."""
    from matplotlib.figure import Figure

    widths = [SIDE + GAP + way.width for way in ways]
    legend = max(min(len(way.names), COLUMN) for way in ways) * ENTRY
    size = (sum(widths) + GAP, GAP + len(maps) * (max(SIDE, legend) + TITLE + GAP))
    figure = Figure(figsize=(size[0] / 72, size[1] / 72))
    for row, one in enumerate(maps):
        top = size[1] - GAP - row * (max(SIDE, legend) + TITLE + GAP) - TITLE
        for column, way in enumerate(ways):
            left = GAP + sum(widths[:column])
            place = (left / size[0], (top - SIDE) / size[1], SIDE / size[0], SIDE / size[1])
            axes = figure.add_axes(place)
            _dots(axes, np.array(one["points"]), way)
            axes.set_title(f"{shorten(one['label'], 30)}, {way.title}", loc="left", fontsize=10, color=INK)
    return figure


def _dots(axes: Axes, points: NDArray[np.float64], way: Colouring) -> None:
    """One panel with its legend on the right; few groups have markers of their own too."""
    few = len(way.names) <= len(MARKERS)
    for place, (group, name) in enumerate(way.names.items()):
        x, y = points[way.of == group].T
        shape = MARKERS[place] if few else "o"
        axes.scatter(x, y, s=9, color=[way.colour(group)], marker=shape, linewidths=0, label=shorten(name, LONGEST))
    axes.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")
    axes.spines[:].set_color(MUTED)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), ncols=way.columns, fontsize=7, frameon=False, labelcolor=INK,
        handletextpad=0.2, borderaxespad=0.0, labelspacing=0.35, columnspacing=0.8, markerscale=1.4,
    )  # fmt: skip
