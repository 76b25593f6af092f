"""Losses and mixtures between an image's features, its class's text, and a private classifier (FedMedCLIP)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from wardround.training.losses import ContrastiveKind

Contrastive = ContrastiveKind | Literal["none"]
Agreement = Literal["entropy", "symmetric", "none"]
EntropyMode = Literal["true", "reference"]


def batch_divergences(p: Tensor, q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`(KL(p^ || q^), KL(q^ || p^))`, scalars, of each class's scores softmaxed over the *batch*, a mean over classes.

    Args:
        p: the private classifier's logits, `(B, C)`.
        q: cosines, `(B, C)`, not scaled.
        temperature: divides both; there is no factor of its square.
    """
    log_p, log_q = (torch.log_softmax(scores / temperature, dim=0) for scores in (p, q))
    classes = p.shape[1]
    forward = (log_p.exp() * (log_p - log_q)).sum() / classes
    return forward, (log_q.exp() * (log_q - log_p)).sum() / classes


def agreement_loss(p: Tensor, q: Tensor, alpha: Tensor, kind: Agreement, temperature: float) -> Tensor:
    """How far classifier and attention disagree, a scalar.

    `symmetric` is half of each divergence, as the published code. `entropy` weighs them by who is surer:
    `alpha KL(MLP || FAM) + (1 - alpha) KL(FAM || MLP)`, alpha the batch's mean, without a gradient.
    """
    forward, backward = batch_divergences(p, q, temperature)
    weight = alpha.detach().mean() if kind == "entropy" else 0.5
    return weight * forward + (1 - weight) * backward


def entropy(probabilities: Tensor, mode: EntropyMode) -> Tensor:
    """Of rows `(B, C)`, in nats, `(B,)`. `reference` softmaxes the probabilities once more, as the published code."""
    if mode == "reference":
        probabilities = torch.softmax(probabilities, dim=1)
    return -(probabilities * probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()).sum(1)


def certainty(p_mlp: Tensor, p_fam: Tensor, mode: EntropyMode) -> Tensor:
    """alpha `(B,)`, the weight of the private classifier: `H_FAM / (H_FAM + H_MLP)`; a half where both are certain.

    Args:
        p_mlp, p_fam: probabilities `(B, C)`.
        mode: see `entropy`.
    """
    ours, theirs = entropy(p_fam, mode), entropy(p_mlp, mode)
    total = ours + theirs
    return torch.where(total > 0, ours / total.clamp(min=torch.finfo(total.dtype).tiny), 0.5)


def mixture(mlp_logits: Tensor, fam_logits: Tensor, mode: EntropyMode) -> Tensor:
    """Log-probabilities `(B, C)` of `alpha p_MLP + (1 - alpha) p_FAM`: logits whose softmax is the ensemble."""
    p_mlp, p_fam = torch.softmax(mlp_logits, 1), torch.softmax(fam_logits, 1)
    alpha = certainty(p_mlp, p_fam, mode)[:, None]
    mixed = alpha * p_mlp + (1 - alpha) * p_fam
    return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()
