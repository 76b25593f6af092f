"""What a study says of each of its systems, from the folder of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wardround.evaluation.results import Results, Spread, over_seeds
from wardround.report.reading import System, load
from wardround.report.sections import client_rounds

PER_CLIENT = ("accuracy", "balanced_accuracy", "auroc")
POOLED, HELD_OUT = "pooled_balanced_accuracy", "held_out"


def figures_of(folder: Path, labels: Sequence[str], reference: str | None = None) -> list[dict[str, Any]]:
    """One entry a finished system of a comparison, in the order of `labels`.

    Each has `label`, `method`, `seeds`; `figures`, each a mean and a deviation over seeds: accuracy, balanced accuracy
    and AUROC as means over clients, the pooled balanced accuracy, and the balanced accuracy on held-out sites where
    there are any; `difference` from `reference` as `comparison.json` has it, None for the reference itself; and
    `resources` of one run.

    Raises:
        InputError: the folder holds no comparison, or a damaged file.
    """
    record = load(folder)
    comparison = record.comparison or {"reference": None, "pairs": []}
    pairs = {pair["method"]: pair for pair in comparison["pairs"]}
    wanted = comparison["reference"] == reference
    done = {system.label: system for system in record.systems if system.results}
    return [_entry(done[label], pairs.get(label), wanted) for label in labels if label in done]


def _entry(system: System, pair: dict[str, Any] | None, wanted: bool) -> dict[str, Any]:
    """One system; `wanted` says whether `pair` is a difference from the study's own reference."""
    results = system.results
    assert results is not None
    return {
        "label": system.label,
        "method": results["method"],
        "seeds": results["seeds"],
        "figures": quality(results),
        "difference": pair["measures"]["unweighted_average"] if pair and wanted else None,
        "sentence": pair["sentence"] if pair else None,
        "resources": resources(results, client_rounds(system)),
    }


def quality(results: Results) -> dict[str, Spread]:
    """How good a system's models are: every figure of the table, over seeds."""
    clients = list(results["clients"].values())
    found = {name: _mean_over(clients, name) for name in PER_CLIENT}
    found[POOLED] = results["summary"][POOLED]
    sites = list((results.get(HELD_OUT) or {}).values())
    return found | ({HELD_OUT: _mean_over(sites, "balanced_accuracy")} if sites else {})


def _mean_over(entries: Sequence[Results], name: str) -> Spread:
    """One metric, averaged in each seed over the clients where it is defined."""
    seeds = zip(*(entry[name] for entry in entries), strict=True)
    return over_seeds(_mean(values) for values in seeds)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def resources(results: Results, visits: float) -> dict[str, Any]:
    """What one run took: seconds by the clock, bytes of the run and a client and round, parameters by owner.

    Args:
        results: `results.json`.
        visits: client-rounds with an upload.
    """
    up, down = (results["communication"][key] for key in ("bytes_up", "bytes_down"))
    return {
        "seconds": results["seconds"].get("total"),
        "bytes_up": up,
        "bytes_down": down,
        "up_each": up / visits if visits else None,
        "down_each": down / visits if visits else None,
        "parameters": results.get("parameters"),
    }
