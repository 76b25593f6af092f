"""The contrastive loss of caption-enhanced learning (FM², eq. 4), and how far it can fall."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def caption_loss(
    images: Tensor, captions: Tensor, says: Tensor, temperature: float, multi_positive: bool = False
) -> Tensor:
    """One-directional InfoNCE from images to captions, a scalar.

        l = -1/B sum_j mean_{k in P(j)} log softmax_k(cos(v_j, t_k) / tau)

    P(j) is j alone, as published, or, with `multi_positive`, every image of the batch whose caption says the same. With
    captions of the same words this makes no difference, since their embeddings are the same; with paraphrases it does:
    the others are then no longer pushed away.

    Images without a caption take no part, neither as rows nor as columns. With fewer than two captioned images there is
    nothing to tell apart, and the loss is 0, with a graph.

    Args:
        images: v, projected image features, `(B, d)`.
        captions: t, projected caption embeddings, `(B, d)`; rows of images without a caption are not looked at.
        says: what each caption says, as a number, int64 `(B,)`; -1 without a caption.
        temperature: tau.
        multi_positive: see above.
    """
    rows = (says >= 0).nonzero().flatten()
    if len(rows) < 2:
        return images[:0].sum() + captions[:0].sum()
    v = functional.normalize(images[rows].float(), dim=1)
    t = functional.normalize(captions[rows].float(), dim=1)
    log_p = torch.log_softmax(v @ t.T / temperature, dim=1)
    if not multi_positive:
        return -log_p.diagonal().mean()
    same = (says[rows, None] == says[None, rows]).to(log_p.dtype)
    return -((log_p * same).sum(1) / same.sum(1)).mean()


def loss_floor(says: Tensor) -> float:
    """What `caption_loss` of a batch cannot fall below: the mean over captioned images of `log n`.

    n is how many captions of the batch say the same, and 0 stands for a batch that is skipped. Captions of the same
    words get the same share of the softmax, so none gets more than 1/n; with paraphrases and `multi_positive` the mean
    of n logarithms is largest where the shares are equal.

    Args:
        says: as for `caption_loss`. Without `multi_positive`, numbers of texts and not of meanings.
    """
    present = says[says >= 0]
    if len(present) < 2:
        return 0.0
    sizes = present.bincount().double()
    return float(torch.xlogy(sizes, sizes).sum()) / len(present)
