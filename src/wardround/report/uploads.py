"""How much a client sends, in numbers of the model, and how many times what it sends in federated averaging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wardround.report.words import MISSING

UNIT = "fedavg"  # the method whose upload is 1
NUMBERS_UP, TIMES = "numbers up, a client and round", f"÷ {UNIT}"
EXPLANATION = (
    "Numbers up: the shared parameters, and what a method sends besides; running statistics of norms travel too, but "
    "are not counted."
)


def numbers_up(results: Mapping[str, Any]) -> int | None:
    """Of `results.json`: what one client sends in a round; None for a run that did not count its parameters."""
    counts = results.get("parameters")
    return None if counts is None else int(counts["shared"] + results["communication"]["statistic_elements"])


def unit_of(found: Iterable[tuple[str, int | None]]) -> int | None:
    """Federated averaging's among pairs of method and `numbers_up`; None without it, or with nothing but it."""
    systems = list(found)
    units = [up for method, up in systems if method == UNIT and up]
    return units[0] if units and any(method != UNIT for method, _ in systems) else None


def counted(up: int | None) -> str:
    """A cell with `numbers_up`."""
    return MISSING if up is None else f"{up:,}"


def times(up: int | None, unit: int | None) -> str:
    """A cell with their ratio, to the third decimal."""
    return f"{up / unit:.3f}" if up is not None and unit else MISSING
