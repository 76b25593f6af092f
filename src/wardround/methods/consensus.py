"""How FDSE's server combines clients: the step on which they agree most, and averages among those who are alike."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

ITERATIONS = 100  # of the active-set solver, for each client


def simplex_weights(gram: np.ndarray) -> np.ndarray:
    """`argmin lambda^T G lambda` over the simplex: `lambda >= 0`, `sum(lambda) = 1`; exact up to rounding.

    Least squares with `x >= 0` on `x^T G x + (sum(x) - 1)^2` has its minimum along the same lambda: for `x = s lambda`
    the best s leaves `q / (1 + q)` with `q = lambda^T G lambda`, which grows with q.

    Args:
        gram: inner products of N vectors, `(N, N)`.

    Returns:
        lambda, `(N,)`.
    """
    values, vectors = np.linalg.eigh(gram)
    root = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    system, goal = np.vstack([root, np.ones(len(gram))]), np.zeros(len(gram) + 1)
    goal[-1] = 1
    solution: np.ndarray = nnls(system, goal, maxiter=ITERATIONS * len(gram))[0]
    weights: np.ndarray = solution / solution.sum()
    return weights


def consensus_step(changes: Tensor, lengths: Tensor) -> Tensor:
    """`mean_k |d_k| * sum_k lambda_k u_k` with `u_k = d_k / |d_k|` and lambda that minimises `|sum_k lambda_k u_k|^2`.

    A change of length 0 has no direction: it counts in the mean alone.

    Args:
        changes: d_k of one tensor at N clients, `(N, ...)`.
        lengths: their norms, `(N,)`.

    Returns:
        The step, `(...)`; 0 where nobody moved.
    """
    moving = lengths > 0
    if not moving.any():
        return torch.zeros_like(changes[0])
    moved, norms = changes if moving.all() else changes[moving], lengths[moving].double()
    rows = moved.flatten(1)  # never divided by their norms: at many clients that would be a second copy of them all
    weights = simplex_weights(((rows @ rows.T).double() / norms.outer(norms)).numpy())
    step = (lengths.double().mean() * torch.from_numpy(weights) / norms).to(rows.dtype) @ rows
    return step.view_as(changes[0])


def similarity_averages(values: Tensor, lengths: Tensor, tau: float) -> list[Tensor]:
    """For each client j, `sum_k a_jk w_k` with `a_j = softmax_k(cos(w_j, w_k) / tau)`.

    Args:
        values: w_k, one tensor at N clients, `(N, ...)`.
        lengths: their norms, `(N,)`. A tensor of length 0 is like no other: its cosines are 0.
        tau: temperature; the larger, the nearer to the plain mean.

    Returns:
        N tensors `(...)`.
    """
    flat, norms = values.flatten(1), lengths.double().clamp(min=torch.finfo(torch.float32).tiny)
    weights = torch.softmax((flat @ flat.T).double() / norms.outer(norms) / tau, dim=1)
    averages = (weights.to(flat.dtype) @ flat).view_as(values)
    return [average.clone() for average in averages]
