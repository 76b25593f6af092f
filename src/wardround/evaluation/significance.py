"""Are differences between methods more than noise, and how small a difference would this test set show?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import InputError, suggestion
from wardround.evaluation.bootstrap import (
    LEVEL,
    MEASURES,
    POWER,
    Draws,
    difference,
    draw,
    interval,
    smallest_detectable_difference,
)
from wardround.evaluation.predictions import Aligned, Predictions, Run, align

__all__ = [
    "compare_methods",
    "holm",
    "paired_bootstrap",
    "smallest_detectable_difference",
    "wilcoxon_test",
]

Floats = NDArray[np.float64]

DRAWS = 2000
MAIN = "unweighted_average"
BETTER, WORSE, SAME = "better", "worse", "not distinguishable"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, which bounds the chance of any false alarm in a family of tests.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.array(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return [float(p) for p in corrected]


def paired_bootstrap(
    a: Mapping[int, Run],
    b: Mapping[int, Run],
    *,
    weights: Mapping[str, float],
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Method `a` minus method `b`: for each of `bootstrap.MEASURES`, what `bootstrap.difference` returns.

    Args:
        a: seed -> client -> (labels `(N,)`, logits `(N, C)`).
        b: the same for the other method, on the same images.
        weights: each client's weight in the weighted average (its number of training images).
        draws: number of resamples of seeds and test images.
        seed: of the resampling.

    Raises:
        InputError: `a` and `b` are not of the same images, or `draws` is below 2.
    """
    drawn = draw(align({"a": a, "b": b}), weights, draws, seed)
    return {name: difference(values[:, 0], values[:, 1]) for name, values in drawn.measures.items()}


def wilcoxon_test(a: Floats, b: Floats) -> dict[str, Any]:
    """Wilcoxon's signed-rank test on the paired values `(n,)` of two methods, one for each client and seed.

    The customary test of the field. Its pairs are not independent (the seeds of a client share its test
    images), so its p-value tends to be too small: read the bootstrap first. Pairs without a difference are
    left out; p is 1 where none remains.
    """
    gaps = np.round(a - b, 12)  # so that equal differences tie in spite of rounding
    kept = gaps[gaps != 0]
    found = {"pairs": len(gaps), "nonzero_pairs": len(kept), "median_difference": float(np.median(gaps))}
    if not len(kept):
        return {**found, "p": 1.0}
    from scipy.stats import wilcoxon

    return {**found, "p": float(wilcoxon(kept, method="auto").pvalue)}


def compare_methods(
    predictions: Predictions,
    weights: Mapping[str, float],
    reference: str | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """`comparison.json`: each method against a reference, all pairs, and what the test set can show.

    Differences are method minus reference, as fractions. The verdict of a pair rests on the bootstrap of the
    unweighted mean of the clients' balanced accuracies, Holm-corrected over the methods.

    Args:
        predictions: method label -> seed -> client -> (labels `(N,)`, logits `(N, C)`).
        weights: each client's number of training images.
        reference: a label; by default the method with the best unweighted mean.
        draws: number of resamples of seeds and test images.
        seed: of the resampling.

    Raises:
        InputError: an unknown reference, or methods that were not tested on the same images.
    """
    aligned = align(predictions)
    drawn = draw(aligned, weights, draws, seed)
    chosen = _reference(drawn, reference)
    matrix = {measure: _matrix(values) for measure, values in drawn.measures.items()}
    return {
        "draws": draws,
        "seed": seed,
        "level": LEVEL,
        "power": POWER,
        "seeds": list(aligned.seeds),
        "test_images": aligned.images,
        "measures": list(MEASURES),
        "reference": chosen,
        "methods": {name: _method(drawn, i) for i, name in enumerate(drawn.methods)},
        "pairs": _pairs(drawn, chosen),
        "matrix": {"labels": list(drawn.methods), **matrix},
        "smallest_difference": {measure: _typical(matrix[measure]) for measure in MEASURES},
        "notes": _notes(aligned, predictions, reference),
    }


def _reference(drawn: Draws, wanted: str | None) -> str:
    """The reference's label, checked; by default the best unweighted mean."""
    if wanted is None:
        return drawn.methods[int(drawn.measures[MAIN][0].argmax())]
    if wanted not in drawn.methods:
        raise InputError(f"unknown reference method {wanted!r}{suggestion(wanted, drawn.methods)}")
    return wanted


def _method(drawn: Draws, i: int) -> dict[str, Any]:
    """One method's own figures with intervals: the measures, and each client's balanced accuracy."""

    def figure(values: Floats) -> dict[str, float]:
        return {"value": float(values[0, i]), **interval(values[:, i])}

    clients = {name: figure(values) for name, values in drawn.clients.items()}
    return {**{measure: figure(values) for measure, values in drawn.measures.items()}, "clients": clients}


def _matrix(values: Floats) -> dict[str, list[list[float]]]:
    """All pairs, row minus column, from `(1 + draws, M)`: key of `difference` -> `(M, M)`; p uncorrected."""
    every = range(values.shape[1])
    cells = [[difference(values[:, i], values[:, j]) for j in every] for i in every]
    return {key: [[cell[key] for cell in row] for row in cells] for key in cells[0][0]}


def _typical(matrix: Mapping[str, list[list[float]]]) -> float | None:
    """The median smallest difference over the pairs of methods that differ in some draw, if there are any."""
    found = np.array(matrix["smallest_difference"])
    upper = found[np.triu_indices(len(found), 1)]
    return float(np.median(upper[upper > 0])) if (upper > 0).any() else None


def _pairs(drawn: Draws, reference: str) -> list[dict[str, Any]]:
    """Every other method against the reference, with corrected p-values, verdict and sentence."""
    base = drawn.methods.index(reference)
    others = [i for i in range(len(drawn.methods)) if i != base]
    measures = {
        name: _corrected([difference(values[:, i], values[:, base]) for i in others])
        for name, values in drawn.measures.items()
    }
    scores = drawn.observed
    tests = _corrected([wilcoxon_test(scores[:, i].ravel(), scores[:, base].ravel()) for i in others])
    found = [{name: rows[place] for name, rows in measures.items()} for place in range(len(others))]
    return [_pair(drawn.methods[i], reference, *both) for i, *both in zip(others, found, tests, strict=True)]


def _corrected(tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tests of one family, each with its Holm-corrected p-value as `p_holm`."""
    return [{**test, "p_holm": p} for test, p in zip(tests, holm([t["p"] for t in tests]), strict=True)]


def _pair(
    method: str, reference: str, measures: dict[str, dict[str, float]], wilcoxon: dict[str, Any]
) -> dict[str, Any]:
    """One entry of `pairs`."""
    return {
        "method": method,
        "reference": reference,
        "measures": measures,
        "wilcoxon": wilcoxon,
        "verdict": verdict(measures[MAIN]),
        "sentence": sentence(method, reference, measures[MAIN]),
    }


def verdict(found: Mapping[str, float]) -> str:
    """`better`, `worse` or `not distinguishable`, at 5 % after Holm's correction."""
    if found["p_holm"] >= 1 - LEVEL:
        return SAME
    return BETTER if found["difference"] > 0 else WORSE


def sentence(method: str, reference: str, found: Mapping[str, float]) -> str:
    """The verdict in words, with the figures in percentage points."""
    gap, low, high, smallest = (100 * found[key] for key in ("difference", "low", "high", "smallest_difference"))
    if found["standard_error"] == 0 and gap == 0:
        return f"{method} and {reference} score the same in every draw: nothing tells them apart here."
    where = f"(95 % interval {low:+.1f} to {high:+.1f}, corrected p {found['p_holm']:.2g})"
    judged = verdict(found)
    if judged != SAME:
        return f"{method} is {judged} than {reference} by {abs(gap):.1f} points {where}."
    return (
        f"{method} and {reference} are not distinguishable on this test set: difference {gap:+.1f} points "
        f"{where}; a true difference of {smallest:.1f} points would be found four times in five."
    )


def _notes(aligned: Aligned, predictions: Predictions, reference: str | None) -> list[str]:
    """What a reader must know to judge the figures."""
    notes = ["The pairs of Wilcoxon's test share test images between seeds, so its p tends to be too small."]
    seeds = len(aligned.seeds)
    if seeds == 1:
        notes.append("One seed: the intervals speak of test images only, not of another training run.")
    elif seeds < 5:
        notes.append(f"{seeds} seeds: the part of the intervals that is due to seeds is a rough estimate.")
    if any(len(blocks) > 1 for blocks in aligned.clients.values()):
        notes.append("Test images differ between seeds; they are resampled for each seed apart.")
    if reference is None:
        notes.append("The reference was chosen as the best on these images, which flatters it a little.")
    left_out = sorted({seed for runs in predictions.values() for seed in runs} - set(aligned.seeds))
    if left_out:
        notes.append(f"Seeds {left_out} are left out: not every method has them.")
    return notes
