"""Drawings: text alternatives that tell the figures, page colours, names as plain text."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from wardround.report import heatmaps, plots
from wardround.report.calibration import reliability_diagram
from wardround.report.plots import Dot, Series
from wardround.report.words import duration, listed, percent, plural, signed, size


def alternative(svg: str) -> str:
    found = re.match(r'<svg class="plot" role="img" aria-label="([^"]*)"', svg)
    assert found
    return found[1]


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_label_heat_map() -> None:
    svg = heatmaps.label_heatmap(["a", "none"], ["x", "y"], np.array([[30, 10], [0, 0]]))
    assert "a: x 75 %" in alternative(svg)
    assert "none:" not in alternative(svg)
    assert {"75", "25", "a", "x"} <= set(texts(svg))


def test_mmd_heat_map_names_the_farthest_pair_and_leaves_unknown_ones_open() -> None:
    distances = np.array([[0.0, 0.2, 0.9], [0.2, 0.0, math.nan], [0.9, math.nan, 0.0]])
    svg = heatmaps.mmd_heatmap(["a", "b", "c"], distances)
    assert "The largest, 0.900, is between a and c." in alternative(svg)
    assert texts(svg).count("–") == 2
    assert "No pair" in alternative(heatmaps.mmd_heatmap(["a"], np.zeros((1, 1))))


def test_confusion_heat_map_is_in_percent_of_the_true_class() -> None:
    svg = heatmaps.confusion_heatmap("m", ["x", "y"], np.array([[3, 1], [0, 0]]))
    assert "each true class: x 75 %." in alternative(svg)
    assert {"75", "25", "x (4)", "y (0)"} <= set(texts(svg))


def test_a_reliability_diagram_says_its_points_and_its_error() -> None:
    """Four answers at 0.9 with three right, one at 0.5 that is wrong: (|3 - 3.6| + |0 - 0.5|) / 5 = 0.22."""
    images, right, confidence = np.zeros(10), np.zeros(10), np.zeros(10)
    images[[5, 9]], right[[5, 9]], confidence[[5, 9]] = (1, 4), (0, 3), (0.5, 3.6)
    said = alternative(reliability_diagram("m", images, right, confidence))
    assert "5 answers, calibration error 22.0 %" in said
    assert "50 % sure, 0 % right; 90 % sure, 75 % right" in said


def test_colours_come_from_the_page() -> None:
    svg = plots.curves("t", [Series("a", [1, 2], [0.1, 0.2], [0.1, 0.1], look=9)])
    used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
    assert used <= {"none", *(f"var(--{name})" for name in ("ink", "muted", "rule", "paper", "s1"))}
    assert "var(--s1)" in used
    assert "#" not in re.sub(r"(href=\"|url\()#", "", svg)


def test_names_are_not_taken_for_formulas_or_markup() -> None:
    svg = plots.curves("$x_1$ <b>", [Series("a", [1], [1.0])])
    assert "$x_1$ &lt;b&gt;" in texts(svg)
    assert "<b>" not in svg


def test_curves_tell_their_last_values_and_survive_having_none() -> None:
    svg = plots.curves("loss", [Series("a", [1, 2], [0.5, 0.25]), Series("b", [], [])])
    assert "At the end: a 0.25." in alternative(svg)
    assert "no values" in alternative(plots.curves("loss", []))


def test_a_log_scale_only_where_all_values_allow_it() -> None:
    wide = plots.curves("x", [Series("a", [1, 2], [1.0, 1000.0])], log=True)
    mixed = plots.curves("x", [Series("a", [1, 2], [-1.0, 1000.0])], log=True)
    assert "1000" in "".join(texts(mixed))
    assert "1000" not in "".join(texts(wide))


def test_common_limits_hold_every_band() -> None:
    panels = [[Series("a", [1], [10.0], [2.0])], [Series("b", [1, 2], [20.0, 30.0], [0.0, 0.0])], []]
    assert plots.common_limits(panels) == pytest.approx((8 - 1.1, 30 + 1.1))
    assert plots.common_limits([[], [Series("a", [], [])]]) is None


def test_dots_name_the_best_method_of_each_client() -> None:
    rows = {"m": [Dot(60.0, 1.0), Dot(math.nan)], "n": [Dot(55.0), Dot(math.nan)]}
    assert "each client: a: m 60.0 %." in alternative(plots.result_dots(["a", "b"], rows))


def test_bars_and_intervals_tell_their_figures() -> None:
    sizes = plots.client_sizes(["a", "b"], {"train": [1000, 5], "test": [200, 0]})
    assert "a 1200, b 5" in alternative(sizes)
    assert {"1,200", "5"} <= set(texts(sizes))
    assert "a 3 s" in alternative(plots.seconds_bars(["a"], {"setup": [1.0], "train": [2.0]}))
    assert "m -2.0 (-4.0 to +1.0)" in alternative(plots.intervals("r", {"m": (-2.0, -4.0, 1.0)}))


def test_many_clients_are_drawn_small_and_without_figures() -> None:
    names = [f"site-{i:02d}" for i in range(30)]
    svg = heatmaps.mmd_heatmap(names, np.random.default_rng(0).random((30, 30)))
    assert len(texts(svg)) - texts(svg).count("") == 60


def test_figures_in_words() -> None:
    assert [listed([]), listed(["a"]), listed(["a", "b", "c"])] == ["", "a", "a, b and c"]
    assert [plural(1, "image"), plural(2000, "class", "classes")] == ["1 image", "2,000 classes"]
    assert [percent(0.1234), percent(None)] == ["12.3", "–"]
    assert [signed(0.012), signed(-0.012), signed(-0.0001), signed(None)] == ["+1.2", "−1.2", "0.0", "–"]
    assert [size(310), size(453_376), size(12_300_000), size(5e12)] == ["310 B", "453 kB", "12.3 MB", "5,000 GB"]
    assert [duration(2.34), duration(61), duration(3725)] == ["2.3 s", "1 min 1 s", "1 h 2 min"]
