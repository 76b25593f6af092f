"""Classification metrics of one model on one split, over the classes that the split contains.

scikit-learn computes them; what is ours is what it leaves open: empty splits, absent classes, models that diverged.
The calibration error, which it does not have, is held to torchmetrics' values by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import numpy as np
import scipy.special
import sklearn.metrics
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Confusion = Sequence[Sequence[int]] | Ints

CALIBRATION_BINS = 15


class ConfusionMetrics(TypedDict):
    """What a confusion matrix alone can tell. `None` where a figure is undefined (no image)."""

    n: int
    accuracy: float | None
    balanced_accuracy: float | None
    macro_f1: float | None
    support: list[int]
    confusion: list[list[int]]


class Metrics(ConfusionMetrics):
    """`ConfusionMetrics` and the two figures that need probabilities."""

    auroc: float | None
    ece: float | None


def softmax(logits: NDArray[Any]) -> Floats:
    """Probabilities `(N, C)` from logits `(N, C)`, in float64; a row that holds NaN or +inf becomes NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray(scipy.special.softmax(np.asarray(logits, dtype=np.float64), axis=1))


def evaluate_probabilities(probabilities: NDArray[Any], labels: NDArray[Any]) -> Metrics:
    """All metrics of one model on one split.

    Args:
        probabilities: `(N, C)`, rows that sum to 1. Where a value is not finite (a model that diverged), it
            never wins the argmax, and the AUROC and the calibration error are `None`.
        labels: `(N,)`, integers in `[0, C)`.

    Raises:
        ValueError: the shapes do not match or a label is out of range.
    """
    p, y = _checked(probabilities, labels)
    ranked = np.where(np.isfinite(p), p, -np.inf)
    usable = len(y) > 0 and bool(np.isfinite(p).all())
    counts = from_confusion(confusion_matrix(y, predicted_classes(ranked), p.shape[1]))
    return {
        **counts,
        "auroc": auroc(p, y) if usable else None,
        "ece": calibration_error(p, y) if usable else None,
    }


def _checked(probabilities: NDArray[Any], labels: NDArray[Any]) -> tuple[Floats, Ints]:
    """The two arrays in their working types; ValueError where they do not belong together."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise ValueError(f"expected (N, C) probabilities and (N,) labels, found {p.shape} and {y.shape}")
    if len(y) and not 0 <= y.min() <= y.max() < p.shape[1]:
        raise ValueError(f"labels must lie in [0, {p.shape[1]}), found {y.min()} to {y.max()}")
    return p, y


def predicted_classes(scores: NDArray[Any]) -> Ints:
    """The class of the highest score in each row of `(N, C)`; NaN loses, and the lower index wins a tie."""
    if not len(scores):
        return np.zeros(0, dtype=np.int64)
    best: Ints = np.where(np.isnan(scores), -np.inf, scores).argmax(axis=1).astype(np.int64)
    return best


def confusion_matrix(labels: Ints, predicted: Ints, classes: int) -> Ints:
    """Counts `(C, C)`: row = true class, column = predicted class."""
    if not len(labels):
        return np.zeros((classes, classes), dtype=np.int64)
    counts = sklearn.metrics.confusion_matrix(labels, predicted, labels=np.arange(classes))
    return np.asarray(counts, dtype=np.int64)


def from_confusion(confusion: Confusion) -> ConfusionMetrics:
    """Accuracy, and recall and F1 averaged over the classes that have images, from counts `(C, C)`.

    Each cell stands for as many images as it counts, so that pooled matrices are judged like single ones.
    """
    counts = np.asarray(confusion, dtype=np.int64).reshape(len(confusion), len(confusion))
    support, n = counts.sum(axis=1), int(counts.sum())
    figures: dict[str, float | None] = {"accuracy": None, "balanced_accuracy": None, "macro_f1": None}
    if n:
        true, predicted = np.indices(counts.shape).reshape(2, -1)
        weights, present = counts.ravel(), np.flatnonzero(support)
        over = {"labels": present, "average": "macro", "sample_weight": weights, "zero_division": 0.0}
        figures = {
            "accuracy": float(sklearn.metrics.accuracy_score(true, predicted, sample_weight=weights)),
            "balanced_accuracy": float(sklearn.metrics.recall_score(true, predicted, **over)),
            "macro_f1": float(sklearn.metrics.f1_score(true, predicted, **over)),
        }
    return {"n": n, **figures, "support": support.tolist(), "confusion": counts.tolist()}  # type: ignore[typeddict-item]


def merge_confusions(confusions: Iterable[Confusion]) -> list[list[int]]:
    """The sum of confusion matrices `(C, C)`: that of all images in one pool. `[]` where there is none."""
    matrices = [np.asarray(matrix, dtype=np.int64) for matrix in confusions]
    return [[int(cell) for cell in row] for row in np.sum(matrices, axis=0)] if matrices else []


def auroc(probabilities: Floats, labels: Ints) -> float | None:
    """Area under the ROC curve, one class against the rest, averaged over the classes present.

    `None` where fewer than two classes are present, as then no class has negatives.
    """
    present = np.unique(labels)
    if len(present) < 2:
        return None
    return float(np.mean([sklearn.metrics.roc_auc_score(labels == c, probabilities[:, c]) for c in present]))


def calibration_error(probabilities: Floats, labels: Ints, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error (L1) of the top class, over equal-width bins of confidence.

    ECE = sum_b (n_b / N) |accuracy_b - confidence_b| (Guo et al., ICML 2017); a confidence of 1 falls in the
    last bin. N must be at least 1.
    """
    images, right, confidence = reliability(probabilities, labels, bins)
    return float(np.abs(right - confidence).sum() / images.sum())


def reliability(probabilities: Floats, labels: Ints, bins: int = CALIBRATION_BINS) -> tuple[Floats, Floats, Floats]:
    """Per equal-width bin of the top class's confidence: images, right ones, sum of confidences; each `(bins,)`."""
    confidence = probabilities.max(axis=1)
    right = (probabilities.argmax(axis=1) == labels).astype(np.float64)
    place = np.clip((confidence * bins).astype(np.int64), 0, bins - 1)
    images, hits, sums = (
        np.bincount(place, weights, bins).astype(np.float64) for weights in (np.ones_like(right), right, confidence)
    )
    return images, hits, sums
