"""The tables of an attack, and its page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wardround.attacking import ATTACKED, CLEAN, FIGURES, NOISE, Condition, Settings, at
from wardround.evaluation.tables import Column, Row, Table, spread_cell, with_ranks
from wardround.report.markdown import ranked

KINDS = {ATTACKED: "FGSM", NOISE: "noise"}
TITLES = dict(
    zip(
        FIGURES,
        ("Accuracy, mean over clients", "Balanced accuracy, mean over clients", "Balanced accuracy of all images"),
        strict=True,
    )
)
EXPLANATION = (
    "Each client's own model on its own test images, white-box, by its method's own predictor: every pixel moves by "
    "epsilon in the direction that raises the cross-entropy (FGSM), or up or down at random (noise, the control). "
    "Images are attacked before normalisation and are not rounded; everything is computed in float32."
)


def attack_tables(systems: Mapping[str, Any], settings: Settings) -> list[Table]:
    """One table a figure: a row a system, a column a condition. `systems` as `over_runs` has each."""
    columns = tuple(Column(_heading(c), ranked=c[0] != NOISE) for c in settings.conditions)
    several = any(len(system["seeds"]) > 1 for system in systems.values())
    caption = "In percent" + (", mean ± standard deviation over seeds." if several else ", one seed.")
    return [
        Table(title, columns, tuple(_rows(systems, settings, figure, columns)), caption)
        for figure, title in TITLES.items()
    ]


def _rows(systems: Mapping[str, Any], settings: Settings, figure: str, columns: tuple[Column, ...]) -> list[Row]:
    """A row a system; one alone has no rank."""
    rows = [
        Row(
            label,
            tuple(spread_cell(at(system, c)[figure], 100.0, len(system["seeds"]) > 1) for c in settings.conditions),
        )
        for label, system in systems.items()
    ]
    return with_ranks(rows, columns) if len(rows) > 1 else rows


def _heading(condition: Condition) -> str:
    kind, epsilon = condition
    return CLEAN if kind == CLEAN else f"{KINDS[kind]} {epsilon:g}/255"


def unmoved(systems: Mapping[str, Any]) -> Iterator[str]:
    """Which systems have images that the attack could not move, in words."""
    for label, system in systems.items():
        if system["without_gradient"]:
            yield (
                f"{label}: no gradient reaches {system['without_gradient']:,} of {system['n']:,} images, which the "
                "attack leaves as they are; its figures say less than the others'"
            )


def attack_markdown(systems: Mapping[str, Any], settings: Settings, command: str) -> str:
    """`attack.md`."""
    tables = [ranked(table) for table in attack_tables(systems, settings)]
    notes = "\n".join(f"- {note}." for note in unmoved(systems))
    parts = ["# Robustness to a fast-gradient-sign attack", EXPLANATION, f"    {command}", *tables, notes]
    return "\n\n".join(part for part in parts if part) + "\n"
