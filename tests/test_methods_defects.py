"""Defects that were found in other federated-learning software; each must not be one of ours.

About FedBN, the methods are small ones of this file: batch norms local by type, as anyone would write it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wardround.config import Experiment, ModelOptions
from wardround.data.options import DataOptions
from wardround.evaluation.metrics import evaluate_probabilities
from wardround.experiment import set_up
from wardround.federation.messages import Message, named
from wardround.federation.rounds import RoundOptions
from wardround.federation.rules import BATCH_NORMS, Owner, Rules, modules_of_type
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg, ServerSide
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.registry import METHODS
from wardround.methods.trial import Network, Trial, tiny_federation
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step


class FedBN(FedAvg):
    """Li et al., ICLR 2021: batch norms are local, the rest is averaged."""

    def rules(self, model: Classifier) -> Rules:
        return super().rules(model).local(*modules_of_type(model, BATCH_NORMS))


class FedProx(FedAvg):
    """Li et al., MLSys 2020: F_k(w) + mu/2 ||w - w_t||^2 over what trains."""

    mu: float = 1.0

    def train(self, client: Client, phase: str) -> float:
        client.scratch["received"] = [(p, p.detach().clone()) for p in self.parameters(client)]
        return super().train(client, phase)

    def loss(self, step: Step) -> Tensor:
        pull = torch.stack([(p - start).square().sum() for p, start in step.client.scratch["received"]]).sum()
        return super().loss(step) + self.mu / 2 * pull


def whole(backbone: str) -> Classifier:
    return Network(backbone, 64, "all", head="shared").model(FedBN())


# (backbone, batch-norm layers)
NESTED = [("torchvision:resnet18", 20), ("torchvision:densenet121", 121), ("torchvision:efficientnet_b0", 49)]


@pytest.mark.parametrize(("backbone", "layers"), NESTED)
def test_fedbn_reaches_nested_layers(backbone: str, layers: int) -> None:
    """anchors.md, defect 1: fluke 0.8.1 drops the parent's prefix, so that the server overwrites 95 of ResNet-18's 100
    batch-norm tensors and 595 of DenseNet-121's 605."""
    model = whole(backbone)
    local = FedBN().rules(model).names(Owner.LOCAL)
    norms = modules_of_type(model, BATCH_NORMS)
    assert len(norms) == layers
    assert len(local) == 5 * layers
    state = model.state_dict()
    pointers = {tensor.data_ptr() for norm in norms for tensor in norm.state_dict().values()}
    assert {state[name].data_ptr() for name in local} == pointers


@pytest.mark.parametrize(
    ("backbone", "affine", "by_name"), [(b, 2 * n, found) for (b, n), found in zip(NESTED, (34, 0, 0), strict=True)]
)
def test_fedbn_does_not_go_by_name(backbone: str, affine: int, by_name: int) -> None:
    """anchors.md, defect 2: PFLlib asks for `'bn' in name`, which misses 6 of ResNet-18's 40 affine tensors, all 242 of
    DenseNet-121 and all 98 of EfficientNet-B0."""
    model = whole(backbone)
    owners = FedBN().rules(model).owners
    names = [name for name, _ in model.named_parameters()]
    assert sum("bn" in name for name in names) == by_name
    assert sum(owners[name] is Owner.LOCAL for name in names) == affine


def test_fedavg_averages_all_buffers() -> None:
    """anchors.md, defect 3: PFLlib and FLamby leave 60 of ResNet-18's 122 state entries at the clients."""
    model = Network("torchvision:resnet18", 64, "all", head="shared").model(FedAvg())
    side = ServerSide(FedAvg(), model, 64)
    buffers = {name for name, _ in model.named_buffers() if name in model.state_dict()}
    assert len(model.state_dict()) == len(side.initial_state) == 122
    assert len(buffers) == 60
    server = Server(dict(side.initial_state))
    updates = [{n: torch.full_like(side.initial_state[n], value) for n in buffers} for value in (2, 6)]
    side.combine(
        server, "train", replies((1, updates[0] | others(side, buffers)), (3, updates[1] | others(side, buffers)))
    )
    for name in buffers:
        expected = 6 if name.endswith("num_batches_tracked") else 5
        assert (server.state[name] == expected).all(), name


def others(side: ServerSide, buffers: set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in side.initial_state.items() if name not in buffers}


def replies(*parts: tuple[int, dict[str, Tensor]]) -> Iterator[Reply]:
    for number, (examples, state) in enumerate(parts):
        yield Reply(str(number), Message(named("state", state), {"examples": examples}))


class Poisoned(FedAvg):
    """One client's update is NaN; told by its name so that the others are as ever."""

    where: ClassVar[str] = "small"

    def train(self, client: Client, phase: str) -> float:
        loss = super().train(client, phase)
        if client.name == self.where:
            with torch.no_grad():
                next(client.model.tuned.parameters()).view(-1)[0] = math.nan
        return loss


def test_a_nan_of_one_client_does_not_reach_the_server() -> None:
    """anchors.md, defect 4: in Flower 1.42 one client's NaN makes the global model NaN."""
    trial = Trial(Poisoned(), NETWORKS["bn-cnn"], ["large", "small", "single"])
    trial.loop.options = RoundOptions(quorum=0.5, evaluate_server=False)
    trial.run(2)
    assert all(torch.isfinite(tensor).all() for tensor in trial.history.servers[-1].values())
    without = Trial(FedAvg(), NETWORKS["bn-cnn"], ["large", "single"]).run(2)
    for name, tensor in without.history.servers[-1].items():
        assert torch.equal(trial.history.servers[-1][name], tensor)


def test_a_round_without_any_image_leaves_the_server_as_it_was() -> None:
    """anchors.md, defect 4: `num-examples` 0 at all clients gives Flower a ZeroDivisionError, or NaN (flower#7645)."""
    trial = Trial(FedAvg(), NETWORKS["bn-cnn"], ["empty"]).run(2)
    start, *later = trial.history.servers
    for state in later:
        assert all(torch.equal(tensor, start[name]) for name, tensor in state.items())


def test_fedprox_squares_the_distance() -> None:
    """anchors.md, defect 5: Flower's docstring shows the un-squared norm, whose gradient has length mu/2 everywhere.

    Two full-batch steps: at the first w is w_t and the term has no gradient; the second differs from FedAvg's by
    exactly -lr mu (w - w_t).
    """
    network = Network("wardround:cnn-gn", 20, 2, dropout=0.0)
    keys: dict[str, Any] = {"batch_size": 32, "clip_norm": None, "weight_decay": 0.0, "lr": 0.02}
    one_step = Trial(FedAvg(), network, ["small"], **keys).run(1).history.servers
    plain = Trial(FedAvg(), network, ["small"], local_epochs=2, **keys).run(1).history.servers[1]
    prox = Trial(FedProx(mu=3.0), network, ["small"], local_epochs=2, **keys).run(1).history.servers[1]
    for name, start in one_step[0].items():
        moved = one_step[1][name] - start
        torch.testing.assert_close(prox[name] - plain[name], -0.02 * 3.0 * moved, rtol=1e-3, atol=2e-7)


def test_fedprox_conforms() -> None:
    assert set(check_method(FedProx(), "gn-cnn").values()) == {PASSED}


def test_a_method_sets_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """anchors.md, defect 6: FL4Health's FedBN client runs the whole set-up twice."""
    edits: list[Classifier] = []

    class Spy(FedAvg):
        name: ClassVar[str] = "fedavg"

        def edit(self, model: Classifier, image_size: int) -> None:
            edits.append(model)

    monkeypatch.setitem(METHODS, "fedavg", Spy)
    experiment = Experiment(
        data=DataOptions(source="phantoms", image_size=20),
        model=ModelOptions(backbone="wardround:cnn-bn", pretrained=False),
    )
    setup = set_up(experiment, tiny_federation({"a": (1, 1, 1, 1)}, 20))
    assert edits == [setup.model]


def test_metrics_are_defined_where_a_class_is_absent() -> None:
    """anchors.md, defect 6: FL4Health's ROC AUC is undefined as soon as a client lacks a class."""
    p = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1]])
    metrics = evaluate_probabilities(p, np.array([0, 1, 0, 1]))
    assert metrics["auroc"] == 1.0
    assert metrics["balanced_accuracy"] == 1.0
    assert metrics["support"] == [2, 2, 0]


def test_which_clients_take_part_depends_on_the_seed_alone() -> None:
    """anchors.md, defect 7: PFLlib draws clients from NumPy's and Python's unseeded global generators."""
    drawn = []
    for state in (1, 2):
        random.seed(state)
        np.random.seed(state)
        torch.manual_seed(state)
        trial = Trial(FedAvg(), NETWORKS["gn-cnn"])
        trial.loop.options = RoundOptions(participation=0.5, evaluate_server=False)
        drawn.append([trial.loop.participants(round) for round in range(1, 30)])
    assert drawn[0] == drawn[1]
    assert all(len(clients) == 2 for clients in drawn[0])
    assert {client for clients in drawn[0] for client in clients} == set(trial.federation.names)


def test_training_leaves_global_generators_alone_and_ignores_them() -> None:
    """anchors.md, defect 7, in training: dropout and batch order come from streams of their own."""
    states = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.random.get_rng_state()
        trial = Trial(FedAvg(), NETWORKS["bn-cnn"], ["large"]).run(1)
        assert torch.equal(torch.random.get_rng_state(), before)
        states.append(trial.history.servers[-1])
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_client_smaller_than_a_batch_trains() -> None:
    """anchors.md, defect 7: `drop_last=True` discards a client with fewer images than a batch."""
    visit = Trial(FedAvg(), NETWORKS["bn-cnn"], {"three": (1, 1, 1, 0)}, batch_size=64).run(1).visits()[0]
    trained = {name for name in visit.up.under("state") if name in visit.changed}
    assert {"tuned.0.0.weight", "tuned.0.1.running_mean"} <= trained
    assert visit.up.scalars["examples"] == 3


def test_batch_norms_without_affine_parameters_are_norms_too() -> None:
    """By type, a norm is found whatever it holds; by its parameters it would not be."""
    norm = nn.BatchNorm2d(4, affine=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm)
    assert Rules.of(model).local(*modules_of_type(model, BATCH_NORMS)).names(Owner.LOCAL) == (
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    )
