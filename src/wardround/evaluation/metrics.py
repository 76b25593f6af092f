"""Classification metrics of one model on one split, over the classes that the split contains.

They are computed for every client, model and split of every round, so they are a few array expressions that
import nothing but NumPy. Tests hold them to scikit-learn's and torchmetrics' values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import numpy as np
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
    values = np.asarray(logits, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        powers = np.exp(values - values.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


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
    cells = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes).astype(np.int64)


def from_confusion(confusion: Confusion) -> ConfusionMetrics:
    """Accuracy, and recall and F1 averaged over the classes that have images, from counts `(C, C)`.

    Balanced accuracy = mean_c TP_c / n_c and macro F1 = mean_c 2 TP_c / (n_c + predicted_c), over the classes
    c with n_c > 0.
    """
    counts = np.asarray(confusion, dtype=np.int64).reshape(len(confusion), len(confusion))
    support, hits = counts.sum(axis=1), np.diagonal(counts)
    there = support > 0
    n, predicted = int(support.sum()), counts.sum(axis=0)
    recall = hits[there] / support[there]
    f1 = 2 * hits[there] / (support + predicted)[there]
    return {
        "n": n,
        "accuracy": float(hits.sum() / n) if n else None,
        "balanced_accuracy": float(recall.mean()) if n else None,
        "macro_f1": float(f1.mean()) if n else None,
        "support": support.tolist(),
        "confusion": counts.tolist(),
    }


def merge_confusions(confusions: Iterable[Confusion]) -> list[list[int]]:
    """The sum of confusion matrices `(C, C)`: that of all images in one pool. `[]` where there is none."""
    matrices = [np.asarray(matrix, dtype=np.int64) for matrix in confusions]
    return [[int(cell) for cell in row] for row in np.sum(matrices, axis=0)] if matrices else []


def auroc(probabilities: Floats, labels: Ints) -> float | None:
    """Area under the ROC curve, one class against the rest, averaged over the classes present.

    For one class it is P(a positive scores above a negative) + 1/2 P(they tie). `None` where fewer than two
    classes are present, as then no class has negatives.
    """
    present = np.unique(labels)
    if len(present) < 2:
        return None
    areas = [_area(probabilities[labels == c, c], probabilities[labels != c, c]) for c in present]
    return float(np.mean(areas))


def _area(positives: Floats, negatives: Floats) -> float:
    """The share of (positive, negative) pairs in the right order, ties counted as one half."""
    ordered = np.sort(negatives)
    twice = np.searchsorted(ordered, positives, "left") + np.searchsorted(ordered, positives, "right")
    return float(twice.mean() / (2 * len(negatives)))


def calibration_error(probabilities: Floats, labels: Ints, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error (L1) of the top class, over equal-width bins of confidence.

    ECE = sum_b (n_b / N) |accuracy_b - confidence_b| (Guo et al., ICML 2017); a confidence of 1 falls in the
    last bin. N must be at least 1.
    """
    confidence = probabilities.max(axis=1)
    gap = (probabilities.argmax(axis=1) == labels) - confidence
    place = np.clip((confidence * bins).astype(np.int64), 0, bins - 1)
    return float(np.abs(np.bincount(place, weights=gap)).sum() / len(labels))
