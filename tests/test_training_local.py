"""The local loop: what trains, what stands still, whose random numbers, how gradients are clipped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wardround.federation.messages import Message
from wardround.methods.base import FedAvg
from wardround.methods.check import NETWORKS
from wardround.methods.trial import Network, Trial
from wardround.training.client import Client, Step
from wardround.training.local import clip_gradients, fit, only_training, single_image_statistics, stands_still

GN = Network("wardround:cnn-gn", 20, 2, dropout=0.0)


def small() -> nn.Sequential:
    """Two parts with a batch norm each; the second one's has no parameters of its own."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)),
        nn.BatchNorm2d(4, affine=False),
    )


def client(network: Network = GN, round: int = 1, name: str = "large", **training: Any) -> Client:
    """A client of a trial, loaded and not yet trained."""
    trial = Trial(FedAvg(), network, [name], **training)
    message = Message(
        {f"state/{n}": t for n, t in trial.side.initial_state.items()}, {"round": round, "phase": "train"}
    )
    return trial.answerer.load(name, message)


# ---- what trains


def test_only_the_chosen_train_and_everything_is_put_back() -> None:
    model = small()
    model[0][0].bias.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    chosen = list(model[1].parameters())
    with only_training(model, chosen):
        assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in chosen}
        assert model.training
        model(torch.randn(4, 3, 2, 2)).sum().backward()
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_flags_are_put_back_after_an_error() -> None:
    model = small()
    with pytest.raises(ZeroDivisionError), only_training(model, []):
        raise ZeroDivisionError
    assert all(p.requires_grad for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize(
    ("part", "moves"),
    [(0, {"0.1", "2"}), (1, {"1.1", "2"}), (None, set())],
)
@pytest.mark.parametrize("fixed", [True, False])
def test_norms_of_a_part_that_stands_still_keep_their_statistics(
    part: int | None, moves: set[str], fixed: bool
) -> None:
    """One without parameters goes with what it is part of, the last one here with the whole model."""
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with only_training(model, [] if part is None else list(model[part].parameters()), fixed):
        model(1 + torch.randn(4, 3, 2, 2))
    moved = {n.rpartition(".")[0] for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == (moves if fixed else {"0.1", "1.1", "2"})


def test_standing_still_by_hand() -> None:
    model = small().requires_grad_(False)
    model[1][0].weight.requires_grad_(True)
    assert [stands_still(model, name) for name in ("0.1", "1.1", "2", "0", "")] == [True, False, False, True, False]


def test_one_image_uses_running_statistics() -> None:
    model = small().train()
    with single_image_statistics(model, 1):
        model(torch.randn(1, 3, 1, 1))
        assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert all(m.training for m in model.modules())
    assert all(int(m.num_batches_tracked) == 0 for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    with pytest.raises(ValueError, match="more than 1 value"):
        model(torch.randn(1, 3, 1, 1))
    with single_image_statistics(model, 2):
        assert all(m.training for m in model.modules())


# ---- steps


def plain(step: Step) -> Tensor:
    loss = step.task_loss
    loss.backward()
    return loss


def test_fit_is_plain_gradient_descent() -> None:
    """Against a loop written out: the same batches, the same loss, w <- w - lr (g + wd w)."""
    ours, theirs = client(weight_decay=0.1, clip_norm=None), client(weight_decay=0.1, clip_norm=None)
    parameters = list(ours.model.tuned.parameters())
    loss = fit(ours, parameters, ours.optimizer([{"params": parameters}]), plain, ours.steps(2))
    weights, losses = list(theirs.model.tuned.parameters()), []
    for step in theirs.steps(2):
        value = step.task_loss
        losses.append(value.item())
        gradients = torch.autograd.grad(value, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.05 * (gradient + 0.1 * weight)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    for one, other in zip(parameters, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_batches_and_augmentation_are_keyed_by_seed_round_client_and_purpose() -> None:
    def order(c: Client, purpose: str = "batches") -> list[int]:
        return [label for step in c.steps(1, purpose) for label in step.inputs[:, 0, 0, 0].tolist()]

    reference = order(client())
    assert order(client()) == reference
    assert sorted(order(client(round=2))) == pytest.approx(sorted(reference))
    assert order(client(round=2)) != reference
    assert order(client(), "again") != reference


def test_two_epochs_have_two_orders() -> None:
    labels = torch.stack(
        [torch.cat([s.inputs[:, 0, 0, 0] for s in list(client().steps(2))[i : i + 3]]) for i in (0, 3)]
    )
    assert not torch.equal(labels[0], labels[1])
    assert torch.equal(labels[0].sort().values, labels[1].sort().values)


def test_an_empty_client_has_no_loss_and_no_steps() -> None:
    empty = client(name="empty")
    assert list(empty.steps(3)) == []
    parameters = list(empty.model.tuned.parameters())
    assert math.isnan(fit(empty, parameters, empty.optimizer([{"params": parameters}]), plain, empty.steps(1)))


def test_dropout_has_a_stream_of_its_own() -> None:
    """The same masks whatever has drawn from torch's generator before; others in another round."""
    network = Network("wardround:cnn-gn", 20, 2, dropout=0.5)

    def loss(disturbance: int, round: int) -> float:
        one = client(network, round=round, batch_size=32)
        torch.manual_seed(disturbance)
        parameters = list(one.model.head.parameters())
        return fit(one, parameters, one.optimizer([{"params": parameters}]), plain, one.steps(1))

    assert loss(1, 1) == loss(2, 1)
    assert loss(1, 1) != pytest.approx(loss(1, 2), rel=1e-4)


def test_the_learning_rate_decays_by_round() -> None:
    one = client(round=4, lr_decay=0.5)
    assert one.rate(0.8) == pytest.approx(0.1)
    assert one.optimizer([{"params": list(one.model.head.parameters())}]).param_groups[0]["lr"] == pytest.approx(
        0.05 / 8
    )


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")])
def test_optimisers_by_name(name: Any, kind: str) -> None:
    one = client(optimizer=name, momentum=0.9, weight_decay=0.01)
    found = one.optimizer([{"params": list(one.model.head.parameters())}])
    assert type(found).__name__ == kind
    assert found.param_groups[0]["weight_decay"] == 0.01
    assert found.param_groups[0].get("momentum", 0.9) == 0.9


# ---- clipping


def test_groups_are_clipped_apart() -> None:
    """A huge gradient in one group does not shorten the other's step; within a group it does."""
    huge, tiny, mate = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [huge, mate]}, {"params": [tiny]}], lr=1.0)
    huge.grad, mate.grad, tiny.grad = torch.tensor([300.0]), torch.tensor([400.0]), torch.tensor([2.0])
    clip_gradients(optimizer, 5.0)
    assert [float(p.grad) for p in (huge, mate, tiny)] == pytest.approx([3.0, 4.0, 2.0])
    clip_gradients(optimizer, None)
    assert float(huge.grad) == pytest.approx(3.0)


def test_clipping_bounds_a_step_in_the_loop() -> None:
    free, bound = (
        Trial(FedAvg(), GN, {"one": (1, 1, 1, 1)}, clip_norm=c, weight_decay=0.0).run(1) for c in (None, 1e-3)
    )
    steps = []
    for trial in (free, bound):
        start, end = trial.history.servers
        head = [trial.visits()[0].after[n] - trial.visits()[0].before[n] for n in ("head.weight", "head.bias")]
        steps.append(torch.cat([(end[n] - start[n]).flatten() for n in start] + [t.flatten() for t in head]).norm())
    assert steps[1] == pytest.approx(0.05 * 1e-3, rel=0.02)
    assert steps[0] > 10 * steps[1]


@pytest.mark.parametrize("network", ["bn-cnn", "resnet4"])
def test_optimisers_with_memory_run(network: str) -> None:
    trial = Trial(FedAvg(), NETWORKS[network], optimizer="adamw", lr=1e-3, loss="balanced-softmax").run(2)
    assert all(visit.up.scalars["loss"] is not None for visit in trial.visits() if visit.up.scalars["examples"])
