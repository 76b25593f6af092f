"""FedLC: its margins and its loss by hand, absent classes, and what it is without margins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from wardround.federation.messages import Message
from wardround.methods.base import FedAvg
from wardround.methods.fedlc import FedLC, calibrated_loss, margins
from wardround.methods.trial import Network, Trial
from wardround.training.client import Step

GN = Network("wardround:cnn-gn", 20, 2, dropout=0.0)
LOGITS = [[0.5, -1.0, 2.0, 0.3], [1.5, 0.2, -0.7, 4.0], [0.0, 0.0, 1.0, -2.0]]
LABELS = [0, 2, 2]
COUNTS = [16, 0, 1, 81]  # margins 1/2, infinite, 1, 1/3


def by_hand(tau: float, denominator: str, counts: list[int]) -> float:
    """The loss in plain arithmetic; a class without images is left out of every sum."""
    total = 0.0
    for z, y in zip(LOGITS, LABELS, strict=True):
        g = {c: z[c] - tau / counts[c] ** 0.25 for c in range(4) if counts[c]}
        rivals = [value for c, value in g.items() if denominator == "all" or c != y]
        total -= math.log(math.exp(g[y]) / sum(map(math.exp, rivals)))
    return total / len(LABELS)


def test_margins_by_hand() -> None:
    counts = torch.tensor(COUNTS)
    masked = margins(counts, 2.0, "mask")
    assert masked[[0, 2, 3]].tolist() == pytest.approx([1.0, 2.0, 2 / 3])
    assert masked[1] > 1e37
    assert masked.isfinite().all()
    expected = [2 * n**-0.25 for n in (17, 1, 2, 82)]
    assert margins(counts, 2.0, "plus-one").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("denominator", ["all", "others"])
@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize("absent", ["mask", "plus-one"])
def test_the_loss_by_hand(tau: float, denominator: Any, absent: Any) -> None:
    found = calibrated_loss(
        torch.tensor(LOGITS), torch.tensor(LABELS), margins(torch.tensor(COUNTS), tau, absent), denominator
    )
    counts = COUNTS if absent == "mask" else [n + 1 for n in COUNTS]
    assert float(found) == pytest.approx(by_hand(tau, denominator, counts), rel=1e-5)


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_gradients_by_hand(denominator: Any) -> None:
    """Softmax of the calibrated logits over the classes of the denominator, minus one at the label."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    calibrated_loss(logits, torch.tensor(LABELS), margins(torch.tensor(COUNTS), 1.0, "mask"), denominator).backward()
    for row, (z, y) in enumerate(zip(LOGITS, LABELS, strict=True)):
        g = {c: math.exp(z[c] - COUNTS[c] ** -0.25) for c in range(4) if COUNTS[c]}
        rivals = {c: value for c, value in g.items() if denominator == "all" or c != y}
        expected = [(rivals.get(c, 0.0) / sum(rivals.values()) - (c == y)) / 3 for c in range(4)]
        assert logits.grad is not None
        assert logits.grad[row].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_a_client_with_a_single_class_has_nothing_to_learn(denominator: Any) -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    loss = calibrated_loss(
        logits, torch.tensor([2, 2, 2]), margins(torch.tensor([0, 0, 9, 0]), 1.0, "mask"), denominator
    )
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_only_the_published_denominator_is_unbounded_below() -> None:
    """A label's logit that grows by 100 lowers that loss by 100; the ordinary softmax stays above 0."""
    logits, labels = torch.tensor(LOGITS), torch.tensor(LABELS)
    further = logits.scatter_add(1, labels[:, None], torch.full((3, 1), 100.0))
    gaps = margins(torch.tensor(COUNTS), 1.0, "mask")
    near, far = (calibrated_loss(z, labels, gaps, "others") for z in (logits, further))
    assert float(far) == pytest.approx(float(near) - 100, rel=1e-5)
    assert calibrated_loss(further, labels, gaps, "all") >= 0


def test_counts_are_of_the_whole_training_split() -> None:
    """Not of the batch: `small` has (2, 3, 2, 2) images, its first batch only four of them."""
    method = FedLC(tau=3.0)
    trial = Trial(method, GN, ["small"])
    state = {f"state/{n}": t for n, t in trial.side.initial_state.items()}
    client = trial.answerer.load("small", Message(state, {"round": 1, "phase": "train"}))
    step = next(iter(client.steps(1)))
    assert len(step.labels) == 4
    z = step.logits - 3 * torch.tensor([2.0, 3.0, 2.0, 2.0]) ** -0.25
    expected = -z.log_softmax(1)[torch.arange(4), step.labels].mean()
    assert method.loss(step).item() == pytest.approx(expected.item(), rel=1e-5)


class PlainLoss(FedAvg):
    """Federated averaging on the unweighted cross-entropy, whatever `training.loss` says."""

    def loss(self, step: Step) -> Tensor:
        loss: Tensor = -step.logits.log_softmax(1).gather(1, step.labels[:, None]).mean()
        return loss


def test_without_margins_it_is_federated_averaging_on_the_cross_entropy() -> None:
    """And `training.loss`, here focal with class weights, does not matter."""
    ours = Trial(FedLC(tau=0.0), GN, ["large", "small"]).run(2)
    theirs = Trial(PlainLoss(), GN, ["large", "small"]).run(2)
    for name, tensor in ours.history.servers[2].items():
        assert torch.allclose(tensor, theirs.history.servers[2][name], atol=1e-6), name
    plain = Trial(FedLC(tau=0.0), GN, ["large", "small"], loss="cross-entropy", class_weights="none").run(2)
    assert all(torch.equal(t, ours.history.servers[2][n]) for n, t in plain.history.servers[2].items())
