"""Feature distance between clients with the labels made equal, so that label skew does not pass for feature skew.

Two clients with the same scanner and different labels have different features, and the plain MMD says so. Here
every class that both have counts the same on both sides: each side is a mixture of its classes' distributions in
equal parts, and the distance is the MMD between the two mixtures. Labels that two clients exchange leave the
mixtures as they are, so concept skew does not count either.

The estimate of the square is unbiased (no row is compared with itself), and so is 0 on average where there is no
difference, however few the images. Its root is reported, 0 where the estimate is negative.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wardround.skew.concept import LEAST
from wardround.skew.mmd import Features, Floats, global_gamma, kernel, pooled_distances

Labels = NDArray[np.int64]


def same_label_matrix(features: Mapping[str, Features], labels: Mapping[str, Labels]) -> Floats:
    """Distance between every two clients `(K, K)`, with one bandwidth for all pairs as in `mmd.mmd_matrix`.

    Zero on the diagonal of clients with images; NaN where two clients share no class of `LEAST` images.

    Args:
        features: of each client, `(N_k, d)`.
        labels: of the same images, `(N_k,)`.
    """
    sets, names = list(features.values()), list(features)
    usable = [k for k, rows in enumerate(sets) if len(rows)]
    found = np.full((len(sets), len(sets)), np.nan)
    found[usable, usable] = 0.0
    gamma = global_gamma([sets[k] for k in usable]) if usable else 1.0
    for i in usable:
        for j in (j for j in usable if j > i):
            value = same_label_mmd(sets[i], labels[names[i]], sets[j], labels[names[j]], gamma)
            found[i, j] = found[j, i] = value
    return found


def same_label_mmd(x: Features, x_labels: Labels, y: Features, y_labels: Labels, gamma: float) -> float:
    """The distance between `x` `(N, d)` and `y` `(M, d)`; NaN where they share no class of `LEAST` images."""
    common = [
        c for c in np.intersect1d(x_labels, y_labels) if min((x_labels == c).sum(), (y_labels == c).sum()) >= LEAST
    ]
    if not common:
        return float("nan")
    kept_x, kept_y = np.isin(x_labels, common), np.isin(y_labels, common)
    groups = [np.searchsorted(common, x_labels[kept_x]), len(common) + np.searchsorted(common, y_labels[kept_y])]
    means = _group_means(kernel(pooled_distances(x[kept_x], y[kept_y]), gamma), np.concatenate(groups))
    signs = np.repeat([1.0, -1.0], len(common)) / len(common)
    return float(np.sqrt(max(float(signs @ means @ signs), 0.0)))


def _group_means(gram: Floats, groups: Labels) -> Floats:
    """Mean kernel value between the rows of every two groups `(G, G)`, without a row's value with itself."""
    belongs = (groups[:, None] == np.arange(groups.max() + 1)).astype(np.float64)
    sizes = belongs.sum(axis=0)
    own = np.diag(sizes)  # the kernel of a row with itself is 1
    return np.asarray((belongs.T @ gram @ belongs - own) / (np.outer(sizes, sizes) - own))
