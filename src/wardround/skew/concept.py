"""An indication of concept skew: do two clients draw the line between the same classes in the same place?

Each client's classes are represented by their mean features. On the images of the classes that two clients
share, the nearest mean is looked up twice, among the one's means and among the other's; the share of images
on which the two disagree is the figure. Both clients' features are first centred on the average of their
shared class means, so that a plain offset between sites (another camera) does not count.

It is an indication and no test: differences of shape between the sites' features move class means as well,
and so does the accident of few images. The diagonal holds what accident alone does: the disagreement between
two random halves of one client.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wardround.seeds import numpy_stream
from wardround.skew.mmd import Features, squared_distances

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

LEAST = 4  # images that a class needs at each client to be compared


def disagreement_matrix(features: Mapping[str, Features], labels: Mapping[str, Labels], seed: int) -> Floats:
    """Disagreement `(K, K)` between clients, with that of each client's own halves on the diagonal.

    NaN where fewer than two classes have `LEAST` images on both sides.
    """
    names = list(features)
    found = np.full((len(names), len(names)), np.nan)
    for i, one in enumerate(names):
        found[i, i] = _halves(features[one], labels[one], numpy_stream(seed, "concept-halves", client=one))
        for j in range(i + 1, len(names)):
            other = names[j]
            value = disagreement(features[one], labels[one], features[other], labels[other])
            found[i, j] = found[j, i] = value
    return found


def _halves(features: Features, labels: Labels, rng: np.random.Generator) -> float:
    """Disagreement between two random halves, split within each class."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    even, odd = order[::2], order[1::2]
    return disagreement(features[even], labels[even], features[odd], labels[odd])


def disagreement(x: Features, x_labels: Labels, y: Features, y_labels: Labels) -> float:
    """Share of the images of both sides on which the two sides' nearest-class-mean rules differ.

    Each side weighs one half, and within a side each class the same. `x` is `(N, d)` with labels `(N,)`.
    """
    common = np.intersect1d(_frequent(x_labels), _frequent(y_labels))
    if len(common) < 2:
        return float("nan")
    sides = [_centred(x, x_labels, common), _centred(y, y_labels, common)]
    means = [_class_means(rows, kept, common) for rows, kept in sides]
    shares = []
    for rows, kept in sides:
        nearest = [squared_distances(rows, centres).argmin(axis=1) for centres in means]
        differ = nearest[0] != nearest[1]
        shares.append(np.mean([differ[kept == c].mean() for c in common]))
    return float(np.mean(shares))


def _frequent(labels: Labels) -> Labels:
    """Classes with at least `LEAST` images."""
    classes, counts = np.unique(labels, return_counts=True)
    return classes[counts >= LEAST]


def _centred(features: Features, labels: Labels, common: Labels) -> tuple[Floats, Labels]:
    """The rows of the common classes, minus the average of these classes' means, and their labels."""
    kept = np.isin(labels, common)
    rows = np.asarray(features[kept], dtype=np.float64)
    return rows - _class_means(rows, labels[kept], common).mean(axis=0), labels[kept]


def _class_means(rows: Floats, labels: Labels, classes: Labels) -> Floats:
    """Mean of each class, `(len(classes), d)`."""
    return np.stack([rows[labels == c].mean(axis=0) for c in classes])
