"""Caps on the number of images that keep the class proportions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def stratified_cap(labels: NDArray[np.int64], limit: int | None, rng: np.random.Generator) -> NDArray[np.int64]:
    """Ascending positions of at most `limit` images, chosen at random within each class.

    Every class that has an image keeps at least one; only when `limit` is smaller than the number of classes
    do the rarest go. All positions when `limit` is None.
    """
    if limit is None or len(labels) <= limit:
        return np.arange(len(labels), dtype=np.int64)
    classes, counts = np.unique(labels, return_counts=True)
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:quota]
        for label, quota in zip(classes, quotas(counts, limit), strict=True)
    ]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def quotas(counts: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """How many of each class to keep, together `limit`: one each, the rest in proportion (largest remainder).

    >>> quotas(np.array([90, 9, 1]), 10)
    array([7, 2, 1])
    """
    first = np.zeros(len(counts), dtype=np.int64)
    first[np.argsort(-counts, kind="stable")[:limit]] = 1
    spare = limit - int(first.sum())
    rest = counts - first
    share = spare * rest / max(int(rest.sum()), 1)
    quota = first + np.floor(share).astype(np.int64)
    missing = limit - int(quota.sum())
    quota[np.argsort(-(share - np.floor(share)), kind="stable")[:missing]] += 1
    return quota
