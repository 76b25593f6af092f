"""The paired bootstrap over seeds and test images.

A published difference between two methods rests on the seeds that were drawn and on the images that happened
to be in the test set. Each draw here resamples both: the seeds with replacement, and at each client its test
images with replacement (plainly, not within classes: a class that vanishes from a draw is skipped, as the
metric skips a class that a test set lacks). All methods see the same draws, so what is common to them cancels
in a difference.

Where seeds share their test images the two are crossed factors; resampling both is the pigeonhole bootstrap
(Owen, Annals of Applied Statistics 2007). It errs on the safe side: what is peculiar to one seed on one image
is counted up to three times, so that standard errors come out up to 1.7 times too large where nothing else
varies (1.5 with three seeds). The part of the seeds alone is estimated poorly from two or three of them, and
with one it is absent: the interval then speaks of test images only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import InputError
from wardround.evaluation.predictions import Aligned, Block
from wardround.seeds import numpy_stream

Floats = NDArray[np.float64]

MEASURES = ("unweighted_average", "weighted_average", "pooled_balanced_accuracy")
LEVEL = 0.95
POWER = 0.80
CHUNK = 4_000_000  # elements of one block of resampling counts: 16 MB


@dataclass(frozen=True)
class Draws:
    """Values in every draw. Row 0 of `measures` and `clients` is what was observed; the draws follow.

    Attributes:
        methods: labels of the M methods.
        measures: measure -> `(1 + draws, M)`.
        clients: client -> `(1 + draws, M)`, balanced accuracy averaged over seeds.
        observed: `(clients, M, S)` balanced accuracy in each seed, no resampling.
    """

    methods: tuple[str, ...]
    measures: dict[str, Floats]
    clients: dict[str, Floats]
    observed: Floats


def draw(aligned: Aligned, weights: Mapping[str, float], draws: int, seed: int) -> Draws:
    """Resample seeds and test images `draws` times.

    Args:
        aligned: the predictions of M methods in S seeds.
        weights: each client's weight in the weighted average (its number of training images).
        draws: how many, at least 2.
        seed: of the resampling.

    Raises:
        InputError: fewer than 2 draws, a client without a weight, no test image, or weights that sum to 0.
    """
    share = _shares(aligned, weights)
    if draws < 2:
        raise InputError(f"draws must be at least 2, found {draws}")
    scores, pooled = _scores(aligned, draws, seed)
    chosen = _with_observed(_resample(len(aligned.seeds), draws, numpy_stream(seed, "bootstrap-seeds")))
    clients = {name: _over_seeds(score, chosen) for name, score in scores.items()}
    stacked = np.stack(list(clients.values()))
    measures = {
        "unweighted_average": stacked.mean(axis=0),
        "weighted_average": np.tensordot(share, stacked, 1),
        "pooled_balanced_accuracy": _over_seeds(pooled, chosen),
    }
    return Draws(aligned.methods, measures, clients, np.stack([score[0] for score in scores.values()]))


def _shares(aligned: Aligned, weights: Mapping[str, float]) -> Floats:
    """The weights of the clients that have test images, scaled to sum to 1."""
    if not aligned.clients:
        raise InputError("no client has test images, so there is nothing to compare")
    missing = sorted(set(aligned.clients) - set(weights))
    if missing:
        raise InputError(f"no weight for clients {missing}")
    share = np.array([weights[name] for name in aligned.clients], dtype=np.float64)
    if share.sum() <= 0:
        raise InputError(f"the weights of {list(aligned.clients)} must sum to more than 0: {share.tolist()}")
    return np.asarray(share / share.sum())


def _resample(n: int, draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """How often each of `n` things is taken in each draw of `n`, `(draws, n)`."""
    return rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float32)


def _with_observed(counts: NDArray[np.float32]) -> NDArray[np.float32]:
    """`counts` below a first row of ones, in which each thing is taken once."""
    return np.concatenate([np.ones((1, counts.shape[1]), dtype=np.float32), counts])


def _scores(aligned: Aligned, draws: int, seed: int) -> tuple[dict[str, Floats], Floats]:
    """Balanced accuracies `(1 + draws, M, S)` of each client, and of all images in one pool."""
    scores: dict[str, Floats] = {}
    shape = (1 + draws, len(aligned.methods), len(aligned.seeds), aligned.classes)
    all_hits, all_support = np.zeros(shape), np.zeros((shape[0], 1, *shape[2:]))
    for client in aligned.clients:
        hits, support = _count(aligned, client, draws, seed)
        scores[client] = _balanced(hits, support)
        all_hits += hits
        all_support += support
    return scores, _balanced(all_hits, all_support)


def _count(aligned: Aligned, client: str, draws: int, seed: int) -> tuple[Floats, Floats]:
    """Per class and draw: right predictions `(1 + draws, M, S, C)`, and images `(1 + draws, 1, S, C)`."""
    shape = (1 + draws, len(aligned.methods), len(aligned.seeds), aligned.classes)
    hits, support = np.zeros(shape), np.zeros((shape[0], 1, *shape[2:]))
    for number, block in enumerate(aligned.clients[client]):
        n = len(block.labels)
        rng = numpy_stream(seed, "bootstrap-images", number, client)
        step = max(1, CHUNK // n)
        for start in range(1, 1 + draws, step):
            rows = slice(start, min(start + step, 1 + draws))
            _count_block(block, _resample(n, rows.stop - start, rng), rows, hits, support)
        _count_block(block, np.ones((1, n), dtype=np.float32), slice(0, 1), hits, support)
    return hits, support


def _count_block(block: Block, counts: NDArray[np.float32], rows: slice, hits: Floats, support: Floats) -> None:
    """Fill `rows` of `hits` and `support` from the resampling counts `(len(rows), N)` of one block."""
    for c in np.unique(block.labels):
        of_class = block.labels == c
        drawn = counts[:, of_class]
        right = np.tensordot(drawn, block.hits[of_class], 1)
        for place, s in enumerate(block.seeds):
            hits[rows, :, s, c] = right[:, :, place]
            support[rows, 0, s, c] = drawn.sum(axis=1)


def _balanced(hits: Floats, support: Floats) -> Floats:
    """Mean recall over the classes that are there: `(..., C)` counts to `(...)`."""
    there = np.broadcast_to(support > 0, hits.shape)
    recall = np.divide(hits, support, out=np.zeros_like(hits), where=there)
    return np.asarray(recall.sum(axis=-1) / there.sum(axis=-1))


def _over_seeds(score: Floats, chosen: NDArray[Any]) -> Floats:
    """Average `(1 + draws, M, S)` over the seeds, taken as often as `chosen` `(1 + draws, S)` says."""
    return np.asarray(np.einsum("bms,bs->bm", score, chosen / chosen.shape[1]), dtype=np.float64)


def interval(values: Floats, level: float = LEVEL) -> dict[str, float]:
    """`low`, `high` (percentiles) and `standard_error` of one figure, from the draws of `(1 + draws,)`."""
    drawn = values[1:]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return {"low": float(low), "high": float(high), "standard_error": float(drawn.std(ddof=1))}


def difference(a: Floats, b: Floats, level: float = LEVEL) -> dict[str, float]:
    """`a - b` draw by draw, each `(1 + draws,)`.

    Returns `difference` (observed), `low`, `high`, `standard_error`, `p` and `smallest_difference`. The
    two-sided p-value of "there is none" is 2 min(P(d* <= 0), P(d* >= 0)), at most 1, with one draw added to
    each side so that it is never 0.
    """
    gaps = a - b
    tail = min(int((gaps[1:] <= 0).sum()), int((gaps[1:] >= 0).sum()))
    found = interval(gaps, level)
    return {
        "difference": float(gaps[0]),
        **found,
        "p": min(1.0, 2 * (1 + tail) / len(gaps)),
        "smallest_difference": smallest_detectable_difference(found["standard_error"], level),
    }


def smallest_detectable_difference(standard_error: float, level: float = LEVEL, power: float = POWER) -> float:
    """The true difference that a two-sided test on this test set finds with the given power.

    (z_{(1+level)/2} + z_power) x standard error of the paired difference; at 5 % and 80 % that is 2.80
    standard errors.
    """
    z = NormalDist().inv_cdf
    return (z((1 + level) / 2) + z(power)) * standard_error
