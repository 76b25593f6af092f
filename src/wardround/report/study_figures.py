"""What a study says of each of its systems, from the folder of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wardround.evaluation.results import Results, Spread, over_seeds
from wardround.methods.local_epochs import recorded_epochs
from wardround.report.reading import System, load
from wardround.report.sections import client_rounds
from wardround.report.uploads import numbers_up

PER_CLIENT = ("accuracy", "balanced_accuracy", "auroc")
WEIGHTED = {name: f"weighted_{name}" for name in PER_CLIENT[:2]}
POOLED, HELD_OUT = "pooled_balanced_accuracy", "held_out"


def figures_of(folder: Path, labels: Sequence[str], reference: str | None = None) -> list[dict[str, Any]]:
    """One entry a finished system of a comparison, in the order of `labels`.

    Each has `label`, `method`, `seeds`, `rounds` and `local_epochs` of a client in all of them; `figures`, each a mean
    and a deviation over seeds: accuracy, balanced accuracy and AUROC as means over clients, the first two also weighted
    by training images, the pooled balanced accuracy, and the balanced accuracy on held-out sites where there are any;
    `difference` from `reference` as `comparison.json` has it, None for the reference itself; and
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
        "rounds": results["rounds"],
        "local_epochs": recorded_epochs(system.runs[0].config).until(results["rounds"]),
        "figures": quality(results),
        "difference": pair["measures"]["unweighted_average"] if pair and wanted else None,
        "sentence": pair["sentence"] if pair else None,
        "resources": resources(results, client_rounds(system)),
    }


def quality(results: Results) -> dict[str, Spread]:
    """How good a system's models are: every figure of the table, over seeds."""
    clients = list(results["clients"].values())
    found = {name: _mean_over(clients, name) for name in PER_CLIENT}
    found |= {key: _mean_over(clients, name, weighted=True) for name, key in WEIGHTED.items()}
    found[POOLED] = results["summary"][POOLED]
    sites = list((results.get(HELD_OUT) or {}).values())
    return found | ({HELD_OUT: _mean_over(sites, "balanced_accuracy")} if sites else {})


def _mean_over(entries: Sequence[Results], name: str, weighted: bool = False) -> Spread:
    """One metric, averaged in each seed over the clients where it is defined; weights are training images."""
    weights = [entry["n_train"] if weighted else 1 for entry in entries]
    seeds = zip(*(entry[name] for entry in entries), strict=True)
    return over_seeds(_mean(values, weights) for values in seeds)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def resources(results: Results, visits: float) -> dict[str, Any]:
    """What one run took: seconds by the clock, bytes of the run and a client and round, parameters by owner, and how
    many numbers a client sends in a round.

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
        "numbers_up": numbers_up(results),
    }
