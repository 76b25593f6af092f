"""FedAvg against NumPy, isolated training against FedAvg, and what the base promises to every method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from wardround.federation.messages import Message, named
from wardround.federation.rules import Owner
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg, ServerSide
from wardround.methods.check import NETWORKS
from wardround.methods.isolated import Isolated
from wardround.methods.registry import METHODS
from wardround.methods.trial import CLASSES, Network, Trial
from wardround.models.classifier import Classifier

LINEAR = Network("wardround:cnn", 20, 0, head="shared", dropout=0.0)


def softmax_steps(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: np.ndarray, steps: int, lr: float, decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Full-batch gradient descent on the cross-entropy of a linear model, with weight decay."""
    for _ in range(steps):
        logits = x @ weight.T + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        error = (p - np.eye(CLASSES)[y]) / len(y)
        weight, bias = weight - lr * (error.T @ x + decay * weight), bias - lr * (error.sum(0) + decay * bias)
    return weight, bias


def test_two_clients_two_steps_by_hand() -> None:
    """A linear model on frozen features, two rounds; every batch is a client's whole data, so order is no matter."""
    keys = {"batch_size": 32, "local_epochs": 2, "loss": "cross-entropy", "class_weights": "none", "clip_norm": None}
    trial = Trial(FedAvg(), LINEAR, ["large", "small"], weight_decay=0.01, **keys).run(2)
    weight, bias = (trial.history.servers[0][f"head.{part}"].double().numpy() for part in ("weight", "bias"))
    data = {}
    for client in ("large", "small"):
        h = trial.answerer.client_inputs(client, "train").batch(
            torch.arange(len(trial.federation.client(client).train)), None
        )
        data[client] = trial.model.pool(h).double().numpy(), trial.federation.client(client).train.labels
    for round in (1, 2):
        models = [softmax_steps(x, y, weight, bias, 2, 0.05, 0.01) for x, y in data.values()]
        shares = [len(y) / 22 for _, y in data.values()]
        weight, bias = (sum(p * m[i] for p, m in zip(shares, models, strict=True)) for i in (0, 1))  # type: ignore[assignment]
        np.testing.assert_allclose(trial.history.servers[round]["head.weight"], weight, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(trial.history.servers[round]["head.bias"], bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("network", ["bn-cnn", "gn-cnn"])
def test_one_client_alone_is_isolated_training(network: str) -> None:
    """To the bit, over three rounds, buffers included."""
    alone = Trial(Isolated(), NETWORKS[network], ["large"]).run(3)
    together = Trial(FedAvg(), NETWORKS[network], ["large"]).run(3)
    for one, other in zip(alone.visits(), together.visits(), strict=True):
        state = other.up.under("state") | dict(other.after)
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.after.items())
        assert one.up.scalars["loss"] == other.up.scalars["loss"]


def test_isolated_sends_nothing_and_ignores_the_others() -> None:
    trial = Trial(Isolated(), NETWORKS["bn-cnn"]).run(2)
    assert trial.side.shared_elements == 0
    assert not any(visit.up.tensors or visit.down.tensors for visit in trial.visits())
    alone = Trial(Isolated(), NETWORKS["bn-cnn"], ["small"]).run(2)
    for one, other in zip(trial.visits("small"), alone.visits(), strict=True):
        assert all(torch.equal(tensor, other.after[name]) for name, tensor in one.after.items())


def test_fedavg_mixes_what_isolated_training_keeps_apart() -> None:
    trial = Trial(FedAvg(), NETWORKS["gn-cnn"], ["large", "small"]).run(2)
    first, second = trial.visits(round=2)
    assert all(torch.equal(t, second.down.under("state")[n]) for n, t in first.down.under("state").items())
    assert not torch.equal(first.up.under("state")["tuned.0.0.weight"], second.up.under("state")["tuned.0.0.weight"])


def test_a_local_head_stays_and_a_shared_one_travels() -> None:
    local = NETWORKS["bn-cnn"].model(FedAvg())
    assert FedAvg().rules(local).owners["head.weight"] is Owner.LOCAL
    shared = Network("wardround:cnn-bn", 20, 2, head="shared").model(FedAvg())
    assert FedAvg().rules(shared).owners["head.weight"] is Owner.SHARED


def test_the_order_of_clients_is_the_order_of_the_sum_and_nothing_else() -> None:
    """Averages are accumulated in float64: another order gives the same float32 bits here."""
    one = Trial(FedAvg(), NETWORKS["gn-cnn"], ["large", "small"]).run(1).history.servers[-1]
    other = Trial(FedAvg(), NETWORKS["gn-cnn"], ["small", "large"]).run(1).history.servers[-1]
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- the base


def reply(client: str, examples: int, **tensors: Tensor) -> Reply:
    return Reply(client, Message(named("state", tensors), {"examples": examples}))


def combined(*replies: Reply, method: FedAvg | None = None) -> dict[str, Tensor]:
    server = Server({"w": torch.tensor([9.0]), "n": torch.tensor(9)})
    (method or FedAvg()).combine(server, "train", iter(replies))
    return server.state


def test_counters_take_the_largest_and_the_rest_the_mean() -> None:
    state = combined(
        reply("a", 3, w=torch.tensor([1.0]), n=torch.tensor(5)),
        reply("b", 1, w=torch.tensor([5.0]), n=torch.tensor(7)),
    )
    assert state == {"w": torch.tensor([2.0]), "n": torch.tensor(7)}


def test_clients_without_images_count_for_nothing_whatever_the_weight() -> None:
    class Uniform(FedAvg):
        def weight(self, reply: Reply) -> float:
            return 1.0

    some = reply("a", 3, w=torch.tensor([1.0]), n=torch.tensor(5))
    none = reply("b", 0, w=torch.tensor([5.0]), n=torch.tensor(99))
    assert combined(some, none, method=Uniform()) == {"w": torch.tensor([1.0]), "n": torch.tensor(5)}
    assert combined(none, method=Uniform()) == {"w": torch.tensor([9.0]), "n": torch.tensor(9)}
    assert combined() == {"w": torch.tensor([9.0]), "n": torch.tensor(9)}


def test_replies_are_averaged_while_they_arrive() -> None:
    """One at a time: the next is not asked for before the last has been taken in."""
    alive = 0

    def stream() -> Iterator[Reply]:
        nonlocal alive
        for client in "abc":
            alive += 1
            yield reply(client, 1, w=torch.tensor([1.0]), n=torch.tensor(1))
            alive -= 1
            assert alive == 0

    FedAvg().combine(Server({"w": torch.zeros(1), "n": torch.tensor(0)}), "train", stream())


def test_parameters_by_owner_come_in_the_models_order() -> None:
    model = NETWORKS["bn-cnn"].model(FedAvg())
    rules = FedAvg().rules(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(p)] for p in rules.parameters(model, Owner.LOCAL, Owner.SHARED)]
    assert found == [name for name in names.values() if not name.startswith("frozen.")]


def test_the_schema_is_every_shared_entry_and_every_statistic() -> None:
    class Counting(FedAvg):
        def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
            return {"count": (2, 3)}

    model = NETWORKS["bn-cnn"].model(Counting())
    side = ServerSide(Counting(), model, 20)
    shared = {f"state/{name}" for name in side.rules.names(Owner.SHARED)}
    assert side.reply_schema("train").keys() == shared | {"statistic/count"}
    assert side.statistic_elements == 6


def test_methods_say_who_they_are() -> None:
    for name, kind in METHODS.items():
        assert kind.name == name
        assert kind.title
        assert kind.citation
        assert kind.__doc__
        assert all(field.description for field in kind.model_fields.values()), name
