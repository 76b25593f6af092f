"""The study of one dial at a time: its table, its page and its settings, without training anything."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from study_scripts import study
from wardround.config import load_experiment
from wardround.methods.registry import METHODS
from wardround.systems import systems_named

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dials() -> ModuleType:
    """The script as a module."""
    return study("dials")


def comparison(scores: dict[str, float], spread: float = 0.01) -> dict[str, Any]:
    """As `comparison.json` has it: all pairs, row minus column, with intervals of half-width `spread`."""
    gap = np.subtract.outer(list(scores.values()), list(scores.values()))
    matrix = {"difference": gap.tolist(), "low": (gap - spread).tolist(), "high": (gap + spread).tolist()}
    return {
        "methods": {name: {"unweighted_average": {"value": value}} for name, value in scores.items()},
        "matrix": {"labels": list(scores), "unweighted_average": matrix},
        "smallest_difference": {"unweighted_average": 2 * spread},
        "seeds": [0, 1],
    }


FOUND = {
    "none": comparison({"isolated": 0.60, "fedavg": 0.66, "a": 0.665}),
    "feature": comparison({"isolated": 0.60, "fedavg": 0.55, "a": 0.63}),
    "concept": comparison({"isolated": 0.58, "fedavg": 0.40}),
}
MISSING = float("nan")


@pytest.mark.parametrize(
    ("reference", "methods", "points", "certain"),
    [
        ("isolated", ("fedavg", "a"), [[6, -5, MISSING, MISSING, -18], [6.5, 3, MISSING, MISSING, MISSING]],
         [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]),
        ("fedavg", ("isolated", "a"), [[-6, 5, MISSING, MISSING, 18], [0.5, 8, MISSING, MISSING, MISSING]],
         [[1, 1, 0, 0, 1], [0, 1, 0, 0, 0]]),
    ],
)  # fmt: skip
def test_the_table_is_method_minus_reference(
    dials: ModuleType, reference: str, methods: tuple[str, ...], points: Any, certain: Any
) -> None:
    """In points, by kind of skew; what has not finished is open, and what may be noise is not certain."""
    found = dials.gains(FOUND, reference)
    assert found.methods == methods
    np.testing.assert_allclose(found.points, points, atol=1e-9)
    assert found.certain.tolist() == np.array(certain, bool).tolist()


def test_a_missing_reference_leaves_the_table_open(dials: ModuleType) -> None:
    found = dials.gains({"none": comparison({"fedavg": 0.5, "a": 0.6})}, "isolated")
    assert found.methods == ("fedavg", "a")
    assert np.isnan(found.points).all()
    assert not found.certain.any()
    assert dials.gains({}, "isolated").points.shape == (0, 5)


def test_the_page_states_the_study_and_its_figures(dials: ModuleType) -> None:
    """Numbers and settings come from the results and the experiment file."""
    experiment = load_experiment(dials.EXPERIMENT, ["rounds=7"])
    text = dials.page_part(FOUND, experiment, "pictures/x.png")
    for part in (
        "](pictures/x.png)",
        "4 sites, dermoscopy",
        "7 rounds, learning rate 0.05, 2 seeds",
        "difference of about 2.0 points",
        "| `a` | 66.5 | 63.0 | – | – | – |",
        "- Without skew: `a` 66.5, `fedavg` 66.0, `isolated` 60.0. Better than isolated and fedavg for certain: none.",
        "- Feature skew: `a` 63.0, `isolated` 60.0, `fedavg` 55.0. Better than isolated and fedavg for certain: `a`.",
        "- Concept skew: `isolated` 58.0",
    ):
        assert part in text, part
    assert "Label skew" not in text


def test_the_page_keeps_what_surrounds_the_figures(dials: ModuleType) -> None:
    page = (ROOT / "docs" / "which-method.md").read_text()
    written = dials.insert(page, "FIGURES")
    assert written.count("FIGURES") == 1
    assert dials.insert(dials.insert(page, "OTHER"), "FIGURES") == written
    assert written.startswith(page.partition(dials.BEGIN)[0])
    assert written.endswith(page.partition(dials.END)[2])
    with pytest.raises(ValueError, match="lacks the marks"):
        dials.insert("# Page", "FIGURES")


def test_the_figure_is_drawn_from_what_has_finished(dials: ModuleType, tmp_path: Path) -> None:
    dials.draw(FOUND, tmp_path / "d.svg")
    text = (tmp_path / "d.svg").read_text()
    for part in ("points above isolated", "points above fedavg", "no skew", "quantity", "−18.0", "+8.0"):
        assert f"<!-- {part} -->" in text, part


def test_one_dial_is_turned_at_a_time(dials: ModuleType) -> None:
    for kind in dials.KINDS:
        images = load_experiment(dials.EXPERIMENT, dials.settings(kind)).data.phantoms
        turned = {name for name in dials.KINDS[1:] if getattr(images, f"{name}_skew") > 0}
        assert turned == {kind} - {"none"}


def test_every_method_can_be_part_of_it(dials: ModuleType) -> None:
    """PAFP keeps its head at the client there, federated averaging shares it."""
    systems = {s.label: s.experiment for s in systems_named(load_experiment(dials.EXPERIMENT), list(METHODS))}
    assert systems.keys() == METHODS.keys()
    assert systems["pafp-alt"].model.head == systems["pafp"].model.head == "local"
    assert systems["fedavg"].model.head == "shared"
    assert systems["pafp"].method["lambda"] == 10.0


def test_columns_with_different_seeds_are_told_apart(dials: ModuleType) -> None:
    assert dials._seeds({"none": {"seeds": [0, 1]}, "label": {"seeds": [0]}}) == "seeds: 2 (no skew), 1 (label)"
    assert dials._seeds({"none": {"seeds": [0]}, "label": {"seeds": [0]}}) == "1 seed"
    assert dials._seeds({"none": {"seeds": [0, 1]}}) == "2 seeds"
