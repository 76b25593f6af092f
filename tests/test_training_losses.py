"""Batches, class weights and task losses, against values worked out by hand or by another formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from wardround.training.batches import shuffled_batches
from wardround.training.losses import (
    balanced_softmax,
    class_weights,
    contrastive_loss,
    cross_entropy,
    focal_loss,
    task_loss,
    weight_cautions,
)
from wardround.training.options import TrainingOptions


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- batches


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 2**32))
def test_batches_visit_every_image_once(count: int, size: int, seed: int) -> None:
    batches = list(shuffled_batches(count, size, generator(seed)))
    assert sorted(torch.cat(batches).tolist() if batches else []) == list(range(count))
    assert all(1 <= len(batch) <= size + (size > 1) for batch in batches)
    if size > 1 and count > 1:
        assert all(len(batch) > 1 for batch in batches)


def test_a_lonely_last_image_joins_the_batch_before() -> None:
    assert [len(batch) for batch in shuffled_batches(9, 4, generator())] == [4, 5]
    assert [len(batch) for batch in shuffled_batches(10, 4, generator())] == [4, 4, 2]
    assert [len(batch) for batch in shuffled_batches(1, 4, generator())] == [1]


def test_batches_of_one_stay_batches_of_one() -> None:
    assert [len(batch) for batch in shuffled_batches(3, 1, generator())] == [1, 1, 1]


def test_the_generator_decides_the_order() -> None:
    first, again, other = (torch.cat(list(shuffled_batches(50, 8, generator(seed)))) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---- class weights


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1]),
        ("raw", [8 / 6, 8 / 2, 0]),
        ("balanced", [8 / (2 * 6), 8 / (2 * 2), 0]),
        ("mean1", [2 * (1 / 6) / (1 / 6 + 1 / 2), 2 * (1 / 2) / (1 / 6 + 1 / 2), 0]),
    ],
)
def test_class_weights_by_hand(kind: Any, expected: list[float]) -> None:
    """Six, two and no images: an absent class weighs 0, never N/0."""
    np.testing.assert_allclose(class_weights(torch.tensor([6, 2, 0]), kind), expected, rtol=1e-6)


def test_balanced_weights_average_to_one_over_the_images() -> None:
    counts = torch.tensor([930, 45, 23, 2])
    assert float((counts * class_weights(counts, "balanced")).sum() / counts.sum()) == pytest.approx(1)


def test_weights_agree_with_sklearn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat([0, 1, 3], [10, 3, 1])
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels)
    found = class_weights(torch.tensor([10, 3, 0, 1]), "balanced")
    np.testing.assert_allclose(found[[0, 1, 3]], expected, rtol=1e-6)


def test_weights_can_be_clipped_and_no_images_have_none() -> None:
    assert class_weights(torch.tensor([100, 1]), "raw", clip=5.0).tolist() == pytest.approx([1.01, 5])
    for kind in ("raw", "balanced", "mean1"):
        assert class_weights(torch.zeros(3, dtype=torch.int64), kind).tolist() == [0, 0, 0]  # type: ignore[arg-type]


def test_weights_live_where_the_counts_live() -> None:
    """`none` too: on a GPU, weights left on the processor would end the first step."""
    assert class_weights(torch.zeros(3, dtype=torch.int64, device="meta"), "none").device.type == "meta"


# ---- losses


def batch() -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(6, 3, generator=generator(), dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0, 0])


WEIGHTS = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_focal_loss_against_the_formula(gamma: float) -> None:
    logits, labels = batch()
    terms = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        p = math.exp(row[label]) / sum(map(math.exp, row))
        terms.append(-float(WEIGHTS[label]) * (1 - p) ** gamma * math.log(p))
    assert focal_loss(logits, labels, WEIGHTS, gamma).item() == pytest.approx(sum(terms) / 6)


def test_focal_loss_without_focus_is_cross_entropy() -> None:
    logits, labels = batch()
    torch.testing.assert_close(focal_loss(logits, labels, WEIGHTS, 0.0), cross_entropy(logits, labels, WEIGHTS))


def test_cross_entropy_is_a_plain_mean() -> None:
    """torch divides by the batch's own weights, which would undo them in a batch of one class."""
    logits, labels = batch()
    plain = functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, labels, WEIGHTS), (WEIGHTS[labels] * plain).sum() / 6)
    same = torch.zeros(6, dtype=torch.int64)
    assert cross_entropy(logits, same, WEIGHTS) == pytest.approx(0.5 * functional.cross_entropy(logits, same).item())


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("margin", [0.0, 20.0, 200.0, -200.0])
def test_focal_gradients_are_finite_however_sure_the_model(gamma: float, margin: float) -> None:
    """In float32 p = 1 is reached, where (1 - p)^gamma has an infinite slope for gamma < 1."""
    logits = torch.tensor([[margin, 0.0, 0.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0]), torch.ones(3), gamma)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


def test_balanced_softmax_against_the_formula() -> None:
    """p_y = n_y e^z_y / sum_c n_c e^z_c over the classes present."""
    logits, labels = batch()
    counts = torch.tensor([6, 3, 1])
    odds = counts * logits.exp()
    expected = -(odds.gather(1, labels[:, None])[:, 0] / odds.sum(1)).log().mean()
    torch.testing.assert_close(balanced_softmax(logits, labels, counts, torch.ones(3, dtype=torch.float64)), expected)


def test_balanced_softmax_leaves_absent_classes_out() -> None:
    logits = torch.tensor([[1.0, 2.0, 30.0]], requires_grad=True)
    loss = balanced_softmax(logits, torch.tensor([0]), torch.tensor([5, 5, 0]), torch.ones(3))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.e))
    assert logits.grad[0, 2] == 0
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("loss", ["focal", "cross-entropy", "balanced-softmax"])
@pytest.mark.parametrize("weights", ["none", "raw", "balanced", "mean1"])
def test_every_loss_is_finite_for_one_image_of_one_class(loss: Any, weights: Any) -> None:
    options = TrainingOptions(loss=loss, class_weights=weights)
    logits = torch.randn(1, 4, generator=generator(), requires_grad=True)
    value = task_loss(options, torch.tensor([0, 0, 1, 0]))(logits, torch.tensor([2]))
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()


def test_options_reach_the_loss() -> None:
    logits, labels = batch()
    counts = torch.tensor([6, 3, 1])
    options = TrainingOptions(loss="focal", focal_gamma=3.0, class_weights="raw", class_weight_clip=5.0)
    expected = focal_loss(logits, labels, torch.tensor([10 / 6, 10 / 3, 5]), 3.0)
    torch.testing.assert_close(task_loss(options, counts)(logits, labels), expected, check_dtype=False)


def test_large_class_weights_are_warned_of_by_client_class_and_count() -> None:
    """Two images of 900 weigh 900 / (2 * 2) = 225 each; a clip or no weights leave nothing to warn of."""
    counts = {"even": torch.tensor([50, 50]), "skewed": torch.tensor([898, 2])}
    (warning,) = weight_cautions(counts, ("nevus", "melanoma"), TrainingOptions(class_weights="balanced"))
    assert "skewed: 225 (melanoma, 2 of 900 images)" in warning
    assert "even" not in warning
    assert not weight_cautions(counts, ("a", "b"), TrainingOptions(class_weights="balanced", class_weight_clip=10))
    assert not weight_cautions(counts, ("a", "b"), TrainingOptions(class_weights="none"))


def test_the_contrastive_task_loss_is_the_symmetric_one_over_the_batch() -> None:
    """Two images of class 0 and one of class 1, by hand: S has the columns of the images' own classes."""
    logits, labels = torch.tensor([[2.0, 0.0], [1.0, 0.5], [0.0, 3.0]]), torch.tensor([0, 0, 1])
    similarity = np.array([[2.0, 2.0, 0.0], [1.0, 1.0, 0.5], [0.0, 0.0, 3.0]])
    rows = np.log(np.exp(similarity).sum(1)) - np.diag(similarity)
    columns = np.log(np.exp(similarity).sum(0)) - np.diag(similarity)
    loss = task_loss(TrainingOptions(loss="contrastive", class_weights="raw"), torch.tensor([2, 1]))
    assert float(loss(logits, labels)) == pytest.approx((rows.mean() + columns.mean()) / 2)
    assert torch.equal(loss(logits, labels), contrastive_loss(logits, labels, "instance"))


def test_the_contrastive_loss_cannot_tell_images_of_one_class_apart() -> None:
    """Its floor is log(B / C) where every class has B / C images: 8 images of 2 classes."""
    labels = torch.arange(8) % 2
    sure = 100.0 * functional.one_hot(labels, 2).float()
    assert float(contrastive_loss(sure, labels, "instance")) == pytest.approx(math.log(4), abs=1e-5)
