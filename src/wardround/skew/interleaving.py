"""How far groups of images lie apart in a feature space, and the space drawn flat by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wardround.skew.mmd import Features

NEIGHBOURS = 10
Groups = NDArray[np.int64]


def flattened(rows: Features, perplexity: float, seed: int) -> NDArray[np.float64]:
    """t-SNE (van der Maaten and Hinton, JMLR 2008) of `(N, d)`: `(N, 2)`, the same for the same seed.

    It begins with the two main components. A perplexity for which there are too few images is lowered to a third of
    their number. Images that do not differ at all stay on one spot.
    """
    if len(rows) < 3 or not np.ptp(rows, axis=0).any():
        return np.zeros((len(rows), 2))
    from sklearn.manifold import TSNE

    fitting = min(perplexity, (len(rows) - 1) / 3)
    model = TSNE(perplexity=fitting, init="pca", learning_rate="auto", random_state=seed)
    return np.asarray(model.fit_transform(rows), np.float64)


def apart(rows: Features, picture: Features, groups: Groups) -> dict[str, float | None]:
    """How far groups lie apart.

    - `silhouette` (Rousseeuw, 1987), mean over images, in -1..1: near 1 where an image is far nearer to its own group
      than to the next one, near 0 where groups interleave; by the distances of features.
    - `picture_silhouette`: the same by the distances that one sees.
    - `same_neighbours`: of an image's ten nearest ones by features, the share that is of its own group.
    - `by_chance`: that share for groups that are shuffled, `sum_g n_g (n_g - 1) / (N (N - 1))`.

    None where there are no two groups, or no group has two images.

    Args:
        rows: features `(N, d)`.
        picture: `(N, 2)`.
        groups: int64 `(N,)`.
    """
    counts = np.unique(groups, return_counts=True)[1]
    if not 2 <= len(counts) < len(groups):
        return dict.fromkeys(("silhouette", "picture_silhouette", "same_neighbours", "by_chance"))
    from sklearn.metrics import silhouette_score

    return {
        "silhouette": float(silhouette_score(rows, groups)),
        "picture_silhouette": float(silhouette_score(picture, groups)),
        "same_neighbours": same_neighbours(rows, groups),
        "by_chance": float((counts * (counts - 1)).sum() / (len(groups) * (len(groups) - 1))),
    }


def same_neighbours(rows: Features, groups: Groups, count: int = NEIGHBOURS) -> float:
    """Share of the `count` nearest images of each that are of its group; itself is not counted."""
    from sklearn.neighbors import NearestNeighbors

    nearest = NearestNeighbors(n_neighbors=min(count, len(rows) - 1)).fit(rows).kneighbors(return_distance=False)
    return float((groups[nearest] == groups[:, None]).mean())


def nested(inner: Groups, outer: Groups) -> bool:
    """Whether every group of `inner` lies within one of `outer`, of which there are several."""
    pairs = np.unique(np.stack([inner, outer], 1), axis=0)
    return len(pairs) == len(np.unique(inner)) and len(np.unique(outer)) > 1


def notes(groups: Mapping[str, Groups], shared_network: bool) -> list[str]:
    """What to beware of when the figures are read."""
    found = [
        "t-SNE keeps neighbours, not distances or sizes: trust the figures, which are of the features themselves, more "
        "than the picture."
    ]
    if nested(groups["class"], groups["modality"]):
        found.append(
            "Every class here is of one modality. Features that tell classes apart then tell modalities apart too, and "
            "several modalities within the cluster of one class cannot come about."
        )
    if not shared_network and len(np.unique(groups["client"])) > 1:
        found.append(
            "Each client's images went through its own network, so that clients, and modalities that are at one client "
            "each, lie apart for that alone; --model server shows all through what is shared."
        )
    return found
