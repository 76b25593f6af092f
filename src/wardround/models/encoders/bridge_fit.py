"""The linear map from image features to sentence embeddings, fitted without any image.

A row of an ImageNet classifier is the direction in which an image's features lie when it shows that class, so it can
stand for the class's images. That links what a convolutional network sees to what a sentence encoder says.

Settings were chosen by ten-fold cross-validation over the 1000 classes: the rank of a held-out class's own name among
all 1000 names, by the cosine of its mapped row. The median is 13 or 14, by the dealing of the folds, and the mean 71
with rows centred and at unit length and a ridge of 2; a ridge of 1 to 3 is as good, of 0.3 or 10 worse (17), of 0.01
bad (55). Without centring it is 16 at best, without unit length 13 to 15 at a ridge of 3 to 10, with embeddings that
are centred and get their mean back 21. Chance is 500. Classes that were fitted to are found at rank 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from wardround.seeds import torch_stream

RIDGE = 2.0
"""Strength of the ridge, for rows of length 1."""
ANCHOR_WEIGHT = 10.0
"""A captioned image counts as much as this many classes."""
RESIDUAL_SHARE = 0.5
"""What the residual is multiplied by."""


@dataclass(frozen=True)
class Pairs:
    """Points that are known on both sides.

    Attributes:
        images: pooled image features, or rows that stand for them, `(n, F)`.
        texts: sentence embeddings of length 1, `(n, S)`.
    """

    images: Tensor
    texts: Tensor


def unit_rows(classifier: Tensor) -> Tensor:
    """Rows of a classifier `(C, F)`, less their mean, at length 1, float64."""
    rows = classifier.double()
    return functional.normalize(rows - rows.mean(0), dim=1)


def ridge_map(rows: Tensor, texts: Tensor, weights: Tensor | None = None) -> Tensor:
    """W `(S, F)` that minimises `sum_i w_i ||W x_i - t_i||^2 + RIDGE ||W||^2`, float64.

    Args:
        rows: x, `(n, F)`.
        texts: t, `(n, S)`.
        weights: w, `(n,)`; all 1 where there are none.
    """
    scale = (torch.ones(len(rows)) if weights is None else weights).double().sqrt()[:, None]
    x, t = rows.double() * scale, texts.double() * scale
    gram = x @ x.T + RIDGE * torch.eye(len(x), dtype=torch.float64)
    mapped: Tensor = (x.T @ torch.linalg.solve(gram, t)).T
    return mapped


def residual_components(rows: Tensor, mapped: Tensor, count: int) -> Tensor:
    """The first principal components `(count, F)` of what W does not see of `rows`; orthonormal, float64.

    Args:
        rows: centred, `(n, F)`.
        mapped: W, `(S, F)`.
        count: how many.
    """
    seen = torch.linalg.qr(mapped.double().T).Q
    rest = rows.double() - rows.double() @ seen @ seen.T
    components: Tensor = torch.linalg.svd(rest, full_matrices=False).Vh[:count]
    # A component's sign is arbitrary: its largest entry is positive here.
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    return components * largest.sign()


def fit_projection(classifier: Tensor, texts: Tensor, residual: int, anchors: Pairs | None = None) -> Tensor:
    """`[W ; 0.5 P]` `(S + residual, F)`, float32: multiplied by pooled features f it gives `[W f ; 0.5 P f]`.

    f is used as it is. Its mean over images is not known without images; an estimate from the statistics of the last
    norm was tried and changed little. One thread, in float64: the same bits on every call.

    Args:
        classifier: rows of an ImageNet classifier, `(C, F)`.
        texts: sentence embeddings of the classes' names, at length 1, `(C, S)`.
        residual: number of principal components in P.
        anchors: pairs of image features and captions that count too, each as much as `ANCHOR_WEIGHT` classes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = x = unit_rows(classifier)
        weights = torch.ones(len(rows))
        if anchors is not None:
            x = torch.cat([rows, functional.normalize(anchors.images.double(), dim=1)])
            texts = torch.cat([texts.double(), anchors.texts.double()])
            weights = torch.cat([weights, torch.full((len(anchors.images),), ANCHOR_WEIGHT)])
        mapped = ridge_map(x, texts, weights)
        rest = residual_components(rows, mapped, residual)
        return torch.cat([mapped, RESIDUAL_SHARE * rest]).float()
    finally:
        torch.set_num_threads(threads)


def held_out_ranks(classifier: Tensor, texts: Tensor, folds: int = 10, seed: int = 0) -> Tensor:
    """For each class the rank, from 1, of its own name among all names, by a map that was fitted without the class.

    Args:
        classifier: `(C, F)`.
        texts: sentence embeddings of the classes' names, at length 1, `(C, S)`.
        folds: parts into which the classes are dealt at random; each is held out once.
        seed: of the dealing.
    """
    ranks = torch.zeros(len(classifier), dtype=torch.int64)
    order = torch.randperm(len(classifier), generator=torch_stream(seed, "held-out classes"))
    for fold in range(folds):
        held = order[fold::folds]
        kept = torch.ones(len(classifier), dtype=torch.bool)
        kept[held] = False
        centre = classifier[kept].double().mean(0)
        rows = functional.normalize(classifier.double() - centre, dim=1)
        cosines = functional.normalize(rows[held] @ ridge_map(rows[kept], texts[kept]).T, dim=1) @ texts.double().T
        own = cosines.gather(1, held[:, None])
        ranks[held] = (cosines > own).sum(1) + 1
    return ranks
