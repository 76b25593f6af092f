"""Per-FedAvg against NumPy and an exact Hessian; fine-tuning and FedHealth by hand, and nothing of them travelling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linear_trial import DECAY, LR, Batch, batches, gradient, linear_trial, loaded, matrix
from wardround.errors import InputError
from wardround.federation.rounds import RoundOptions
from wardround.federation.rules import Owner
from wardround.methods.adapting import Adapting
from wardround.methods.base import FedAvg
from wardround.methods.check import NETWORKS
from wardround.methods.fedhealth import FedHealth
from wardround.methods.finetune import FineTuning
from wardround.methods.perfedavg import PerFedAvg, moved
from wardround.methods.trial import Network, Trial
from wardround.training.client import Client
from wardround.training.options import TrainingOptions

BN = NETWORKS["bn-cnn"]
PLAIN = Network("wardround:cnn-gn", 20, 2, dropout=0.0)
SMOOTH = Network("wardround:cnn", 20, 0, head="shared", dropout=0.0)
IMAGES = {"large": 13, "small": 9, "single": 1}
FO, HF = PerFedAvg(alpha=0.3), PerFedAvg(alpha=0.3, variant="hessian-free")


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-5)


# ---- Per-FedAvg's steps


def parts(batch: Batch, count: int) -> list[Batch]:
    """A batch in `count` parts; one with fewer images, as often."""
    if len(batch[1]) < count:
        return [batch] * count
    return list(zip(*(np.array_split(array, count) for array in batch), strict=True))


def curvature(w: np.ndarray, batch: Batch, direction: np.ndarray) -> np.ndarray:
    """The exact product of the Hessian of the mean cross-entropy at `w` and a direction, both `(C, F + 1)`."""
    x, y = batch
    p = np.exp(x @ w.T)
    p /= p.sum(1, keepdims=True)
    s = x @ direction.T
    return (p * (s - (p * s).sum(1, keepdims=True))).T @ x / len(y)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def with_width(delta: float) -> PerFedAvg:
    return PerFedAvg(variant="hessian-free", delta=delta)


def meta_gradient(method: PerFedAvg, w: np.ndarray, batch: Batch) -> np.ndarray:
    """The gradient of the average loss after an inner step, with the exact Hessian where one is asked for."""
    first, second, *third = parts(batch, 2 if method.variant == "first-order" else 3)
    slope = gradient(w - method.alpha * gradient(w, first, 0.0), second, 0.0)
    return slope - method.alpha * curvature(w, third[0], slope) if third else slope


@pytest.mark.parametrize("method", [FO, HF, PerFedAvg(alpha=0.0)], ids=["first-order", "hessian-free", "no inner step"])
def test_two_clients_by_hand(method: PerFedAvg) -> None:
    """Two rounds, two steps a client and more; weight decay is the optimiser's and not the inner step's."""
    trial = linear_trial(method, "large", "small", "single", batch_size=2, lr_decay=0.5).run(2)
    size = 4 if method.variant == "first-order" else 6
    w = matrix(trial.history.servers[0])
    for round in (1, 2):
        models = dict.fromkeys(IMAGES, w)
        for client in IMAGES:
            for batch in batches(trial, client, round, 1, batch_size=size):
                step = meta_gradient(method, models[client], batch) + DECAY * models[client]
                models[client] = models[client] - LR / 2 ** (round - 1) * step
        w = sum(IMAGES[client] / 23 * model for client, model in models.items())  # type: ignore[assignment]
        near(matrix(trial.history.servers[round]), w)


def test_the_variants_differ_by_more_than_rounding() -> None:
    """So that the test above tells them apart: each by the other's hand, and by federated averaging's."""
    trials = [linear_trial(method, batch_size=6).run(1) for method in (FO, HF, PerFedAvg(alpha=0.0))]
    one, other, plain = (matrix(trial.history.servers[1]) for trial in trials)
    assert min(np.abs(one - other).max(), np.abs(one - plain).max()) > 1e-3


@pytest.mark.parametrize(
    "network",
    [SMOOTH, Network("wardround:vit-tiny", 16, 1, head="shared", dropout=0.0)],
    ids=["softmax", "transformer block"],
)
def test_the_hessian_term_against_autograd(network: Network) -> None:
    """Along the gradient, against the exact product by differentiating twice; on networks without kinks.

    The error of central differences is of second order: a hundredth at a tenth of the width.
    """
    client = loaded(Trial(HF, network, ["small"]), "small")
    (step,) = client.steps(1, batch_size=9)
    weights = HF.parameters(client)
    with sdpa_kernel(SDPBackend.MATH):  # the one kernel of attention that can be differentiated twice
        slope = torch.autograd.grad(step.task_loss, weights, create_graph=True)
        direction = [g.detach().clone() for g in slope]
        exact = flat(torch.autograd.grad(slope, weights, grad_outputs=direction))
    fine, coarse = (
        float((flat(with_width(delta).curvature(step, weights, direction)) - exact).norm() / exact.norm())
        for delta in (1e-3, 1e-2)
    )
    assert fine < 0.01
    assert fine < coarse / 20 or coarse < 1e-3


def test_both_sides_of_a_difference_drop_the_same_units() -> None:
    """Other masks would change gradients by far more than a step of 0.001 does, and be divided by it."""
    client = loaded(Trial(HF, Network("wardround:cnn", 20, 0, head="shared", dropout=0.5), ["small"]), "small")
    (step,) = client.steps(1, batch_size=9)
    weights = HF.parameters(client)
    torch.manual_seed(0)
    direction = [torch.randn_like(weight) for weight in weights]
    client.model.train()
    narrow, wide = (flat(with_width(delta).curvature(step, weights, direction)) for delta in (1e-3, 1e-2))
    assert float((narrow - wide).norm()) < 0.05 * float(wide.norm())


def test_parameters_come_back_to_the_bit() -> None:
    client = loaded(Trial(FO, PLAIN, ["small"]), "small")
    weights, before = FO.parameters(client), client.snapshot()
    direction = [torch.full_like(weight, 1 / 3) for weight in weights]

    def interrupted() -> None:
        with moved(weights, direction, -0.3):
            torch.testing.assert_close(weights[0].detach(), before["tuned.0.0.weight"] - 0.1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert same(client.snapshot(), before)


@pytest.mark.parametrize(("batch_size", "counter"), [(1, 0), (2, 2)])
def test_a_part_of_one_image_uses_running_statistics(batch_size: int, counter: int) -> None:
    """Four images in a batch of two parts of two; two images in two parts of one, which have no variance."""
    counts = {1: (1, 1, 0, 0), 2: (1, 1, 1, 1)}[batch_size]
    trial = Trial(PerFedAvg(), BN, {"few": counts}, batch_size=batch_size).run(1)
    sent = trial.visits()[0].up.under("state")
    assert [int(tensor) for name, tensor in sent.items() if name.endswith("num_batches_tracked")] == [counter]


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_one_image_or_one_batch_are_finite(variant: Any) -> None:
    method = PerFedAvg(variant=variant, alpha=0.1)
    trial = Trial(method, BN, {"one": (0, 0, 1, 0), "two": (0, 2, 0, 0), "batch": (2, 1, 0, 0)}).run(2)
    for visit in trial.visits():
        assert visit.up.scalars["loss"] is not None
        assert all(torch.isfinite(tensor).all() for tensor in [*visit.after.values(), *visit.up.tensors.values()])
    assert all(torch.isfinite(tensor).all() for tensor in trial.answerer.model.state_dict().values())


@pytest.mark.parametrize("precision", ["bfloat16", "pointwise-bfloat16", "auto"])
def test_differences_need_float32(precision: Any) -> None:
    with pytest.raises(InputError, match=rf'training\.precision = "{precision}".*allowed: "float32"'):
        HF.refuse(TrainingOptions(precision=precision))
    HF.refuse(TrainingOptions())
    FO.refuse(TrainingOptions(precision=precision))


# ---- what makes the personal model


def personal(trial: Trial) -> dict[str, Tensor]:
    """The personal model of the last client, after the last round."""
    state = trial.answerer.model.state_dict()
    return {name: tensor.clone() for name, tensor in trial.side.rules.pick(state, Owner.SHARED, Owner.LOCAL).items()}


@pytest.mark.parametrize(
    ("method", "purpose", "epochs", "limit", "rate", "decay"),
    [
        (FO, "adaptation", 1, 99, 0.3, 0.0),
        (PerFedAvg(alpha=0.2, adaptation="step"), "adaptation", 1, 1, 0.2, 0.0),
        (PerFedAvg(alpha=0.2, adaptation="step", start="trained"), "adaptation", 1, 1, 0.2, 0.0),
        (FineTuning(epochs=2), "fine-tuning", 2, 99, 0.05, DECAY),
        (FineTuning(start="received", lr=0.2), "fine-tuning", 1, 99, 0.2, DECAY),
        (FineTuning(what="head"), "fine-tuning", 1, 99, 0.05, DECAY),
        (FedHealth(epochs=2), "fine-tuning", 2, 99, 0.05, DECAY),
    ],
    ids=["epoch", "step", "step, trained", "fine-tuning", "received, own rate", "head", "fedhealth"],
)
def test_adaptation_by_hand(method: Adapting, purpose: str, epochs: int, limit: int, rate: float, decay: float) -> None:
    """Gradient steps on training images, from where `start` says; a loop of plain tensors."""
    trial = Trial(method, PLAIN, ["small"], clip_norm=None, weight_decay=DECAY).run(1)
    client, (visit,) = loaded(trial, "small"), trial.visits()
    if method.start == "trained":
        client.restore({**visit.up.under("state"), **visit.after})
    head_alone = isinstance(method, FineTuning) and method.what == "head"
    weights = list(client.model.head.parameters()) if head_alone else client.owned(Owner.SHARED, Owner.LOCAL)
    for step in list(client.steps(epochs, purpose))[:limit]:
        for weight, slope in zip(weights, torch.autograd.grad(step.task_loss, weights), strict=True):
            weight.data -= rate * (slope + decay * weight.data)
    found, expected = personal(trial), client.snapshot()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [FineTuning(epochs=2), FedHealth()], ids=["finetune", "fedhealth"])
def test_nothing_of_it_travels_or_is_kept(method: FineTuning) -> None:
    """With models evaluated every round, and so fine-tuned, the federation is FedAvg's to the bit."""
    trials = []
    for kind in (method, FedAvg()):
        trial = Trial(kind, BN, ["large", "small"])
        trial.loop.options = RoundOptions(quorum=1.0, evaluate_every=1, evaluate_server=False)
        trials.append(trial.run(2))
    for one, other in zip(*(trial.visits() for trial in trials), strict=True):
        assert same(one.up.under("state"), other.up.under("state"))
        assert same(one.after, other.after)
    assert not same(*(personal(trial) for trial in trials))


def test_a_frozen_backbone_is_frozen_to_the_bit() -> None:
    """Running statistics included: FedHealth's is the received one, fine-tuning's of a head the trained one."""
    for method in (FedHealth(), FineTuning(what="head")):
        trial = Trial(method, BN, ["large"]).run(2)
        last, found = trial.visits()[-1], personal(trial)
        kept = (last.down if method.start == "received" else last.up).under("state")
        assert same({name: found[name] for name in kept}, kept)
        assert {n for n in last.after if not torch.equal(found[n], last.after[n])} == {"head.weight", "head.bias"}


def test_fine_tuning_decays_with_the_rest() -> None:
    """In round 2 the rate of fine-tuning is halved too."""
    rates: list[float] = []

    class Spy(FineTuning):
        def adapt(self, client: Client) -> None:
            make = client.optimizer
            client.optimizer = lambda groups: rates.append(groups[0]["lr"]) or make(groups)  # type: ignore[assignment, func-returns-value, method-assign]
            super().adapt(client)

    Trial(Spy(lr=0.2), PLAIN, ["small"], lr_decay=0.5).run(2)
    assert rates == [0.1]
