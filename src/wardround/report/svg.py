"""Matplotlib figures as SVG that lives inside an HTML page: it takes its colours and its font from the page.

Figures are drawn with a few reserved colours that stand for roles (text, rule, series 3, ...). On the way out each
becomes a CSS variable, so that one drawing serves a light page, a dark page and paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d")

INK, MUTED, RULE, PAPER, HEAT = "#010201", "#010202", "#010203", "#010204", "#010205"
_ROLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    HEAT: "var(--heat)",
} | {f"#0103{i:02x}": f"var(--s{i})" for i in range(len(MARKERS))}

_STYLE: Any = {  # matplotlib types the keys, and which ones it has depends on its version
    "svg.fonttype": "none",
    "svg.hashsalt": "wardround",
    "text.parse_math": False,
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
}


def series_colour(index: int) -> str:
    """The reserved colour of series `index`; colours and markers start again after the eighth."""
    return f"#0103{index % len(MARKERS):02x}"


def marker(index: int) -> str:
    """The marker of series `index`, a second cue beside its colour."""
    return MARKERS[index % len(MARKERS)]


def shorten(text: str, longest: int = 26) -> str:
    """`text`, cut to `longest` characters with an ellipsis."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def margin(labels: Sequence[str], least: float = 24.0) -> float:
    """Pixels that the longest of `labels` needs at the size of a tick label (a generous 6.4 a character)."""
    return max([least, *(12 + 6.4 * len(label) for label in labels)])


class Drawing:
    """One pair of axes of a known place within a figure of a known size, all in CSS pixels."""

    def __init__(self, size: tuple[float, float], edges: tuple[float, float, float, float]) -> None:
        """`size` is (width, height); `edges` the room kept free at (left, top, right, bottom)."""
        from matplotlib.figure import Figure

        (width, height), (left, top, right, bottom) = size, edges
        self.figure: Figure = Figure(figsize=(width / 72, height / 72))
        box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        self.axes: Axes = self.figure.add_axes(box)

    def svg(self, alternative: str) -> str:
        """The figure as an inline `<svg>` whose text alternative is `alternative`."""
        buffer = io.StringIO()
        self.figure.savefig(buffer, format="svg")
        return _inline(buffer.getvalue(), alternative)


@contextmanager
def drawing(
    width: float, height: float, edges: tuple[float, float, float, float] = (40, 26, 10, 34)
) -> Iterator[Drawing]:
    """Axes in the page's style: draw on them and call `.svg(...)` within the block."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield Drawing((width, height), edges)


def _inline(svg: str, alternative: str) -> str:
    """Strip what only a file of its own needs, hand colours and font to the page, and add the alternative."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2]
    body = svg[svg.index(">") + 1 :]
    body = re.sub(r'font: ((?:[a-z]+ )*[\d.]+px) [^;"]*', r"font: \1 var(--sans)", body)
    body = re.sub(r' font-family: [^;"]*;| transform="rotate\(-0 [^"]*"', "", body)
    for reserved, role in _ROLES.items():
        body = body.replace(reserved, role)
    head = (
        f'<svg class="plot" role="img" aria-label="{escape(alternative)}" '
        f'viewBox="0 0 {width} {height}" style="width:{width}px">'
    )
    return re.sub(r"\s*\n\s*", "\n", head + _unique(body, alternative))


def _unique(body: str, alternative: str) -> str:
    """Keep only the ids that something refers to, and make them unlike those of the page's other figures."""
    import hashlib

    prefix = "f" + hashlib.sha256((alternative + body).encode()).hexdigest()[:8]
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))

    def rename(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    body = re.sub(r'(?<=[\w"]) id="([^"]+)"', rename, body)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
