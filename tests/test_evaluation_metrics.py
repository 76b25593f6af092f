"""Metrics against hand-computed values and against scikit-learn and torchmetrics."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.evaluation.metrics import (
    auroc,
    calibration_error,
    evaluate_probabilities,
    from_confusion,
    merge_confusions,
    reliability,
    softmax,
)


def random_case(seed: int, n: int, classes: int, levels: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random probabilities and labels; `levels` > 0 makes ties by rounding to that many steps."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes), n)
    if levels:
        p = np.round(p * levels) + 1
        p /= p.sum(axis=1, keepdims=True)
    return p, rng.integers(0, classes, n)


def test_by_hand() -> None:
    """Five images, three classes, one of which (2) is absent and yet predicted once."""
    p = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1], [0.6, 0.3, 0.1]])
    found = evaluate_probabilities(p, np.array([0, 0, 0, 1, 1]))
    assert found["n"] == 5
    assert found["support"] == [3, 2, 0]
    assert found["confusion"] == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert found["accuracy"] == pytest.approx(2 / 5)
    assert found["balanced_accuracy"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    # F1 = 2 TP / (images + predictions): class 0 is 2/(3+2), class 1 is 2/(2+2).
    assert found["macro_f1"] == pytest.approx((2 / 5 + 2 / 4) / 2)
    # Class 0: .8 .2 .1 against .3 .6, 2 of 6 pairs in order. Class 1: .6 .3 against .1 .7 .2, 4 of 6.
    assert found["auroc"] == pytest.approx((2 / 6 + 4 / 6) / 2)
    # Bins of 1/15: .8 (right) alone; .7 (wrong, wrong) share one; .6 (right, wrong) share one.
    assert found["ece"] == pytest.approx((0.2 + 1.4 + 0.2) / 5)


def test_empty_split_is_none_throughout() -> None:
    found = evaluate_probabilities(np.zeros((0, 3)), np.zeros(0, dtype=int))
    figures = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece")
    assert [found[name] for name in figures] == [None] * 5  # type: ignore[literal-required]
    assert (found["n"], found["support"], found["confusion"]) == (0, [0, 0, 0], [[0] * 3] * 3)


def test_one_class_has_recall_but_no_auroc() -> None:
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]])
    found = evaluate_probabilities(p, np.zeros(3, dtype=int))
    assert found["balanced_accuracy"] == pytest.approx(2 / 3)
    assert found["macro_f1"] == pytest.approx(2 * 2 / (3 + 2))
    assert found["auroc"] is None


def test_batch_of_one() -> None:
    found = evaluate_probabilities(np.array([[0.25, 0.75]]), np.array([1]))
    assert found["balanced_accuracy"] == 1.0
    assert found["auroc"] is None
    assert found["ece"] == pytest.approx(0.25)


def test_diverged_model_gives_none_and_no_nan() -> None:
    """NaN logits: NaN loses the argmax, ranking and calibration are undefined, and JSON accepts the rest."""
    p = softmax(np.array([[np.nan, np.nan], [0.0, 3.0], [np.inf, 1.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evaluate_probabilities(p, np.array([0, 1, 1]))
    assert found["auroc"] is None
    assert found["ece"] is None
    assert found["confusion"] == [[1, 0], [1, 1]]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0]])
def test_labels_that_do_not_fit_raise(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"labels"):
        evaluate_probabilities(np.full((2, 3), 1 / 3), np.array(labels))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 60), st.integers(2, 6), st.sampled_from([0, 3]))
def test_agrees_with_scikit_learn(seed: int, n: int, classes: int, levels: int) -> None:
    from sklearn import metrics as sk

    p, y = random_case(seed, n, classes, levels)
    predicted, present = p.argmax(axis=1), np.unique(y)
    found = evaluate_probabilities(p, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, predicted))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, predicted))
    f1 = sk.f1_score(y, predicted, labels=present, average="macro", zero_division=0)
    assert found["macro_f1"] == pytest.approx(f1)
    assert found["confusion"] == sk.confusion_matrix(y, predicted, labels=range(classes)).tolist()
    if len(present) > 1:
        areas = [sk.roc_auc_score(y == c, p[:, c]) for c in present]
        assert found["auroc"] == pytest.approx(np.mean(areas))


@pytest.mark.parametrize("seed", range(5))
def test_calibration_agrees_with_torchmetrics(seed: int) -> None:
    torch = pytest.importorskip("torch")
    from torchmetrics.functional.classification import multiclass_calibration_error

    p, y = random_case(seed, 400, 4)
    p = p**3 / (p**3).sum(axis=1, keepdims=True)
    expected = multiclass_calibration_error(torch.tensor(p), torch.tensor(y), 4, n_bins=15, norm="l1")
    assert calibration_error(p, y) == pytest.approx(float(expected), abs=1e-6)


def test_certain_and_right_is_calibrated() -> None:
    """Confidence 1 belongs to the last bin rather than past the end."""
    p = np.eye(3)[[0, 1, 2]]
    assert calibration_error(p, np.array([0, 1, 2])) == 0.0
    assert calibration_error(p, np.array([1, 2, 0])) == 1.0
    # Wrong at 1 and right at .96 share the bin, so that their gaps of -1 and +.04 partly cancel.
    mixed = np.array([[1.0, 0.0], [0.96, 0.04]])
    assert calibration_error(mixed, np.array([1, 0])) == pytest.approx(0.96 / 2)


def test_constant_scores_have_area_one_half() -> None:
    assert auroc(np.full((6, 2), 0.5), np.array([0, 0, 0, 0, 1, 1])) == 0.5


def test_merged_confusion_pools_images() -> None:
    """Pooled recall differs from the mean of recalls when clients differ in size."""
    a, b = [[1, 0], [0, 1]], [[0, 3], [0, 1]]
    merged = merge_confusions([a, b])
    assert merged == [[1, 3], [0, 2]]
    pooled = from_confusion(merged)
    assert pooled["accuracy"] == pytest.approx(3 / 6)
    assert pooled["balanced_accuracy"] == pytest.approx((1 / 4 + 1) / 2)
    assert pooled["macro_f1"] == pytest.approx((2 / (4 + 1) + 4 / (2 + 5)) / 2)
    assert merge_confusions([]) == []
    assert from_confusion([])["accuracy"] is None


def test_softmax_is_stable_and_shift_invariant() -> None:
    logits = np.array([[1000.0, 1000.0 + np.log(3)], [-1000.0, -1000.0]])
    assert softmax(logits) == pytest.approx(np.array([[0.25, 0.75], [0.5, 0.5]]))
    assert softmax(np.zeros((0, 4))).shape == (0, 4)


def test_reliability_counts_every_answer_once_in_the_bin_of_its_confidence() -> None:
    probabilities = np.array([[0.95, 0.05], [0.3, 0.7], [0.6, 0.4], [1.0, 0.0]])
    images, right, confidence = reliability(probabilities, np.array([0, 0, 0, 1]), bins=10)
    assert np.flatnonzero(images).tolist() == [6, 7, 9]
    assert images[[6, 7, 9]].tolist() == [1, 1, 2]
    assert right[[6, 7, 9]].tolist() == [1, 0, 1]
    np.testing.assert_allclose(confidence[[6, 7, 9]], [0.6, 0.7, 1.95])
