"""Local maximum mean discrepancy: how far two sets of features are apart, class by class."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the kernels, in mean squared distances: 1, 2, 4, 8 and 16 quarters of it
RAMP_STEPS = 1000


def lmmd(source: Tensor, target: Tensor, labels: Tensor, probabilities: Tensor) -> Tensor:
    """Zhu et al., IEEE TNNLS 2021: the mean, over the classes in common, of a class's squared distance in kernel space.

        1/|C| sum_c (sum_ij w^s_ic w^s_jc K(s_i, s_j) + w^t_ic w^t_jc K(t_i, t_j) - 2 w^s_ic w^t_jc K(s_i, t_j))

    with `w^s_ic = 1[y_i = c] / n_c` and `w^t_jc = p_jc / sum_j p_jc`. C are the classes that are some source image's
    label and some target image's likeliest class. Without any, the discrepancy is 0.

    Args:
        source: `(n, D)`.
        target: `(m, D)`.
        labels: of the source, int64 `(n,)`.
        probabilities: of the target's classes, `(m, C)`; no gradient passes through them.

    Returns:
        A scalar.
    """
    probabilities = probabilities.detach()
    classes = probabilities.shape[1]
    truth = functional.one_hot(labels, classes).to(source.dtype)
    likeliest = functional.one_hot(probabilities.argmax(1), classes)
    common = (truth.sum(0) > 0) & (likeliest.sum(0) > 0)
    # What is gained at the source is lost at the target: one signed weight an image and class says it all.
    weights = torch.cat([shares(truth), -shares(probabilities)]) * common
    kernel = rbf_kernels(torch.cat([source, target]))
    return (weights * (kernel @ weights)).sum() / common.sum().clamp(min=1)


def shares(weights: Tensor) -> Tensor:
    """Columns of `(n, C)`, not negative, at a sum of 1; a column of zeros stays."""
    return weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).tiny)


def rbf_kernels(rows: Tensor) -> Tensor:
    """`sum_k exp(-d^2 / b_k)` between rows `(n, D)`, `(n, n)`; b_k are `WIDTHS` times the mean d^2 of all pairs.

    The widths have no gradient.
    """
    # By differences: products would leave an image at a distance from itself, and from its like.
    squared = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    pairs = len(rows) * (len(rows) - 1)
    width = (squared.detach().sum() / pairs).clamp(min=torch.finfo(rows.dtype).eps ** 2)
    return torch.stack([torch.exp(-squared / (share * width)) for share in WIDTHS]).sum(0)


def ramp_after(step: int) -> float:
    """The discrepancy's weight after `step` steps: `2 / (1 + e^-p) - 1`, `p = min(step / 1000, 1)`; at most 0.462."""
    return 2 / (1 + math.exp(-min(step / RAMP_STEPS, 1))) - 1
