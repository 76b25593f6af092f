"""Curves, dots and bars as inline SVG. Colours and markers are given by number, and the page holds the legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wardround.report.svg import INK, MUTED, PAPER, Drawing, drawing, margin, marker, series_colour, shorten

DASHES = ("solid", (0, (4, 2)), (0, (1, 1.6)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class Series:
    """One line of a chart: `y[i]` at `x[i]`, with `spread[i]` (a standard deviation) as a band around it.

    Attributes:
        look: number of its colour and marker.
        dash: number of its dash pattern; 0 is solid.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    look: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Dot:
    """A mean with its standard deviation; `mean` may be NaN, which leaves the place empty."""

    mean: float
    std: float = 0.0


def curves(
    title: str,
    series: Sequence[Series],
    unit: str = "",
    log: bool = False,
    limits: tuple[float, float] | None = None,
    over: str = "round",
) -> str:
    """A small chart of `series` over the rounds.

    Args:
        unit: follows the values in the text alternative.
        log: a log scale, where all values are positive.
        limits: the range of the y axis, to make panels comparable; that of the values by default.
        over: what is counted along the x axis, in the singular.
    """
    with drawing(300, 196, edges=(42, 28, 8, 34)) as canvas:
        for one in series:
            _line(canvas, one)
        canvas.axes.set_title(shorten(title, 40), color=INK, loc="left", x=-0.13)
        canvas.axes.set_xlabel(over, labelpad=2)
        canvas.axes.grid(axis="y")
        _scales(canvas, log)
        if limits:
            canvas.axes.set_ylim(limits)
        return canvas.svg(f"Line chart, {title}, over the {over}s. At the end: {_ends(series, unit)}.")


def common_limits(panels: Sequence[Sequence[Series]]) -> tuple[float, float] | None:
    """A range that holds every line of every panel with its band, with some air; None when there is no value."""
    lines = [one for panel in panels for one in panel if len(one.y)]
    if not lines:
        return None
    low = min(float(np.min(np.subtract(one.y, one.spread))) for one in lines)
    high = max(float(np.max(np.add(one.y, one.spread))) for one in lines)
    air = 0.05 * (high - low) or 1.0
    return low - air, high + air


def _ends(series: Sequence[Series], unit: str) -> str:
    """The last value of each line in words."""
    parts = [f"{one.label} {one.y[-1]:.3g}{unit}" for one in series if len(one.y)]
    return "; ".join(parts) or "no values"


def _scales(canvas: Drawing, log: bool) -> None:
    """Whole rounds below; on the left a log scale when asked for and every value allows it."""
    from matplotlib.ticker import MaxNLocator

    canvas.axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    lines = [np.asarray(line.get_ydata(), float) for line in canvas.axes.lines]
    values = np.concatenate([np.zeros(0), *lines])
    values = values[np.isfinite(values)]
    if log and len(values) and values.min() > 0:
        canvas.axes.set_yscale("log")
    else:
        canvas.axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        canvas.axes.margins(y=0.08)


def _line(canvas: Drawing, one: Series) -> None:
    """Draw one line with its band; a solid one with about eight markers, however long, a dashed one finer."""
    colour = series_colour(one.look)
    canvas.axes.plot(
        one.x,
        one.y,
        color=colour,
        linestyle=DASHES[one.dash % len(DASHES)],
        linewidth=1.1 if one.dash else 1.8,
        marker="" if one.dash and len(one.x) > 1 else marker(one.look),
        markevery=max(1, len(one.x) // 8),
        markeredgecolor=PAPER,
        markeredgewidth=0.6,
    )
    if any(one.spread):
        y, spread = np.asarray(one.y, float), np.asarray(one.spread, float)
        canvas.axes.fill_between(one.x, y - spread, y + spread, color=colour, alpha=0.13, linewidth=0)


def client_sizes(clients: Sequence[str], sizes: Mapping[str, Sequence[int]]) -> str:
    """Images per client as one stacked bar each; `sizes` maps a split to its images per client."""
    totals = np.sum(list(sizes.values()), axis=0)
    words = [f"{name} {total}" for name, total in zip(clients, totals, strict=True)]
    return _bars(clients, sizes, "images", f"Bar chart of images per client: {', '.join(words)}.")


def seconds_bars(labels: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> str:
    """Time per method as one stacked bar each; `seconds` maps a phase to its seconds per method."""
    totals = np.sum(list(seconds.values()), axis=0)
    words = [f"{name} {total:.0f} s" for name, total in zip(labels, totals, strict=True)]
    return _bars(labels, seconds, "seconds", f"Bar chart of time: {', '.join(words)}.")


def _bars(rows: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str, alternative: str) -> str:
    """Horizontal stacked bars; the part number i has the colour number i."""
    names = [shorten(row) for row in rows]
    left = margin(names)
    with drawing(left + 380, 22 * len(rows) + 44, edges=(left, 6, 56, 38)) as canvas:
        start = np.zeros(len(rows))
        for i, widths in enumerate(parts.values()):
            canvas.axes.barh(names_at(rows), widths, 0.66, left=start, color=series_colour(i), edgecolor=PAPER)
            start = start + np.asarray(widths, float)
        for row, total in enumerate(start):
            canvas.axes.annotate(
                f"{total:,.0f}", (total, row), (5, 0), textcoords="offset points", va="center", color=INK
            )
        _rows(canvas, names, unit)
        return canvas.svg(alternative)


def names_at(rows: Sequence[str]) -> range:
    """Where the rows of a chart lie: 0 for the first, at the top."""
    return range(len(rows))


def _rows(canvas: Drawing, names: Sequence[str], unit: str) -> None:
    """Name the rows, first on top, and leave only the scale below."""
    canvas.axes.set_yticks(range(len(names)), names)
    canvas.axes.set_ylim(len(names) - 0.5, -0.5)
    canvas.axes.set_xlabel(unit)
    canvas.axes.spines["left"].set_visible(False)
    canvas.axes.tick_params(axis="y", labelcolor=INK)


def result_dots(clients: Sequence[str], results: Mapping[str, Sequence[Dot]]) -> str:
    """Balanced accuracy per client as one dot with its standard deviation for each method.

    Args:
        results: for each method, in the order of its colour, one `Dot` per client in percent.
    """
    names = [shorten(name) for name in clients]
    left, step = margin(names), 0.72 / max(len(results), 1)
    height = max(30, 13 * len(results) + 8) * len(clients) + 44
    with drawing(left + 480, height, edges=(left, 6, 16, 38)) as canvas:
        for row in range(1, len(clients)):
            canvas.axes.axhline(row - 0.5, color=MUTED, linewidth=0.4, alpha=0.5)
        for look, dots in enumerate(results.values()):
            rows = np.arange(len(clients)) - 0.36 + step * (look + 0.5)
            _dots(canvas, dots, rows, look)
        _rows(canvas, names, "balanced accuracy on the client's own test images, %")
        canvas.axes.grid(axis="x")
        return canvas.svg(_dot_words(clients, results))


def _dots(canvas: Drawing, dots: Sequence[Dot], rows: np.ndarray, look: int) -> None:
    """One method's dots and error bars."""
    canvas.axes.errorbar(
        [dot.mean for dot in dots],
        rows,
        xerr=[dot.std for dot in dots],
        fmt=marker(look),
        color=series_colour(look),
        markersize=7,
        markeredgecolor=PAPER,
        elinewidth=1.4,
    )


def _dot_words(clients: Sequence[str], results: Mapping[str, Sequence[Dot]]) -> str:
    """The best method of each client in words."""
    words = []
    for k, client in enumerate(clients):
        known = {label: dots[k].mean for label, dots in results.items() if np.isfinite(dots[k].mean)}
        if known:
            best = max(known, key=lambda label: known[label])
            words.append(f"{client}: {best} {known[best]:.1f} %")
    return f"Dot chart of balanced accuracy per client and method. Highest at each client: {'; '.join(words)}."


def intervals(reference: str, found: Mapping[str, tuple[float, float, float]]) -> str:
    """Differences from `reference` as dots with intervals, around a line at 0.

    Args:
        found: for each method its (difference, low, high) in points.
    """
    names = [shorten(name) for name in found]
    left = margin(names)
    with drawing(left + 480, 28 * len(names) + 46, edges=(left, 6, 16, 38)) as canvas:
        canvas.axes.axvline(0, color=MUTED, linewidth=1)
        for row, (middle, low, high) in enumerate(found.values()):
            canvas.axes.plot([low, high], [row, row], color=series_colour(0), linewidth=2, solid_capstyle="butt")
            canvas.axes.plot(middle, row, "o", color=series_colour(0), markersize=7, markeredgecolor=PAPER)
        _rows(canvas, names, f"points of balanced accuracy above {shorten(reference)}")
        canvas.axes.grid(axis="x")
        words = [f"{name} {m:+.1f} ({low:+.1f} to {high:+.1f})" for name, (m, low, high) in found.items()]
        return canvas.svg(f"Intervals of the difference from {reference}, in points: {'; '.join(words)}.")
