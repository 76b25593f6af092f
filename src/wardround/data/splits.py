"""Stratified, seeded splits into train, validation and test that keep a group whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TRAIN, VAL, TEST = 0, 1, 2
Codes = NDArray[np.int64]


def grouped_split(
    strata: Codes, groups: Codes, val_fraction: float, test_fraction: float, rng: np.random.Generator
) -> Codes:
    """The split of every image, `(N,)` of TRAIN, VAL or TEST.

    All images of a group get one split. Within each stratum (say, a class at a site) the groups are taken
    largest first, in random order among equals, and each goes to the split where it adds least to the
    chi-square distance `sum_i (n_i - t_i)^2 / t_i` between the splits' sizes n and their targets t. Thus
    large and small groups spread over the splits in proportion. The first group always trains: a stratum of
    one or two groups has no test images, and no class is seen only in test.

    Args:
        strata: `(N,)` stratum of each image; a group of several strata counts for its commonest.
        groups: `(N,)` group of each image, any integers.
        val_fraction: share of images for validation, 0 or more.
        test_fraction: share of images for testing, 0 or more; together less than 1.
        rng: the draw.
    """
    fractions = np.array([1 - val_fraction - test_fraction, val_fraction, test_fraction])
    _, member_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    home = commonest(strata, member_of, len(sizes))
    split_of_group = np.empty(len(sizes), dtype=np.int64)
    for stratum in np.unique(home):
        inside = rng.permutation(np.flatnonzero(home == stratum))
        inside = inside[np.argsort(-sizes[inside], kind="stable")]
        split_of_group[inside] = _deal(sizes[inside], fractions * sizes[inside].sum())
    return split_of_group[member_of]


def _deal(sizes: Codes, targets: NDArray[np.float64]) -> list[int]:
    """The split of each group in turn; a split with target 0 gets none."""
    filled = np.zeros_like(targets)
    chosen: list[int] = []
    for size in sizes:
        cost = np.full(len(targets), np.inf)
        np.divide(size * (size - 2 * (targets - filled)), targets, out=cost, where=targets > 0)
        split = int(np.argmin(cost)) if chosen else TRAIN
        filled[split] += size
        chosen.append(split)
    return chosen


def commonest(values: Codes, member_of: Codes, groups: int) -> Codes:
    """For each group the value that most of its members have, the smallest among equals: `(groups,)`."""
    levels, level = np.unique(values, return_inverse=True)
    pairs, counts = np.unique(member_of * len(levels) + level, return_counts=True)
    best = np.zeros(groups, dtype=np.int64)
    most = np.zeros(groups, dtype=np.int64)
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        group, value = divmod(pair, len(levels))
        if count > most[group]:
            best[group], most[group] = levels[value], count
    return best


def group_codes(names: list[str]) -> Codes:
    """Integers `(N,)` that are equal where names are equal; an empty name is a group of its own."""
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(name, i) if name else i for i, name in enumerate(names)], dtype=np.int64).reshape(
        -1
    )
