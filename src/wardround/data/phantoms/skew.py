"""What the dials for labels, quantity and concept do between sites. The feature dial is in `scanner`.

Every function gives the identical site at 0, moves away from it monotonically, and depends on the seed, the site
and the dial alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wardround.seeds import numpy_stream

LARGEST_TO_SMALLEST = 30  # ratio of site sizes at quantity 1; that of the six FedISIC centres is 28
RANK_FALL = 1.6  # each class is exp(-1.6) = 0.2 times as frequent as the one before it at label 1
FLOOR = 0.04  # share that stays uniform at label 1, so that no class vanishes


def site_sizes(per_site: int, sites: int, dial: float, seed: int) -> NDArray[np.int64]:
    """Images of each site `(sites,)`, which sum to `per_site * sites`, at least one each (unless `per_site` is 0).

    Sizes are geometric, `exp(-dial * ln(30) * u)` with u evenly spaced from 0 to 1 in an order drawn by the seed.
    """
    total, least = per_site * sites, min(per_site, 1)
    ranks = numpy_stream(seed, "phantoms/quantity").permutation(sites) / max(sites - 1, 1)
    weights = np.exp(-dial * np.log(LARGEST_TO_SMALLEST) * ranks)
    exact = (total - least * sites) * weights / weights.sum()
    sizes: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    left = total - least * sites - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes + least


def class_shares(site: int, classes: int, dial: float, seed: int) -> NDArray[np.float64]:
    """Class proportions `(classes,)` of a site: `p_c ~ exp(-1.6 * dial * rank_c)`, less a small uniform floor.

    Ranks are a random order, jittered so that no two sites agree; the classes take turns at being the first,
    so the federation as a whole stays near uniform. At 1 with four classes the first has about 0.78 of the site.
    """
    turn = numpy_stream(seed, "phantoms/label").permutation(classes)
    rng = numpy_stream(seed, "phantoms/label", client=str(site))
    order = np.roll(turn, -site)
    order[1:] = rng.permutation(order[1:])
    ranks = np.empty(classes)
    ranks[order] = np.arange(classes) + rng.uniform(-0.2, 0.2, classes)
    shares: NDArray[np.float64] = np.exp(-RANK_FALL * dial * ranks)
    shares /= shares.sum()
    return (1 - FLOOR * dial) * shares + FLOOR * dial / classes


def label_sequence(shares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """`count` labels whose every beginning follows `shares` as closely as whole images can.

    Sainte-Lague: the j-th image of class c comes at time (2j - 1) / p_c. More labels never change the first ones.
    """
    turns = (2 * np.arange(count) + 1) / shares[:, None]
    return (np.argsort(turns.T, axis=None, kind="stable")[:count] % len(shares)).astype(np.int64)


def exchange_levels(sites: int, classes: int, dial: float) -> NDArray[np.float64]:
    """How far each site exchanges the two labels of each pair, `(sites, classes // 2)`, each in 0..1.

    Pair p is classes 2p and 2p + 1. Every second site dissents. The dial takes the dissenters' pairs one after
    the other, pair by pair over the sites; where it stops within one, the level is how much of it is reached:
    that share of the pair's images, the most borderline ones first, carries the other label.
    """
    pairs = classes // 2
    levels = np.zeros((sites, pairs))
    dissenters = np.arange(1, sites, 2)
    steps = dial * len(dissenters) * pairs - np.arange(len(dissenters) * pairs)
    levels[dissenters] = np.clip(steps, 0, 1).reshape(pairs, len(dissenters)).T
    return levels


def partner(label: int, classes: int) -> int | None:
    """The class that resembles `label`, or None for the last of an odd number of classes."""
    other = label ^ 1
    return other if other < classes else None
