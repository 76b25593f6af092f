"""Label and quantity skew, from the number of images that each client has of each class."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[Any]


def label_distribution(counts: Counts) -> Floats:
    """Share of each class at each client, `(K, C)` from counts `(K, C)`; NaN for a client without images."""
    values = np.asarray(counts, dtype=np.float64)
    totals = values.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(values, totals, out=np.full_like(values, np.nan), where=totals > 0))


def quantity_shares(counts: Counts) -> Floats:
    """Share of all images that each client holds, `(K,)`; all NaN where there is no image."""
    totals = np.asarray(counts, dtype=np.float64).sum(axis=1)
    whole = totals.sum()
    return totals / whole if whole > 0 else np.full_like(totals, np.nan)


def entropy(shares: Floats) -> Floats:
    """Shannon entropy in bits along the last axis, with 0 log 0 = 0."""
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(-(shares * logs).sum(axis=-1))


def effective_number(shares: Floats) -> Floats:
    """2^H along the last axis: the number of equally likely classes that would be as uncertain.

    It is C where all C classes are equally frequent and 1 where there is a single class; NaN stays NaN.
    """
    return np.asarray(2.0 ** entropy(shares))


def imbalance(counts: Counts) -> Floats:
    """The largest class over the smallest class present, `(K,)`; NaN for a client without images."""
    values = np.asarray(counts, dtype=np.float64)
    smallest = np.where(values > 0, values, np.inf).min(axis=1)
    largest = values.max(axis=1)
    return np.asarray(np.divide(largest, smallest, out=np.full_like(largest, np.nan), where=largest > 0))


def jensen_shannon_matrix(shares: Floats) -> Floats:
    """Jensen-Shannon divergence between the clients' label distributions, `(K, K)`, in bits.

    JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2: 0 for equal distributions, 1 for disjoint ones. NaN in the
    rows and columns of a client without images.
    """
    middle = entropy((shares[:, None, :] + shares[None, :, :]) / 2)
    own = entropy(shares)
    # Rounding can leave a divergence of equal distributions a hair below zero.
    return np.maximum(middle - (own[:, None] + own[None, :]) / 2, 0.0)
