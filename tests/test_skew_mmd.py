"""MMD against a brute-force double loop, its pseudo-metric, and the permutation test under null and shift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.skew.mmd import (
    MEDIAN_ROWS,
    VARIANTS,
    Bandwidth,
    Estimator,
    Variant,
    global_gamma,
    kernel,
    median_gamma,
    mmd_matrices,
    mmd_matrix,
    mmd_squared,
    permutation_p_value,
    pooled_distances,
    squared_distances,
    triangle_violations,
)


def loop_kernel(a: np.ndarray, b: np.ndarray, gamma: float) -> float:
    """The kernel of one pair of rows, written out."""
    distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
    return sum(math.exp(-s * gamma * distance) for s in (0.25, 0.5, 1, 2, 4)) / 5


def loop_gamma(pool: np.ndarray) -> float:
    """1 / median squared distance between different rows, by a loop."""
    distances = [
        sum((p - q) ** 2 for p, q in zip(pool[i], pool[j], strict=True))
        for i in range(len(pool))
        for j in range(len(pool))
        if i != j
    ]
    return 1 / float(np.median(distances))


def loop_mmd(x: np.ndarray, y: np.ndarray, gamma: float, estimator: Estimator) -> float:
    """MMD^2 by double loops."""

    def mean(a: np.ndarray, b: np.ndarray, skip: bool) -> float:
        values = [loop_kernel(p, q, gamma) for i, p in enumerate(a) for j, q in enumerate(b) if not (skip and i == j)]
        return sum(values) / len(values)

    skip = estimator == "unbiased"
    return mean(x, x, skip) + mean(y, y, skip) - 2 * mean(x, y, False)


def sets(seed: int, sizes: tuple[int, ...] = (7, 5, 9), width: int = 3) -> dict[str, np.ndarray]:
    """Random sets of features with different means."""
    rng = np.random.default_rng(seed)
    return {f"c{i}": rng.normal(rng.normal(), 1, (n, width)) for i, n in enumerate(sizes)}


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
@pytest.mark.parametrize("bandwidth", ["global", "pair"])
@pytest.mark.parametrize("squared", [True, False])
def test_matrix_equals_the_double_loop(estimator: Estimator, bandwidth: Bandwidth, squared: bool) -> None:
    features = sets(0)
    found = mmd_matrix(features, estimator=estimator, squared=squared, bandwidth=bandwidth)
    rows = list(features.values())
    for i, x in enumerate(rows):
        for j, y in enumerate(rows):
            gamma = loop_gamma(np.concatenate(rows if bandwidth == "global" else [x, y]))
            square = 0.0 if i == j else loop_mmd(x, y, gamma, estimator)
            expected = square if squared else math.sqrt(max(square, 0))
            assert found[i, j] == pytest.approx(expected, abs=1e-12)


def test_two_points_by_hand() -> None:
    """One row a side at squared distance d: MMD^2 = 2 - 2 k, with gamma d = 1."""
    x, y = np.array([[0.0, 0.0]]), np.array([[3.0, 4.0]])
    k = sum(math.exp(-s) for s in (0.25, 0.5, 1, 2, 4)) / 5
    assert pooled_distances(x, y)[0, 1] == pytest.approx(25.0)
    assert mmd_matrix({"x": x, "y": y}, squared=True)[0, 1] == pytest.approx(2 - 2 * k)


def test_unbiased_estimate_has_mean_zero_under_the_null() -> None:
    """Its mean over many draws is 0 within its error, where the biased one is well above."""
    rng = np.random.default_rng(0)
    found: dict[Estimator, list[float]] = {"biased": [], "unbiased": []}
    for _ in range(300):
        gram = kernel(pooled_distances(rng.normal(size=(15, 2)), rng.normal(size=(10, 2))), 0.3)
        for estimator, values in found.items():
            values.append(mmd_squared(gram, 15, estimator))
    unbiased, biased = np.array(found["unbiased"]), np.array(found["biased"])
    error = unbiased.std() / math.sqrt(300)
    assert abs(unbiased.mean()) < 3 * error
    assert biased.mean() > 10 * error


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 6), st.integers(1, 8), st.floats(0.0, 3.0))
def test_biased_root_with_one_bandwidth_is_a_pseudo_metric(seed: int, count: int, width: int, spread: float) -> None:
    """No triangle violation, symmetric, zero on the diagonal, whatever the sets (copies and single rows too)."""
    rng = np.random.default_rng(seed)
    features = {str(i): rng.normal(spread * i, 1, (rng.integers(1, 12), width)) for i in range(count)}
    features["copy"] = features["0"].copy()
    matrix = mmd_matrix(features)
    assert triangle_violations(matrix) == 0
    assert np.array_equal(matrix, matrix.T)
    assert matrix[0, -1] == pytest.approx(0, abs=1e-6)
    assert (matrix >= 0).all()


def test_other_variants_do_violate_the_triangle() -> None:
    """Three sets on a line: the square of the long side exceeds the sum of the short ones' squares."""
    rng = np.random.default_rng(1)
    features = {str(i): rng.normal(0.4 * i, 1, (200, 2)) for i in range(3)}
    found = {variant: triangle_violations(matrix) for variant, matrix in mmd_matrices(features).items()}
    assert found[Variant("biased", False, "global")] == 0
    assert found[Variant("biased", True, "global")] == 2
    assert found[Variant("unbiased", True, "global")] == 2
    assert len(found) == len(VARIANTS) == 8


def test_triangle_violations_by_hand() -> None:
    """d(0, 2) = 5 > 1 + 1: the ordered triples (0, 1, 2) and (2, 1, 0)."""
    matrix = np.array([[0, 1, 5.0], [1, 0, 1], [5, 1, 0]])
    assert triangle_violations(matrix) == 2
    assert triangle_violations(np.array([[0, 1, 2.0], [1, 0, 1], [2, 1, 0]])) == 0
    matrix[0, 1] = matrix[1, 0] = np.nan
    assert triangle_violations(matrix) == 0
    # A negative unbiased square makes a detour over a set and back "shorter" than 0; that is no triangle.
    assert triangle_violations(np.array([[0, -1.0], [-1, 0]])) == 0


def test_distances_survive_a_far_origin() -> None:
    """Features far from the origin keep their small differences."""
    x = 1e6 + np.array([[0.0, 0.0], [0.001, 0.0]])
    assert squared_distances(x, x)[0, 1] == pytest.approx(1e-6, rel=1e-4)


def test_median_bandwidth_leaves_self_distances_out() -> None:
    """Three points on a line: squared distances 1, 4, 9; with the diagonal the median would be 1."""
    points = np.array([[0.0], [1.0], [3.0]])
    assert median_gamma(squared_distances(points, points)) == pytest.approx(1 / 4)


def test_bandwidth_of_copies() -> None:
    """Mostly equal rows fall back on the mean distance; equal rows throughout on 1, and an MMD of 0."""
    rows = np.array([[0.0]] * 4 + [[2.0]])
    assert median_gamma(squared_distances(rows, rows)) == pytest.approx(10 / (4 * 4))
    assert mmd_matrix({"a": rows[:2], "b": rows[2:4]})[0, 1] == 0.0


def test_global_bandwidth_of_many_rows_is_close_to_that_of_all() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(MEDIAN_ROWS + 500, 2))
    everything = median_gamma(squared_distances(rows, rows))
    assert global_gamma([rows[:900], rows[900:]]) == pytest.approx(everything, rel=0.03)


def test_empty_and_single_sets() -> None:
    features = {**sets(0), "empty": np.zeros((0, 3)), "one": np.zeros((1, 3))}
    biased, unbiased = mmd_matrix(features), mmd_matrix(features, estimator="unbiased")
    assert np.isnan(biased[3]).all()
    assert np.isfinite(biased[4, [0, 1, 2, 4]]).all()
    assert np.isnan(unbiased[4, 0])
    assert np.isnan(mmd_matrix({"empty": np.zeros((0, 3))})).all()


def test_p_values_are_uniform_under_the_null() -> None:
    """Mean near 1/2, and rejections at 10 % near 10 %, over 200 pairs of equal distribution."""
    rng = np.random.default_rng(0)
    values = [permutation_p_value(rng.normal(size=(12, 2)), rng.normal(size=(18, 2)), 99, seed=i) for i in range(200)]
    assert np.mean(values) == pytest.approx(0.5, abs=0.07)
    assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=0.06)


def test_p_value_is_smallest_under_a_shift() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(1.5, 1, (30, 3))
    assert permutation_p_value(x, y, 199) == pytest.approx(1 / 200)


def test_p_value_by_enumeration() -> None:
    """Two rows a side, far apart: of the 6 assignments 2 reach the observed value, so p tends to 1/3."""
    x, y = np.array([[0.0], [0.1]]), np.array([[9.0], [9.1]])
    assert permutation_p_value(x, y, 3000) == pytest.approx(1 / 3, abs=0.03)


def test_p_value_of_equal_rows_is_one() -> None:
    rows = np.ones((6, 2))
    assert permutation_p_value(rows, rows, 50) == 1.0


def test_p_value_depends_on_its_key_only() -> None:
    features = sets(0, (30, 30))
    x, y = features.values()
    first = permutation_p_value(x, y, 200, seed=1, client="a|b")
    assert permutation_p_value(x, y, 200, seed=1, client="a|b") == first
    others = {permutation_p_value(x, x + 0.3, 200, seed=s) for s in range(5)}
    assert len(others) > 1
