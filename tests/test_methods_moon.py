"""MOON: its contrastive term against NumPy, its fixed references, and the network that it trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.federation.rules import BATCH_NORMS, Owner
from wardround.methods.base import FedAvg
from wardround.methods.check import NETWORKS, PASSED, check_method
from wardround.methods.moon import MOON, contrast
from wardround.methods.trial import CLASSES, Network, Trial, Visit
from wardround.models.classifier import Classifier
from wardround.training.client import Client

BN, GN = NETWORKS["bn-cnn"], Network("wardround:cnn-gn", 20, 2, dropout=0.0)
SMALL = MOON(projection=8)
ONE_BATCH = {"one": (2, 1, 1, 1), "two": (0, 1, 2, 1)}


class FedAvgProjected(FedAvg):
    """Federated averaging of the network that MOON trains."""

    def edit(self, model: Classifier, image_size: int) -> None:
        SMALL.edit(model, image_size)


def same(one: Visit, other: Visit) -> bool:
    """Whether two visits left the same bits, shared and local, and the same loss."""
    ours, theirs = (visit.up.under("state") | dict(visit.after) for visit in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def second_round(trial: Trial, name: str) -> tuple[Client, Visit, Visit]:
    """A client as it is when its second round begins, with its visits of both rounds."""
    first, second = trial.visits(name)
    answerer = trial.new_answerer()
    answerer.answer(name, first.frame)
    return answerer.load(name, second.down), first, second


# ---- the term


def numpy_contrast(z: np.ndarray, near: np.ndarray, far: np.ndarray, temperature: float) -> float:
    """Row by row, without any care for large exponents."""
    losses = []
    for one, g, p in zip(z, near, far, strict=True):
        a, b = (np.exp(one @ other / np.linalg.norm(one) / np.linalg.norm(other) / temperature) for other in (g, p))
        losses.append(-np.log(a / (a + b)))
    return float(np.mean(losses))


@pytest.mark.parametrize(
    ("z", "near", "far", "temperature", "expected"),
    [
        ([2.0, 0.0], [1.0, 0.0], [0.0, 1.0], 0.5, np.log(1 + np.exp(-2))),  # cosines 1 and 0
        ([2.0, 0.0], [5.0, 0.0], [-3.0, 0.0], 1.0, np.log(1 + np.exp(-2))),  # cosines 1 and -1, whatever the lengths
        ([2.0, 0.0], [0.0, 3.0], [1.0, 0.0], 0.5, np.log(1 + np.exp(2))),
        ([1.0, 1.0], [2.0, 2.0], [3.0, 3.0], 0.1, np.log(2)),
    ],
)
def test_the_term_by_hand(
    z: list[float], near: list[float], far: list[float], temperature: float, expected: float
) -> None:
    rows = (torch.tensor([vector]) for vector in (z, near, far))
    assert float(contrast(*rows, temperature)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_term_and_its_gradient_against_numpy(temperature: float) -> None:
    z, near, far = np.random.default_rng(0).normal(size=(3, 5, 4))
    tensor = torch.from_numpy(z).requires_grad_()
    loss = contrast(tensor, torch.from_numpy(near), torch.from_numpy(far), temperature)
    assert loss.item() == pytest.approx(numpy_contrast(z, near, far, temperature))
    slopes = np.zeros_like(z)
    for place in np.ndindex(z.shape):
        step = np.zeros_like(z)
        step[place] = 1e-6
        up, down = (numpy_contrast(z + sign * step, near, far, temperature) for sign in (1, -1))
        slopes[place] = (up - down) / 2e-6
    np.testing.assert_allclose(torch.autograd.grad(loss, tensor)[0], slopes, atol=1e-8)


def test_a_small_temperature_does_not_overflow() -> None:
    z = torch.tensor([[1.0, 0.0]])
    assert float(contrast(z, -z, z, 1e-3)) == pytest.approx(2000)


# ---- in the loop


def test_the_second_round_adds_the_term() -> None:
    """One batch a client, no dropout and no batch norm: the loss of its first step from three networks built here."""
    trial = Trial(MOON(projection=8, mu=3.0, temperature=0.7), GN, ONE_BATCH, batch_size=8).run(2)
    first, second = trial.visits("one")
    client = trial.new_answerer().load("one", first.down)
    inputs, model = client.inputs.batch(torch.arange(5), None), client.model

    def features(state: dict[str, Tensor]) -> Tensor:
        model.load_state_dict(state, strict=False)
        return model.features(inputs).detach()

    last = features(first.up.under("state") | dict(first.after))
    received = features(second.down.under("state") | dict(second.before))  # left loaded, for the logits
    task = client.task_loss(model(inputs), client.labels)
    term = numpy_contrast(*(z.double().numpy() for z in (received, received, last)), 0.7)
    assert second.up.scalars["loss"] == pytest.approx(task.item() + 3.0 * term, rel=1e-5)
    assert term < np.log(2) - 1e-4  # which it would be if the last model were the received one


def test_without_a_last_model_it_is_fedavg_on_the_same_network() -> None:
    ours, theirs = (Trial(method, BN).run(2).visits() for method in (SMALL, FedAvgProjected()))
    for one, other in zip(ours, theirs, strict=True):
        assert same(one, other) == (one.round == 1 or one.client == "empty")


def test_a_client_that_was_away_has_no_last_model() -> None:
    """What counts is its own first training, not the first round."""
    start = Trial(SMALL, GN, ["small"]).run(1).visits()[0].down
    answerer = Trial(SMALL, GN, ["small"]).answerer
    message = type(start)(start.tensors, {**start.scalars, "round": 7})
    client = answerer.load("small", message)
    SMALL.train(client, "train")
    assert "references" not in client.scratch
    assert client.memory.keys() == set(client.rules.names(Owner.SHARED, Owner.LOCAL))


@pytest.mark.parametrize("projection", [0, 8])
def test_mu_zero_is_fedavg_and_looks_at_no_other_network(projection: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Classifier:
        raise AssertionError("a reference was asked for")

    monkeypatch.setattr(Client, "reference", refuse)
    ours = Trial(MOON(mu=0.0, projection=projection), BN, ["large", "small"]).run(3)
    theirs = Trial(FedAvgProjected() if projection else FedAvg(), BN, ["large", "small"]).run(3)
    for one, other in zip(ours.visits(), theirs.visits(), strict=True):
        assert same(one, other)
        assert one.up.scalars["loss"] == other.up.scalars["loss"]
    assert not [name for name in ours.answerer.store.get("large") if name.startswith("memory/")]


def test_references_are_fixed() -> None:
    """In eval mode, without gradients, and every buffer of their batch norms as it was."""
    client, first, second = second_round(Trial(SMALL, BN, ["large", "small"]).run(2), "large")
    SMALL.train(client, "train")
    expected = [second.down.under("state") | dict(second.before), first.up.under("state") | dict(first.after)]
    for reference, state in zip(client.scratch["references"], expected, strict=True):
        assert any(isinstance(module, BATCH_NORMS) for module in reference.tuned.modules())
        assert not any(module.training for module in reference.modules())
        assert not any(parameter.requires_grad for parameter in reference.parameters())
        assert reference.frozen is client.model.frozen
        entries = reference.state_dict()
        assert all(torch.equal(entries[name], tensor) for name, tensor in state.items())
    counters = [int(m.num_batches_tracked) for m in client.model.tuned.modules() if isinstance(m, BATCH_NORMS)]
    assert counters == [6]  # three batches a round: a reference's forward passes are not counted


def test_the_last_model_is_what_training_left() -> None:
    client, _, second = second_round(Trial(SMALL, BN, ["large", "small"]).run(2), "large")
    SMALL.train(client, "train")
    left = second.up.under("state") | dict(second.after)
    assert client.memory.keys() == left.keys()
    assert all(torch.equal(client.memory[name], tensor) for name, tensor in left.items())


# ---- the network


def test_the_authors_network_is_the_default() -> None:
    plain, model = GN.model(FedAvg()), GN.model(MOON())
    d = plain.head.in_features
    shapes = [tuple(layer.weight.shape) for layer in model.neck if isinstance(layer, nn.Linear)]
    assert shapes == [(d, d), (256, d)]
    assert [type(layer).__name__ for layer in model.neck] == ["Linear", "ReLU", "Linear"]
    assert model.head.weight.shape == (CLASSES, 256)
    h = torch.randn(2, *plain.site_shapes(20)[0])
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if n.startswith(("frozen", "tuned"))}, False)
    first, _, second = model.neck
    expected = second(functional.relu(first(plain.features(h))))
    torch.testing.assert_close(model.features(h), expected)
    torch.testing.assert_close(model(h), model.head(expected))


@pytest.mark.parametrize(("head", "owner"), [("local", Owner.LOCAL), ("shared", Owner.SHARED)])
def test_the_projection_head_is_shared(head: str, owner: Owner) -> None:
    model = Network("wardround:cnn-gn", 20, 2, head=head).model(SMALL)  # type: ignore[arg-type]
    owners = SMALL.rules(model).owners
    assert {owners[name] for name in owners if name.startswith("neck.")} == {Owner.SHARED}
    assert owners["head.weight"] is owner


def test_the_added_projection_head_is_said() -> None:
    d = GN.model(FedAvg()).head.in_features
    [text] = MOON(projection=8).cautions(GN.model(SMALL), {"one": 5})
    assert f"{d * d + d + 8 * d + 8:,} parameters" in text
    bare = MOON(projection=0)
    assert bare.cautions(GN.model(bare), {"one": 5}) == []
    assert GN.model(bare).state_dict().keys() == GN.model(FedAvg()).state_dict().keys()


@pytest.mark.parametrize("network", ["bn-cnn", "gn-cnn"])
def test_moon_conforms(network: str) -> None:
    assert set(check_method(SMALL, network).values()) == {PASSED}
