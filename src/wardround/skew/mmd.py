"""Maximum mean discrepancy: how far apart two sets of features are as distributions.

The kernel is a mean of Gaussians of several widths around the median distance,

    k(x, y) = mean_s exp(-s gamma_0 ||x - y||^2),  s in {1/4, 1/2, 1, 2, 4},  gamma_0 = 1 / median ||x - y||^2

and MMD^2(X, Y) = mean k(x, x') + mean k(y, y') - 2 mean k(x, y) (Gretton et al., JMLR 2012). The *biased*
estimate averages over all pairs, x = x' included; the *unbiased* one leaves those out and can be negative.

The biased estimate's square root with one bandwidth for all pairs is the distance between mean embeddings in
one Hilbert space, hence a pseudo-metric. Squared, unbiased or with a bandwidth for each pair it need not obey
the triangle inequality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wardround.seeds import numpy_stream

Floats = NDArray[np.float64]
Features = NDArray[np.floating]
Estimator = Literal["biased", "unbiased"]
Bandwidth = Literal["global", "pair"]

WIDEST, SCALES = 0.25, 5  # s = 1/4, 1/2, 1, 2, 4: each twice the one before
MEDIAN_ROWS = 2000  # rows that the global median is taken over: its 2 million distances take 32 MB


def squared_distances(x: Features, y: Features) -> Floats:
    """`||x_i - y_j||^2`, shape `(N, M)`, from features `(N, d)` and `(M, d)`."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    # Distances do not change with the origin; one near the data keeps the differences below exact.
    origin = a.mean(axis=0)
    a, b = a - origin, b - origin
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.asarray(np.maximum(squares, 0.0))


def pooled_distances(x: Features, y: Features) -> Floats:
    """Squared distances within and between two sets, `(N + M, N + M)`, with an exact zero diagonal."""
    pool = np.concatenate([x, y])
    distances = squared_distances(pool, pool)
    np.fill_diagonal(distances, 0.0)
    return distances


def median_gamma(distances: Floats) -> float:
    """gamma_0 = 1 / median of the squared distances `(N, N)` between different rows.

    Where more than half of them are zero (many copies of one image) the mean stands in for the median; where
    all are, every bandwidth gives the same kernel and 1 is returned.
    """
    between = distances[np.triu_indices(len(distances), 1)]
    if not between.any():
        return 1.0
    return float(1.0 / (np.median(between) or between.mean()))


def global_gamma(features: Sequence[Features]) -> float:
    """gamma_0 over all rows of all sets; above `MEDIAN_ROWS`, evenly spaced rows stand for the rest."""
    pool = np.concatenate(list(features))
    rows = np.linspace(0, len(pool) - 1, min(len(pool), MEDIAN_ROWS)).round().astype(np.int64)
    return median_gamma(squared_distances(pool[rows], pool[rows]))


def kernel(distances: Floats, gamma: float) -> Floats:
    """mean_s exp(-s gamma d), element by element, from squared distances."""
    term = np.exp(-WIDEST * gamma * distances)
    total = term.copy()
    for _ in range(SCALES - 1):
        term *= term  # exp(-2 s gamma d) = exp(-s gamma d)^2: one exponential serves all scales
        total += term
    return np.asarray(total / SCALES)


def mmd_squared(gram: Floats, n: int, estimator: Estimator = "biased") -> float:
    """MMD^2 between the first `n` rows and the rest, from the kernel matrix `(N + M, N + M)` of both.

    The unbiased estimate needs two rows on each side and is NaN without them.
    """
    m = len(gram) - n
    within_x, within_y, between = gram[:n, :n], gram[n:, n:], gram[:n, n:]
    if estimator == "biased":
        return float(within_x.mean() + within_y.mean() - 2 * between.mean())
    if min(n, m) < 2:
        return float("nan")
    off_x = (within_x.sum() - np.trace(within_x)) / (n * (n - 1))
    off_y = (within_y.sum() - np.trace(within_y)) / (m * (m - 1))
    return float(off_x + off_y - 2 * between.mean())


@dataclass(frozen=True)
class Variant:
    """One way to estimate the MMD. The default is the pseudo-metric.

    Attributes:
        estimator: `biased` or `unbiased`.
        squared: MMD^2, or its root (0 where an unbiased square is negative).
        bandwidth: one gamma_0 for all pairs (`global`), or one for each pair.
    """

    estimator: Estimator = "biased"
    squared: bool = False
    bandwidth: Bandwidth = "global"

    @property
    def label(self) -> str:
        """Such as `biased, root, global bandwidth`."""
        return f"{self.estimator}, {'squared' if self.squared else 'root'}, {self.bandwidth} bandwidth"

    def value(self, gram: Floats, n: int) -> float:
        """The estimate from a kernel matrix whose first `n` rows are one side."""
        square = mmd_squared(gram, n, self.estimator)
        return square if self.squared else float(np.sqrt(max(square, 0.0)) if square == square else square)


VARIANTS = tuple(
    Variant(estimator, squared, bandwidth)
    for estimator in ("biased", "unbiased")
    for squared in (False, True)
    for bandwidth in ("global", "pair")
)


def mmd_matrix(
    features: Mapping[str, Features],
    *,
    estimator: Estimator = "biased",
    squared: bool = False,
    bandwidth: Bandwidth = "global",
) -> Floats:
    """MMD between all pairs of K sets of features `(N_k, d)`: symmetric `(K, K)`, zero diagonal.

    A set without rows has NaN in its row and column.
    """
    variant = Variant(estimator, squared, bandwidth)
    return mmd_matrices(features, (variant,))[variant]


def mmd_matrices(features: Mapping[str, Features], variants: Sequence[Variant] = VARIANTS) -> dict[Variant, Floats]:
    """The matrix `(K, K)` of each variant, with the distances of each pair computed once."""
    sets = list(features.values())
    usable = [k for k, rows in enumerate(sets) if len(rows)]
    found = {variant: np.full((len(sets), len(sets)), np.nan) for variant in variants}
    shared = global_gamma([sets[k] for k in usable]) if usable else 1.0
    for i in usable:
        for j in (j for j in usable if j > i):
            for variant, value in _pair(sets[i], sets[j], shared, variants).items():
                found[variant][i, j] = found[variant][j, i] = value
    for matrix in found.values():
        matrix[usable, usable] = 0.0
    return found


def _pair(x: Features, y: Features, shared: float, variants: Sequence[Variant]) -> dict[Variant, float]:
    """The estimate of each variant for one pair of sets."""
    distances = pooled_distances(x, y)
    gammas = {"global": shared, "pair": median_gamma(distances)}
    grams = {name: kernel(distances, gammas[name]) for name in {variant.bandwidth for variant in variants}}
    return {variant: variant.value(grams[variant.bandwidth], len(x)) for variant in variants}


def permutation_p_value(x: Features, y: Features, permutations: int = 500, seed: int = 0, *, client: str = "") -> float:
    """Two-sample test of "x and y come from one distribution".

    p = (1 + #{permuted >= observed}) / (1 + permutations). The statistic is the biased MMD^2 with the pair's
    own median bandwidth, from one kernel matrix: with weights z = 1/N on the rows that play x and -1/M on the
    others it is z' K z. The test takes images as independent; where several show one patient, its p-value is
    too small.

    Args:
        x: `(N, d)`.
        y: `(M, d)`.
        permutations: how many; the p-value is never below 1 / (1 + permutations).
        seed: of the permutations.
        client: a further key of the random stream, to give each pair of clients its own.
    """
    distances = pooled_distances(x, y)
    gram = kernel(distances, median_gamma(distances))
    signs = np.concatenate([np.full(len(x), 1 / len(x)), np.full(len(y), -1 / len(y))])
    rng = numpy_stream(seed, "mmd-permutations", client=client)
    shuffled = rng.permuted(np.tile(signs, (permutations, 1)), axis=1)
    drawn = np.einsum("pn,pn->p", shuffled @ gram, shuffled)
    # Permutations that only swap equal rows give the observed value up to rounding; they count as ties.
    return float((1 + (drawn >= signs @ gram @ signs - 1e-12).sum()) / (1 + permutations))


def triangle_violations(matrix: Floats, tolerance: float = 1e-6) -> int:
    """Ordered triples (i, j, k) of different sets with d(i, k) > d(i, j) + d(j, k) + tolerance.

    A triple with a NaN never counts. The root turns a rounding error of 1e-15 into 3e-8, hence the tolerance.
    """
    different = ~np.eye(len(matrix), dtype=bool)
    # With i = j or j = k the two sides are equal, as the diagonal is zero; only i = k has to be kept out.
    detours = (matrix[:, j, None] + matrix[None, j, :] for j in range(len(matrix)))
    return sum(int(((matrix > detour + tolerance) & different).sum()) for detour in detours)
