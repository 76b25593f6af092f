"""Which images of each class stand for it: those that score highest by a trained network's features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Score = Literal["own-logit", "activation", "class-mean", "random"]


def scores(kind: Score, features: Tensor, logits: Tensor, labels: Tensor, stream: torch.Generator) -> Tensor:
    """A score for every image, `(N,)`; only how those of one class compare has a meaning.

    ==========  ==========================================================  ============================================
    kind        score S of an image of class z                              reading of `S = Sigmoid(V(X_z))`
    ==========  ==========================================================  ============================================
    own-logit   the head's logit of z                                       sigma(logit of z), in the same order
    activation  mean_j sigma(v_j)                                           literal; z groups the images and no more
    class-mean  cosine of v and the mean of the client's features of z      sigma(cosine), in the same order
    random      a draw from `stream`                                        a control
    ==========  ==========================================================  ============================================

    The sigmoid around a score is left out: in float32 it makes every large logit 1, and their order is lost.

    Args:
        kind: see the table.
        features: v, `(N, d)`.
        logits: of the head on v, `(N, C)`.
        labels: z, int64 `(N,)`.
        stream: for `random`.
    """
    if kind == "own-logit":
        return logits.gather(1, labels[:, None]).squeeze(1)
    if kind == "activation":
        return torch.sigmoid(features).mean(1)
    if kind == "random":
        return torch.rand(len(labels), generator=stream)
    sums = features.new_zeros(logits.shape[1], features.shape[1]).index_add_(0, labels, features)
    return functional.cosine_similarity(features, sums[labels])


def highest(scores: Tensor, labels: Tensor, k: int | None) -> Tensor:
    """The rows of the k highest scores of each class, int64, ascending; of equal scores the first rows count.

    Args:
        scores: `(N,)`.
        labels: int64 `(N,)`.
        k: images of each class; a class that has fewer gives them all. None: every image.

    >>> highest(torch.tensor([0.1, 0.9, 0.5, 0.5, 0.5]), torch.tensor([0, 0, 1, 1, 1]), 2).tolist()
    [0, 1, 2, 3]
    """
    order = scores.argsort(descending=True, stable=True)
    best = [order[labels[order] == number][:k] for number in sorted(set(labels.tolist()))]
    return torch.cat(best).sort().values
