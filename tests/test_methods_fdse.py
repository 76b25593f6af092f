"""FDSE: the consensus step, the averages by similarity, the regulariser, who owns what, and what it reduces to."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Server
from wardround.methods.base import FedAvg
from wardround.methods.check import PASSED, check_method
from wardround.methods.consensus import consensus_step, similarity_averages, simplex_weights
from wardround.methods.consistency import Consistency
from wardround.methods.fdse import FDSE
from wardround.methods.stacks import BLOCK, Stack, Stacks
from wardround.methods.trial import Network, Trial, Visit
from wardround.models.classifier import Classifier
from wardround.models.shift_eraser import InsertedEraser, decompose_convolutions, insert_erasers, shift_erasers

Layers = Literal["before-blocks", "convolutions"]
LAYERS: tuple[Layers, ...] = ("before-blocks", "convolutions")
BN = Network("wardround:cnn-bn", 20, 2)
GN = Network("wardround:cnn-gn", 20, 2, dropout=0.0)


class FedAvgWithErasers(FedAvg):
    """Federated averaging of the same network, with the moments inside the erasers local: FDSE's reduction."""

    layers: Layers = "before-blocks"

    def edit(self, model: Classifier, image_size: int) -> None:
        if self.layers == "convolutions":
            decompose_convolutions(model)
        else:
            insert_erasers(model, image_size)

    def rules(self, model: Classifier) -> Rules:
        return super().rules(model).local(*(layer.norm for layer in shift_erasers(model)))


def uploads(visits: list[Visit], name: str) -> np.ndarray:
    """What the clients sent of one entry, flat and in float64, `(clients, elements)`."""
    return np.stack([visit.up.tensors[f"state/{name}"].double().flatten().numpy() for visit in visits])


# ---- the quadratic program


@pytest.mark.parametrize("seed", range(6))
def test_simplex_weights_against_a_grid(seed: int) -> None:
    """Three clients: no point of a grid of step 1/300 is better, and the best one is near."""
    vectors = np.random.default_rng(seed).normal(size=(3, 2 + seed)) + 0.4 * seed
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    steps = 300
    grid = np.array([(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)]) / steps
    values = np.square(grid @ vectors).sum(1)
    found = simplex_weights(vectors @ vectors.T)
    value = np.square(found @ vectors).sum()
    assert value <= values.min() + 1e-12
    assert value >= values.min() - 1e-4
    assert np.all(found >= 0)
    assert found.sum() == pytest.approx(1)
    if seed:  # with three vectors in the plane the best lambda need not be the only one
        np.testing.assert_allclose(found, grid[values.argmin()], atol=0.02)


@pytest.mark.parametrize(("clients", "size"), [(40, 100), (120, 30), (60, 3)])
def test_simplex_weights_are_optimal_for_many_clients(clients: int, size: int) -> None:
    """The conditions of optimality: `G lambda >= q` everywhere, with equality wherever lambda is positive."""
    vectors = np.random.default_rng(0).normal(size=(clients, size)) + 0.3
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    gram = vectors @ vectors.T
    found = simplex_weights(gram)
    gradient, value = gram @ found, found @ gram @ found
    assert found.sum() == pytest.approx(1)
    assert np.all(gradient >= value - 1e-9)
    np.testing.assert_allclose(gradient[found > 1e-9], value, atol=1e-9)


@pytest.mark.parametrize("clients", [1, 2, 30])
def test_equal_vectors_have_any_weights(clients: int) -> None:
    found = simplex_weights(np.ones((clients, clients)))
    assert found.sum() == pytest.approx(1)
    assert np.all(found >= 0)


def test_opposite_vectors_cancel() -> None:
    np.testing.assert_allclose(simplex_weights(np.array([[1.0, -1.0], [-1.0, 1.0]])), [0.5, 0.5])


# ---- the step


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([[3.0, 0.0], [0.0, 4.0]], [1.75, 1.75]),  # 3.5 * (1/2, 1/2)
        ([[3.0, 4.0], [3.0, 4.0]], [3.0, 4.0]),  # as FedAvg
        ([[6.0, 8.0]], [6.0, 8.0]),  # as the only client
        ([[2.0, 0.0], [-1.0, 0.0]], [0.0, 0.0]),  # no consensus
        ([[2.0, 0.0], [0.0, 0.0]], [1.0, 0.0]),  # who did not move has no say, but counts in the mean length
        ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]),
        # Directions at 0, 45 and 90 degrees: the one between is not needed.
        ([[1.0, 0.0], [5.0, 5.0], [0.0, 1.0]], [(2 + math.sqrt(50)) / 6] * 2),
    ],
)
def test_consensus_step_by_hand(changes: list[list[float]], expected: list[float]) -> None:
    found = consensus_step(Stack.of(torch.tensor(changes)), torch.tensor(changes).norm(dim=1))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_the_step_agrees_with_everybody() -> None:
    """What the program is for: no client's direction is opposed."""
    changes = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    step = consensus_step(Stack.of(changes), changes.flatten(1).norm(dim=1))
    assert step.shape == (12,)
    assert step.dtype == torch.float32
    agreement = (changes.flatten(1) * step).sum(1)
    assert agreement.min() > 0


# ---- averages by similarity


@pytest.mark.parametrize("tau", [0.5, 0.1])
def test_similarity_averages_by_hand(tau: float) -> None:
    values = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])
    cosines = [[1, 0, math.sqrt(0.5)], [0, 1, math.sqrt(0.5)], [math.sqrt(0.5), math.sqrt(0.5), 1]]
    expected = []
    for row in cosines:
        raw = [math.exp(cosine / tau) for cosine in row]
        expected.append(sum(w / sum(raw) * value for w, value in zip(raw, values, strict=True)))
    found = similarity_averages(Stack.of(values), values.norm(dim=1), tau)
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_large_temperature_gives_the_mean_and_zeros_are_no_harm() -> None:
    values = torch.tensor([[[1.0], [2.0]], [[0.0], [0.0]], [[-3.0], [1.0]]])
    for average in similarity_averages(Stack.of(values), values.flatten(1).norm(dim=1), 1e9):
        torch.testing.assert_close(average, values.mean(0).flatten())


# ---- the stacks


@pytest.mark.parametrize("length", [1, 5, BLOCK, 2 * BLOCK + 3])
def test_a_stack_says_the_same_in_memory_and_on_disk(length: int) -> None:
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    inside, outside, half = Stack.of(values), Stack.of(values), Stack.of(values[:1])
    outside.spill()
    half.spill()
    half.spill()
    half.append(values[1])
    half.gram()
    half.append(values[2])
    weights = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(inside.gram(), values.double() @ values.double().T, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(inside.mixed(weights), weights.float() @ values, rtol=1e-5, atol=1e-6)
    for other in (outside, half):
        assert torch.equal(other.gram(), inside.gram())
        assert torch.equal(other.mixed(weights), inside.mixed(weights))


def test_stacks_leave_memory_when_they_exceed_their_budget() -> None:
    stacks = Stacks(budget=100)
    for client in range(5):
        stacks.append("a", torch.full((2, 3), float(client)))
        stacks.append("b", torch.full((), float(client)))
        stored = [stacks[name]._file is not None for name in "ab"]
        assert stored == [client >= 3] * 2
    assert torch.equal(stacks["a"].mixed(torch.ones(1, 5)), torch.full((1, 6), 10.0))
    assert torch.equal(stacks["b"].gram(), torch.outer(torch.arange(5.0), torch.arange(5.0)).double())


def test_a_stack_keeps_no_message() -> None:
    """A row is a copy: the tensors of a decoded frame share its memory."""
    frame, stacks = torch.zeros(10), Stacks()
    stacks.append("a", frame[2:4])
    frame.fill_(1)
    assert not stacks["a"].gram().any()


# ---- the regulariser


def at_equality() -> tuple[Consistency, Tensor]:
    """A layer whose recorded maps have exactly the moments that were sent."""
    h = (1 + 2 * torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    layer = InsertedEraser(3)
    layer.closing.running_mean = h.detach().mean((0, 2, 3))
    layer.closing.running_var = h.detach().transpose(0, 1).flatten(1).var(1, correction=0)
    layer.recorded = h
    return Consistency([layer], m=0.1), h


@pytest.mark.parametrize(("divergence", "stands"), [("kl", True), ("fdse_released", False)])
def test_the_gradient_at_equality(divergence: Any, stands: bool) -> None:
    consistency, h = at_equality()
    (gradient,) = torch.autograd.grad(consistency.loss(0.1, divergence, 1e-3), [h])
    assert (float(gradient.abs().max()) < 1e-7) == stands


def test_the_regulariser_by_hand() -> None:
    """Two layers and two batches, from sums alone: weights 1 and e^0.3, moments that follow by a quarter."""
    generator, layers = torch.Generator().manual_seed(0), [InsertedEraser(2), InsertedEraser(3)]
    for layer in layers:
        layer.closing.running_mean = torch.randn(layer.norm.num_features, generator=generator)
        layer.closing.running_var = 1 + torch.rand(layer.norm.num_features, generator=generator)
    batches = [[torch.randn(4, c, 2, 2, generator=generator) for c in (2, 3)] for _ in range(2)]
    consistency = Consistency(layers, m=0.25)
    for batch in batches:
        for layer, h in zip(layers, batch, strict=True):
            layer.recorded = h
        found = consistency.loss(0.3, "kl", 0.0)
    expected, raw = 0.0, [1.0, math.exp(0.3)]
    for number, layer in enumerate(layers):
        first, second = (b[number].double().numpy().transpose(1, 0, 2, 3).reshape(-1, 16) for b in batches)
        f = 0.75 * first.mean(1) + 0.25 * second.mean(1)
        u = 0.75 * first.var(1) + 0.25 * second.var(1)
        g, v = layer.closing.running_mean.double().numpy(), layer.closing.running_var.double().numpy()
        kl = 0.5 * (np.log(u / v) + (v + (g - f) ** 2) / u - 1)
        expected += raw[number] / sum(raw) * kl.mean()
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_regulariser_acts_from_the_second_round_on() -> None:
    """Weak and strong take the same first round to the bit, and the pull is smaller where it is felt."""
    weak, strong = (Trial(FDSE(**{"lambda": s}), GN, ["large"]).run(3).visits() for s in (1e-9, 10.0))
    assert "consistency_loss" not in weak[0].up.scalars["log"]
    assert all(torch.equal(t, strong[0].up.tensors[name]) for name, t in weak[0].up.tensors.items())
    assert any(not torch.equal(t, strong[1].up.tensors[name]) for name, t in weak[1].up.tensors.items())
    last = [visits[2].up.scalars["log"]["consistency_loss"] for visits in (weak, strong)]
    assert 0 < last[1] < last[0]


def test_the_targets_are_what_the_server_sent() -> None:
    trial = Trial(FDSE(), GN, ["large", "small"]).run(1)
    client = trial.answerer.load("small", trial.visits("small")[0].down)
    with torch.no_grad():
        client.restore({"before.0.closing.running_mean": torch.full((32,), 7.0)})
    consistency = Consistency(shift_erasers(client.model), 0.1)
    client.restore({"before.0.closing.running_mean": torch.zeros(32)})
    assert torch.equal(consistency.targets[0].mean, torch.full((32,), 7.0))


# ---- who owns what


@pytest.mark.parametrize("layers", LAYERS)
def test_owners(layers: Layers) -> None:
    method = FDSE(layers=layers)
    model = Network("wardround:cnn-bn", 20, 2, head="shared").model(method)
    local = set(method.rules(model).names(Owner.LOCAL))
    places = ["before.0", "before.1"] if layers == "before-blocks" else ["tuned.0.0"]
    moments = ("running_mean", "running_var", "num_batches_tracked")
    assert local == {f"{place}.norm.{moment}" for place in places for moment in moments}
    shared = set(method.rules(model).names(Owner.SHARED))
    eraser = {f"{place}.eraser.{p}" for place in places for p in ("scale.weight", "scale.bias", "depthwise.weight")}
    closing = {f"{place}.closing.{moment}" for place in places for moment in moments}
    assert eraser | closing | {"head.weight", "tuned.1.1.weight"} <= shared
    announced = set(method.statistic_shapes(model, 20, "train"))
    assert {name for name in announced if name.startswith("own/")} == {f"own/{name}" for name in eraser}
    trained = {name for name, _ in model.named_parameters() if name in shared}
    assert {name.split("/", 1)[1] for name in announced} == trained


# ---- two clients, two rounds


@pytest.mark.parametrize("layers", LAYERS)
def test_two_rounds_by_hand(layers: Layers) -> None:
    """For two unit vectors the shortest mixture lies halfway: shared parameters need no solver here."""
    trial = Trial(FDSE(layers=layers, tau=0.2), BN, ["large", "small"]).run(2)
    parameters = {name for name, _ in trial.model.named_parameters()}
    for round in (1, 2):
        visits = trial.visits(round=round)
        before, after = trial.history.servers[round - 1 : round + 1]
        for name in before:
            sent = uploads(visits, name)
            start, found = (state[name].double().flatten().numpy() for state in (before, after))
            if name not in parameters and "num_batches" not in name:
                np.testing.assert_allclose(found, sent.mean(0), rtol=1e-5, atol=1e-7)
            elif name in parameters and ".eraser." not in name:
                lengths = np.linalg.norm(sent - start, axis=1)
                middle = ((sent - start) / lengths[:, None]).mean(0)
                np.testing.assert_allclose(found, start + lengths.mean() * middle, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", LAYERS)
def test_every_client_receives_its_own_erasers(layers: Layers) -> None:
    trial = Trial(FDSE(layers=layers, tau=0.2), BN, ["large", "small", "single"]).run(2)
    first, second = (trial.visits(round=round) for round in (1, 2))
    names = [name for name in trial.history.servers[0] if ".eraser." in name]
    assert names
    for name in names:
        sent = uploads(first, name)
        unit = sent / np.linalg.norm(sent, axis=1, keepdims=True).clip(min=1e-30)  # some shifts are still 0
        raw = np.exp(unit @ unit.T / 0.2)
        expected = raw / raw.sum(1, keepdims=True) @ sent
        np.testing.assert_allclose(
            np.stack([v.down.tensors[f"state/{name}"].flatten() for v in second]), expected, rtol=1e-5, atol=1e-7
        )
    received = [visit.down.tensors[f"state/{names[-1]}"] for visit in second]  # a depth-wise convolution
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(received, 2))


def test_who_has_not_answered_gets_the_mean_of_the_erasers() -> None:
    server = Server({"w": torch.zeros(2), "e": torch.ones(2)}, {"known/e": torch.full((2,), 5.0)})
    assert torch.equal(FDSE().state_for(server, "known")["e"], torch.full((2,), 5.0))
    assert torch.equal(FDSE().state_for(server, "new")["e"], torch.ones(2))
    trial = Trial(FDSE(), BN, ["large", "small", "empty"]).run(2)
    name = "before.0.eraser.depthwise.weight"
    sent = uploads([v for v in trial.visits(round=1) if v.client != "empty"], name)
    got = trial.visits("empty", 2)[0].down.tensors[f"state/{name}"]
    np.testing.assert_allclose(got.flatten(), sent.mean(0), rtol=1e-5, atol=1e-8)


# ---- reductions


@pytest.mark.parametrize("layers", LAYERS)
def test_one_client_is_local_training(layers: Layers) -> None:
    """Without its regulariser and with one client, FDSE is FedAvg of the same network, up to rounding."""
    ours = Trial(FDSE(**{"lambda": 0.0}, layers=layers), GN, ["large"]).run(3)
    theirs = Trial(FedAvgWithErasers(layers=layers), GN, ["large"]).run(3)
    for one, other in zip(ours.visits(), theirs.visits(), strict=True):
        for name, tensor in other.up.under("state").items():
            torch.testing.assert_close(one.up.tensors[f"state/{name}"], tensor, rtol=1e-4, atol=1e-5)
    first, last = ours.visits()[0].up.under("state"), ours.history.servers[1]
    for name, tensor in first.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_large_temperature_averages_the_erasers() -> None:
    trial = Trial(FDSE(tau=1e9), BN, ["large", "small"]).run(2)
    name = "before.1.eraser.depthwise.weight"
    mean = uploads(trial.visits(round=1), name).mean(0)
    for visit in trial.visits(round=2):
        np.testing.assert_allclose(visit.down.tensors[f"state/{name}"].flatten(), mean, rtol=1e-5, atol=1e-8)


# ---- the suite, extremes and mistakes


@pytest.mark.parametrize(
    ("network", "layers"),
    [("bn-cnn", LAYERS[0]), ("gn-cnn", LAYERS[0]), ("resnet4", LAYERS[0]), ("resnet4", LAYERS[1])],
)
def test_fdse_conforms(network: str, layers: Layers) -> None:
    outcome = check_method(FDSE(layers=layers), network, rounds=2)
    assert outcome.pop("one_client") == "not applicable: the method aggregates in its own way"
    assert set(outcome.values()) == {PASSED}


def test_a_transformer_has_no_maps_between_its_blocks() -> None:
    assert all("feature maps" in text for text in check_method(FDSE(), "vit-tiny").values())


def test_replaced_convolutions_of_a_frozen_network_are_warned_of() -> None:
    for network, layers, count in [(BN, "before-blocks", 0), (BN, "convolutions", 1)]:
        method = FDSE(layers=layers)
        assert len(method.cautions(network.model(method), {"one": 5})) == count
    whole = Network("wardround:cnn-bn", 20, "all")
    assert not FDSE(layers="convolutions").cautions(whole.model(FDSE(layers="convolutions")), {"one": 5})
