"""How FDSE's server combines clients: the step on which they agree most, and averages among those who are alike."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from wardround.methods.stacks import Stack

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


def consensus_step(changes: Stack, lengths: Tensor) -> Tensor:
    """`mean_k |d_k| * sum_k lambda_k u_k` with `u_k = d_k / |d_k|` and lambda that minimises `|sum_k lambda_k u_k|^2`.

    A change of length 0 has no direction: it counts in the mean alone.

    Args:
        changes: d_k of one tensor at N clients, flat.
        lengths: their norms, `(N,)`.

    Returns:
        The step, flat; 0 where nobody moved.
    """
    norms, moving = lengths.double(), lengths > 0
    shares = torch.zeros(len(lengths), dtype=torch.float64)
    if moving.any():
        cosines = changes.gram()[moving][:, moving] / norms[moving].outer(norms[moving])
        shares[moving] = torch.from_numpy(simplex_weights(cosines.numpy())) / norms[moving]
    return changes.mixed(norms.mean() * shares[None])[0]


def similarity_averages(values: Stack, lengths: Tensor, tau: float) -> Tensor:
    """For each client j, `sum_k a_jk w_k` with `a_j = softmax_k(cos(w_j, w_k) / tau)`.

    Args:
        values: w_k, one tensor at N clients, flat.
        lengths: their norms, `(N,)`. A tensor of length 0 is like no other: its cosines are 0.
        tau: temperature; the larger, the nearer to the plain mean.

    Returns:
        The averages, flat, `(N, length)`.
    """
    norms = lengths.double().clamp(min=torch.finfo(torch.float32).tiny)
    return values.mixed(torch.softmax(values.gram() / norms.outer(norms) / tau, dim=1))
