"""Reliability diagrams: how often a model is right, by how sure it is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wardround.report.svg import INK, MUTED, PAPER, drawing, series_colour

Bins = NDArray[np.float64]


def reliability_diagram(title: str, images: Bins, right: Bins, confidence: Bins) -> str:
    """Share of right answers and mean confidence in each bin of confidence, as an inline SVG.

    Args:
        title: whose answers.
        images: in each bin, `(bins,)`.
        right: of these, classified rightly.
        confidence: sum of the probabilities of the predicted class.
    """
    used = np.flatnonzero(images)
    share, sure = right[used] / images[used], confidence[used] / images[used]
    error = float(np.abs(right - confidence).sum() / images.sum())
    with drawing(300, 230, edges=(42, 8, 8, 38)) as canvas:
        axes = canvas.axes
        axes.bar((used + 0.5) / len(images), share, 0.94 / len(images), color=series_colour(0), edgecolor=PAPER)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
        axes.plot(sure, share, color=INK, linewidth=0, marker="o", markersize=3.4)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_xlabel("confidence", labelpad=2)
        axes.set_ylabel("right", labelpad=2)
        return canvas.svg(
            f"Reliability diagram of {title}: {int(images.sum())} answers, calibration error {100 * error:.1f} %. "
            f"{_words(sure, share)}."
        )


def _words(sure: Bins, share: Bins) -> str:
    """The diagram's points for who cannot see it."""
    points = [f"{100 * a:.0f} % sure, {100 * b:.0f} % right" for a, b in zip(sure, share, strict=True)]
    return "; ".join(points)
