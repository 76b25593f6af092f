"""The figures of `results.json`: per client and seed, their summary, and the merger of several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from wardround.errors import InputError
from wardround.evaluation.metrics import Metrics, from_confusion, merge_confusions

PER_SEED = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece")
SUMMARY = (
    "weighted_average",
    "unweighted_average",
    "inter_client_variance",
    "worst_client",
    "pooled_balanced_accuracy",
)


class Spread(TypedDict):
    """Mean and standard deviation over seeds (ddof 1; 0.0 for one seed). Both `None` where undefined."""

    mean: float | None
    std: float | None


Results = dict[str, Any]
Summary = dict[str, Spread]


def over_seeds(values: Iterable[float | None]) -> Spread:
    """Mean and standard deviation of one figure over seeds; seeds where it is undefined are left out.

    >>> over_seeds([0.5, 0.7])["mean"]
    0.6
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return {"mean": None, "std": None}
    return {"mean": float(known.mean()), "std": float(known.std(ddof=1)) if len(known) > 1 else 0.0}


def client_results(runs: Sequence[Metrics], n_train: int) -> Results:
    """One client's entry in `results.json`, from its final metrics in each seed (test split).

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("client_results needs the metrics of at least one run")
    figures = {name: [run[name] for run in runs] for name in PER_SEED}  # type: ignore[literal-required]
    return {"n_train": n_train, "n_test": runs[0]["n"], **figures, "support": runs[0]["support"]}


def summarise(runs: Mapping[str, Sequence[Metrics]], weights: Mapping[str, float]) -> Summary:
    """The `summary` of `results.json`: five figures of balanced accuracy, each over seeds.

    Args:
        runs: for each client, its metrics in each seed, in the same order of seeds.
        weights: for each client, its weight in the weighted average: its number of training images.

    Raises:
        ValueError: clients differ in their number of seeds.
    """
    seeds = {len(metrics) for metrics in runs.values()}
    if len(seeds) > 1:
        raise ValueError(f"clients differ in their number of seeds: {sorted(seeds)}")
    each = [
        run_summary({client: metrics[i] for client, metrics in runs.items()}, weights)
        for i in range(max(seeds, default=0))
    ]
    return {name: over_seeds(run[name] for run in each) for name in SUMMARY}


def run_summary(metrics: Mapping[str, Metrics], weights: Mapping[str, float]) -> dict[str, float | None]:
    """The five figures of one run. A client without test images is left out of all of them.

    The variance is that of the clients' balanced accuracies around their unweighted mean, divided by their
    number (ddof 0). The pooled figure is the balanced accuracy of the clients' summed confusion matrices.
    """
    scores = {name: m["balanced_accuracy"] for name, m in metrics.items()}
    known = {name: score for name, score in scores.items() if score is not None}
    if not known:
        return dict.fromkeys(SUMMARY)
    values, share = np.array(list(known.values())), np.array([weights[name] for name in known], dtype=float)
    pooled = from_confusion(merge_confusions(metrics[name]["confusion"] for name in known))
    return {
        "weighted_average": float(values @ share / share.sum()) if share.sum() > 0 else None,
        "unweighted_average": float(values.mean()),
        "inter_client_variance": float(values.var()),
        "worst_client": float(values.min()),
        "pooled_balanced_accuracy": pooled["balanced_accuracy"],
    }


def merge_results(results: Sequence[Results]) -> Results:
    """One `results.json` over several seeds from those of single seeds, in the order of their seeds.

    Bytes, seconds and numbers of images become the mean of a run (a split may depend on the seed); warnings
    are joined; whatever else the files hold is taken from the first.

    Raises:
        InputError: nothing to merge, a file with several seeds, a seed twice, or files that are not the same
            experiment (method, label, rounds, names of clients).
    """
    _check_mergeable(results)
    ordered = sorted(results, key=lambda result: int(result["seeds"][0]))
    merged = {
        **ordered[0],
        **_merged_models(ordered),
        "seeds": [result["seeds"][0] for result in ordered],
        "communication": _mean_entries([result["communication"] for result in ordered]),
        "seconds": _mean_entries([result["seconds"] for result in ordered]),
        "warnings": list(dict.fromkeys(text for result in ordered for text in result["warnings"])),
    }
    if ordered[0].get("global") is not None:
        merged["global"] = _merged_models([result["global"] for result in ordered])
    if ordered[0].get("held_out"):
        sites = ordered[0]["held_out"]
        merged["held_out"] = {name: _merged_client([result["held_out"][name] for result in ordered]) for name in sites}
    if ordered[0].get("captions"):
        merged["captions"] = _merged_captions([result["captions"] for result in ordered])
    return merged


def _merged_captions(captions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What training had of captions: numbers as means of a run, and the figures with captions over all runs."""
    counted = _mean_entries([{key: one[key] for key in ("captioned", "images", "coverage")} for one in captions])
    told = [one["with_captions"] for one in captions]
    return {**captions[0], **counted, "with_captions": _merged_models(told) if all(told) else None}


def _check_mergeable(results: Sequence[Results]) -> None:
    """InputError unless all are single-seed results of one experiment with different seeds."""
    if not results:
        raise InputError("no results to merge")
    several = [result["seeds"] for result in results if len(result["seeds"]) != 1]
    if several:
        raise InputError(f"only results of one seed can be merged, found seeds {several[0]}")
    seeds = [result["seeds"][0] for result in results]
    if len(set(seeds)) != len(seeds):
        raise InputError(f"a seed occurs twice among the results to merge: {seeds}")
    first = _identity(results[0])
    for result in results[1:]:
        for key, value in _identity(result).items():
            if value != first[key]:
                raise InputError(
                    f"results of seeds {seeds[0]} and {result['seeds'][0]} are not the same experiment: "
                    f"{key} is {first[key]!r} and {value!r}"
                )


def _identity(result: Results) -> dict[str, Any]:
    """What results of one experiment have in common, whatever the seed."""
    same = {key: result[key] for key in ("method", "label", "rounds")}
    has_global = result.get("global") is not None
    return {**same, "clients": sorted(result["clients"]), "a server's model": has_global}


def _merged_models(parts: Sequence[Results]) -> Results:
    """`clients` and `summary` over seeds, from the `clients` and `summary` of each seed."""
    names = parts[0]["clients"]
    clients = {name: _merged_client([part["clients"][name] for part in parts]) for name in names}
    # The summary of one seed has that seed's figure as its mean.
    summary = {name: over_seeds(part["summary"][name]["mean"] for part in parts) for name in SUMMARY}
    return {"clients": clients, "summary": summary}


def _merged_client(entries: Sequence[Results]) -> Results:
    """One client's entry over seeds, from its entry in each."""
    counts = ("n_train", "n_test", "support")
    means = {key: np.rint(np.mean([entry[key] for entry in entries], axis=0)).astype(int) for key in counts}
    figures = {key: [entry[key][0] for entry in entries] for key in PER_SEED}
    return {**entries[0], **{key: mean.tolist() for key, mean in means.items()}, **figures}


def _mean_entries(entries: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Key by key mean; an integer stays one (rounded), `None` stays `None`."""
    merged: dict[str, float | None] = {}
    for key, first in entries[0].items():
        mean = over_seeds(entry.get(key) for entry in entries)["mean"]
        merged[key] = round(mean) if isinstance(first, int) and mean is not None else mean
    return merged
