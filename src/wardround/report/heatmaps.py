"""Heat maps: labels per client, distances between clients, confusion matrices.

A cell is the page's heat colour at an opacity, so that the lowest value is the page itself, light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from wardround.report.svg import HEAT, INK, MUTED, PAPER, Drawing, drawing, margin, shorten

Matrix = NDArray[np.float64]


def label_heatmap(clients: Sequence[str], classes: Sequence[str], counts: NDArray[np.int64]) -> str:
    """Share of each class in each client's training images, as an inline SVG.

    Args:
        counts: images per client and class, `(clients, classes)`. A client without images has an empty row.
    """
    total = np.maximum(counts.sum(1, keepdims=True), 1)
    share = counts / total
    top = [
        f"{name}: {classes[int(row.argmax())]} {100 * row.max():.0f} %"
        for name, row in zip(clients, share, strict=True)
        if row.sum()
    ]
    alternative = f"Heat map of the class mix per client. Most frequent class of each: {'; '.join(top)}."
    return _heatmap(share, clients, classes, alternative, _percent, highest=1.0)


def mmd_heatmap(clients: Sequence[str], distances: Matrix) -> str:
    """Pairwise distances between the clients' image features `(clients, clients)`, as an inline SVG."""
    return pair_heatmap("maximum mean discrepancy of image features", clients, distances)


def pair_heatmap(what: str, clients: Sequence[str], values: Matrix, highest: float | None = None) -> str:
    """`what` between every two clients `(clients, clients)`, NaN where unknown, as an inline SVG.

    Its full colour stands for `highest`, by default the largest value.
    """
    apart = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    known = np.where(np.isfinite(apart), apart, -np.inf)
    i, j = (int(k) for k in np.unravel_index(int(known.argmax()), known.shape))
    words = f"The largest, {known[i, j]:.3f}, is between {clients[i]} and {clients[j]}."
    if not np.isfinite(known[i, j]):
        words = "No pair could be compared."
    if highest is None:
        highest = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    alternative = f"Heat map of the {what} between every two clients. {words}"
    return _heatmap(values, clients, clients, alternative, lambda value: f"{value:.2f}", highest)


def confusion_heatmap(title: str, classes: Sequence[str], confusion: NDArray[np.int64]) -> str:
    """A confusion matrix `(classes, classes)`, rows = true class, coloured by share of the row, as an inline SVG.

    Classes without a test image have an empty row.
    """
    support = confusion.sum(1)
    share = confusion / np.maximum(support[:, None], 1)
    recalls = [f"{classes[i]} {100 * share[i, i]:.0f} %" for i in np.flatnonzero(support).tolist()]
    alternative = f"Confusion matrix of {title}. Share recognised of each true class: {', '.join(recalls)}."
    names = [f"{shorten(name)} ({n})" for name, n in zip(classes, support, strict=True)]
    return _heatmap(share, names, classes, alternative, _percent, highest=1.0)


def _percent(value: float) -> str:
    """A share as a whole percentage; nothing at all where it rounds to 0."""
    return f"{100 * value:.0f}" if value >= 0.005 else ""


def _heatmap(
    values: Matrix,
    rows: Sequence[str],
    columns: Sequence[str],
    alternative: str,
    text: Callable[[float], str],
    highest: float,
) -> str:
    """Draw one heat map whose full colour stands for `highest`."""
    row_names, column_names = [shorten(r) for r in rows], [shorten(c) for c in columns]
    tall, wide = (26, 40) if max(values.shape) <= 24 else (14, 14)
    flat = wide > 20 and max(map(len, column_names)) <= 6
    left, top = margin(row_names), 22 if flat else margin(column_names, 30) * 0.72
    slant = 4 if flat else 26 + 4.2 * len(column_names[-1])
    size = (left + wide * len(columns) + slant, top + tall * len(rows) + 4)
    with drawing(*size, edges=(left, top, slant, 4)) as canvas:
        _cells(canvas, values, highest, text if wide > 20 else lambda _: "")
        _names(canvas, row_names, column_names, flat)
        return canvas.svg(alternative)


def _cells(canvas: Drawing, values: Matrix, highest: float, text: Callable[[float], str]) -> None:
    """One rectangle and one number for each value, a dash where there is none; on a deep cell in the page's colour."""
    from matplotlib.patches import Rectangle

    for (row, column), value in np.ndenumerate(values):
        if not np.isfinite(value):
            canvas.axes.text(column, row, "–", color=MUTED, ha="center", va="center")
            continue
        depth = float(np.clip(value / highest, 0, 1)) if highest > 0 else 0.0
        box = Rectangle((column - 0.48, row - 0.47), 0.96, 0.94, facecolor=HEAT, alpha=0.05 + 0.95 * depth)
        canvas.axes.add_patch(box)
        colour = PAPER if depth > 0.5 else INK
        canvas.axes.text(column, row, text(float(value)), color=colour, ha="center", va="center", size=10.5)


def _names(canvas: Drawing, rows: Sequence[str], columns: Sequence[str], flat: bool) -> None:
    """Names left of the rows and above the columns: slanted, unless all are short."""
    axes = canvas.axes
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), columns)
    if not flat:
        for label in axes.get_xticklabels():
            label.set(rotation=40, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
