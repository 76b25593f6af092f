"""Distributions at the feature-alignment sites: measured at a client, compared with a target (PAFP, section IV)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduce = Literal["element", "channel"]
Divergence = Literal["kl", "reverse_kl", "moments", "fdse_released"]
SiteWeights = Literal["uniform", "deeper"]


@dataclass(frozen=True)
class Moments:
    """Mean and variance at one site: `(C, H, W)` per element, or `(C,)` per channel."""

    mean: Tensor
    var: Tensor


def batch_moments(h: Tensor, reduce: Reduce) -> Moments:
    """Moments of a batch `(B, C, H, W)`, over the batch alone (`element`) or over batch and positions (`channel`).

    The variance is the biased one, so that a batch of one has variance 0 instead of none.
    """
    dims = (0,) if reduce == "element" else tuple(d for d in range(h.dim()) if d != 1)
    var, mean = torch.var_mean(h.float(), dim=dims, correction=0)
    return Moments(mean, var)


def moment_shape(site: Sequence[int], reduce: Reduce) -> tuple[int, ...]:
    """The shape of a site's moments, for inputs of shape `site`, `(C, H, W)`."""
    return tuple(site) if reduce == "element" else (site[0],)


class RunningMoments:
    """`s <- (1 - m) s + m s_batch` within a round; the round's first batch assigns.

    The history is detached: gradients pass through the current batch alone and are scaled by `m`, so that
    `lambda * m` is the effective strength of an alignment loss on the result.
    """

    def __init__(self, reduce: Reduce, m: float) -> None:
        self.reduce: Reduce = reduce
        self.m = m
        self.now: Moments | None = None

    def update(self, h: Tensor) -> Moments:
        """Take in a batch and return the moments, through which gradients flow to `h`."""
        new = batch_moments(h, self.reduce)
        if self.now is not None:
            m, old = self.m, self.now
            new = Moments((1 - m) * old.mean + m * new.mean, (1 - m) * old.var + m * new.var)
        self.now = Moments(new.mean.detach(), new.var.detach())
        return new


def divergence(local: Moments, target: Moments, kind: Divergence, eps: float) -> Tensor:
    """How far a client's distribution at one site is from the target; a scalar, mean over elements.

    `eps` is added to both variances: positions that never fire have none.

    - `kl`: `1/2 [log(v_k/v_g) + (v_g + (mu_g - mu_k)^2)/v_k - 1] = KL(N(mu_g, v_g) || N(mu_k, v_k))`.
    - `reverse_kl`: the same with client and target exchanged.
    - `moments`: `(mu_k - mu_g)^2 + (sigma_k - sigma_g)^2`.
    - `fdse_released`: `(mu_g^2 - mu_k^2)/(2 v_k) + 1/2 [log(v_k/v_g) + v_g/v_k]`, the regulariser as FDSE's
      published code has it, here on our statistics. It is no distance: its gradient at equality is not zero and it
      has no lower bound. For ablations.
    """
    m_k, v_k, m_g, v_g = local.mean, local.var + eps, target.mean, target.var + eps
    if kind == "reverse_kl":
        m_k, v_k, m_g, v_g = m_g, v_g, m_k, v_k
    if kind == "moments":
        return ((m_k - m_g) ** 2 + (v_k.sqrt() - v_g.sqrt()) ** 2).mean()
    if kind == "fdse_released":
        return ((m_g**2 - m_k**2) / (2 * v_k) + 0.5 * (torch.log(v_k / v_g) + v_g / v_k)).mean()
    return 0.5 * (torch.log(v_k / v_g) + (v_g + (m_g - m_k) ** 2) / v_k - 1).mean()


def alignment_loss(
    local: Sequence[Moments], target: Sequence[Moments], weights: Sequence[float], kind: Divergence, eps: float
) -> Tensor:
    """`sum_l w_l * divergence` over the sites, a scalar."""
    pairs = zip(weights, local, target, strict=True)
    return torch.stack([weight * divergence(ours, theirs, kind, eps) for weight, ours, theirs in pairs]).sum()


def site_weights(sites: int, kind: SiteWeights, beta: float) -> list[float]:
    """Weights that sum to 1: equal, or proportional to `exp(beta l)` for the l-th site (deeper ones heavier)."""
    raw = [1.0 if kind == "uniform" else math.exp(beta * site) for site in range(sites)]
    return [weight / sum(raw) for weight in raw]
