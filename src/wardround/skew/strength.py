"""How strong each kind of skew is, from the figures of `skew.json`: little, some or strong, against fixed thresholds.

The thresholds are rules of thumb. Where a reason from theory is lacking they were read off phantoms, whose skew is
known (`wardround.data.phantoms`: four sites of 200 images, features of a pretrained EfficientNet-Lite0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

Kind = Literal["feature", "label", "quantity", "concept"]
Level = Literal["strong", "some", "little", "unknown"]
Matrix = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Scale:
    """The values of a figure from which a kind of skew is called `some`, and from which `strong`."""

    some: float
    strong: float

    def level(self, value: float | None) -> Level:
        """What `value` is on this scale; `unknown` where there is none."""
        if value is None:
            return "unknown"
        return "strong" if value >= self.strong else "some" if value >= self.some else "little"


# MMD at equal labels, mean over pairs. Phantoms: 0.04 without feature skew, 0.12, 0.24 and 0.41 at dials of 0.25, 0.5
# and 1.
FEATURE = Scale(some=0.1, strong=0.2)
# Jensen-Shannon divergence in bits beyond chance, mean over pairs. Of two classes, 50:50 is 0.03 from 70:30 and 0.1
# from 85:15. Phantoms: 0.08 and 0.57 at dials of 0.25 and 1.
LABEL = Scale(some=0.03, strong=0.1)
# Images of the largest client over those of the smallest. Averages count images, so at 10 the smallest client has a
# tenth of the largest one's say, and takes a tenth of its steps.
QUANTITY = Scale(some=3, strong=10)
# Share of images on which two clients' class means disagree, beyond that of halves of one client; mean over pairs.
# Phantoms: 0.09 without any skew and 0.12 at the largest feature skew, both by accident; about 0.2 at dials of 0.25 and
# 0.5, and 0.48 at 1.
CONCEPT = Scale(some=0.15, strong=0.3)

SIGNIFICANT = 0.05  # p-value of the two-sample test below which a pair of clients differs at all
FEW_PER_CLASS = 20  # a class mean over 20 images is off by a fifth to a quarter of the spread within the class


@dataclass(frozen=True)
class Strength:
    """One kind of skew as it was measured.

    Attributes:
        value: what was compared with `scale`; None where nothing could be measured.
        why: the figures behind the level, a clause.
    """

    kind: Kind
    level: Level
    value: float | None
    scale: Scale
    why: str


def strengths(skew: Mapping[str, Any]) -> list[Strength]:
    """How strong each kind of skew is, in the order feature, label, quantity, concept.

    Args:
        skew: the content of `skew.json`.
    """
    return [_feature(skew["feature"]), _label(skew["label"]), _quantity(skew["quantity"]), _concept(skew["concept"])]


def tiny_clients(skew: Mapping[str, Any]) -> list[str]:
    """Clients with images, but fewer than `FEW_PER_CLASS` for each class that they have."""
    counts = zip(skew["clients"], skew["label"]["counts"], strict=True)
    return [name for name, row in counts if 0 < sum(row) < FEW_PER_CLASS * sum(n > 0 for n in row)]


def _feature(feature: Mapping[str, Any]) -> Strength:
    """The distance at equal labels; little where the test finds no difference for most pairs."""
    value = _mean(_pairs(feature["same_labels"]))
    p_values = _pairs(feature["p_values"])
    # Few permutations cannot give a small p-value; the smallest that they can give then counts as significant.
    limit = max(SIGNIFICANT, 1 / (1 + feature["permutations"]))
    differing = sum(p <= limit for p in p_values)
    why = f"features differ for {differing} of {len(p_values)} pairs of clients (p at most {limit:.2g})"
    if value is None:
        return Strength("feature", "unknown", None, FEATURE, f"no two clients share a class to compare; {why}")
    level = FEATURE.level(value) if 2 * differing >= len(p_values) else "little"
    return Strength("feature", level, value, FEATURE, f"mean MMD at equal labels {value:.2f}; {why}")


def _label(label: Mapping[str, Any]) -> Strength:
    """The divergence of the clients' labels, less what chance gives so few images."""
    beyond = np.array(label["jensen_shannon"], dtype=np.float64) - label_chance(np.array(label["counts"]))
    value = _mean([max(pair, 0.0) for pair in _pairs(beyond.tolist())])
    if value is None:
        return Strength("label", "unknown", None, LABEL, "fewer than two clients have images")
    absent = sum(map(bool, label["absent"]))
    missing = f"; {absent} of {len(label['absent'])} clients lack a class" if absent else ""
    why = f"mean Jensen-Shannon divergence beyond chance {value:.3f} bits{missing}"
    return Strength("label", LABEL.level(value), value, LABEL, why)


def label_chance(counts: np.ndarray) -> np.ndarray:
    """Expected divergence in bits `(K, K)` of two samples of one label distribution, from counts `(K, C)`.

    JS(p, q) is about sum_c (p_c - q_c)^2 / (8 ln 2 m_c) near p = q = m, and the variance of p_c - q_c is
    m_c (1 - m_c) (1/n + 1/n'), which sums to (C - 1) (1/n + 1/n') / (8 ln 2). NaN for a client without images.
    """
    totals = counts.sum(axis=1).astype(np.float64)
    inverse = np.divide(1.0, totals, out=np.full_like(totals, np.nan), where=totals > 0)
    present = int((counts.sum(axis=0) > 0).sum())
    return np.asarray((present - 1) * (inverse[:, None] + inverse[None, :]) / (8 * np.log(2)))


def _quantity(quantity: Mapping[str, Any]) -> Strength:
    """The ratio of the largest to the smallest client."""
    images = [n for n in quantity["images"] if n]
    if len(images) < 2:
        return Strength("quantity", "unknown", None, QUANTITY, "fewer than two clients have images")
    ratio = max(images) / min(images)
    why = (
        f"the largest client has {ratio:.1f} times the images of the smallest; all are as uneven as "
        f"{quantity['effective_clients']:.1f} equal clients of {len(images)}"
    )
    return Strength("quantity", QUANTITY.level(ratio), ratio, QUANTITY, why)


def _concept(concept: Mapping[str, Any]) -> Strength:
    """Disagreement between clients beyond the mean of their own halves'."""
    matrix = concept["disagreement"]
    value = _mean(
        [excess for i, j in combinations(range(len(matrix)), 2) if (excess := _beyond(matrix, i, j)) is not None]
    )
    if value is None:
        return Strength("concept", "unknown", None, CONCEPT, "no two clients share two classes to compare")
    why = f"share of images on which class means disagree, beyond that of halves of one client: {value:+.2f}"
    return Strength("concept", CONCEPT.level(value), value, CONCEPT, why)


def _beyond(matrix: Matrix, i: int, j: int) -> float | None:
    """Entry (i, j) less the mean of the diagonal entries of i and j; None where one of them is missing."""
    between, one, other = matrix[i][j], matrix[i][i], matrix[j][j]
    return None if between is None or one is None or other is None else between - (one + other) / 2


def _pairs(matrix: Matrix) -> list[float]:
    """The known entries above the diagonal."""
    values = (matrix[i][j] for i, j in combinations(range(len(matrix)), 2))
    return [value for value in values if value is not None and value == value]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
