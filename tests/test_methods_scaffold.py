"""SCAFFOLD against NumPy with unequal numbers of steps, its reductions, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linear_trial import DECAY, LR, batches, gradient, linear_trial, loaded, matrix, memory, partial
from wardround.errors import InputError
from wardround.federation.messages import Message, named
from wardround.federation.rounds import RoundOptions
from wardround.federation.rules import Owner
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg
from wardround.methods.check import NETWORKS
from wardround.methods.isolated import Isolated
from wardround.methods.scaffold import SCAFFOLD
from wardround.methods.trial import Network, Trial
from wardround.training.options import TrainingOptions

BN = NETWORKS["bn-cnn"]
GN = Network("wardround:cnn-gn", 20, 2, dropout=0.0)
IMAGES = {"large": 13, "small": 9, "single": 1, "empty": 0}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def near(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for float32: a thousandth of a typical step of these trials."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


class ByHand:
    """Algorithm 1 of the paper, written out for a linear model."""

    def __init__(self, method: SCAFFOLD, trial: Trial) -> None:
        self.method, self.trial = method, trial
        self.w = matrix(trial.history.servers[0])
        self.c = np.zeros_like(self.w)
        self.own = {client: np.zeros_like(self.w) for client in trial.federation.names}

    def client(self, client: str, round: int) -> tuple[np.ndarray, np.ndarray]:
        """The client's model and the change of its control variate."""
        rate, y, steps = LR * self.trial.options.lr_decay ** (round - 1), self.w.copy(), 0
        for batch in batches(self.trial, client, round):
            y -= rate * (gradient(y, batch) + self.c - self.own[client])
            steps += 1
        renewed = self.own[client] - self.c + (self.w - y) / (steps * rate)
        change, self.own[client] = renewed - self.own[client], renewed
        return y, change

    def round(self, round: int) -> None:
        """All clients that took part, then the server."""
        asked = [visit.client for visit in self.trial.visits(round=round)]
        trained = [client for client in asked if IMAGES[client]]
        results = [self.client(client, round) for client in trained]
        shares = np.array([IMAGES[c] if self.method.weights == "examples" else 1 for c in trained])
        shares = shares / shares.sum()
        models, changes = (sum(p * r[i] for p, r in zip(shares, results, strict=True)) for i in (0, 1))
        self.w = self.w + self.method.server_lr * (models - self.w)
        self.c = self.c + len(asked) / len(self.trial.federation.names) * changes


@pytest.mark.parametrize(
    ("method", "clients", "participation"),
    [
        (SCAFFOLD(), ("large", "small"), 1.0),
        (SCAFFOLD(weights="examples", server_lr=0.5), ("large", "small", "empty"), 1.0),
        (SCAFFOLD(server_lr=1.5), ("large", "small", "single"), 0.67),
    ],
    ids=["paper", "by examples, half a server step", "two of three clients"],
)
def test_two_clients_with_unequal_steps_by_hand(
    method: SCAFFOLD, clients: tuple[str, ...], participation: float
) -> None:
    """Three rounds: three steps of one client, two of another, at a rate that halves every round."""
    trial = partial(linear_trial(method, *clients, lr_decay=0.5), participation).run(3)
    expected = ByHand(method, trial)
    for round in (1, 2, 3):
        for visit in trial.visits(round=round):
            if round > 1:
                near(matrix(visit.down.under("target")), expected.c)
        expected.round(round)
        near(matrix(trial.history.servers[round]), expected.w)
    for client in trial.federation.names:
        if kept := memory(trial, client):
            near(matrix(kept), expected.own[client])
    near(matrix(trial.loop.server.memory), expected.c)
    assert np.abs(expected.c).max() > 0.01


def test_a_control_variate_is_the_mean_gradient_along_the_way() -> None:
    """What the update telescopes to, whatever c and the rate: the reason why momentum is refused."""
    trial = linear_trial(SCAFFOLD(), lr_decay=0.5).run(3)
    w = matrix(trial.history.servers[2])
    c = trial.visits("large", 3)[0].down.under("target")
    before = memory(linear_trial(SCAFFOLD(), lr_decay=0.5).run(2), "large")
    correction = matrix(c) - matrix(before)
    gradients = []
    for batch in batches(trial, "large", 3):
        gradients.append(gradient(w, batch))
        w = w - LR / 4 * (gradients[-1] + correction)
    near(matrix(memory(trial, "large")), np.mean(gradients, 0))


@pytest.mark.parametrize("network", ["bn-cnn", "gn-cnn"])
def test_the_first_round_is_federated_averaging(network: str) -> None:
    """To the bit, local head and buffers included, with dropout and clipping; the second is not."""
    ours = Trial(SCAFFOLD(weights="examples"), NETWORKS[network], ["large", "small"]).run(2)
    theirs = Trial(FedAvg(), NETWORKS[network], ["large", "small"]).run(2)
    assert same(ours.history.servers[1], theirs.history.servers[1])
    assert all(same(a.after, b.after) for a, b in zip(ours.visits(round=1), theirs.visits(round=1), strict=True))
    assert not same(ours.history.servers[2], theirs.history.servers[2])
    assert not ours.visits(round=1)[0].down.under("target")


def test_one_client_is_local_training() -> None:
    """c and c_1 are then the same, to the bit, so nothing is corrected."""
    ours, alone = (Trial(method, BN, ["large"]).run(3) for method in (SCAFFOLD(), Isolated()))
    for round in (1, 2, 3):
        trained = alone.visits(round=round)[0].after
        assert same(ours.history.servers[round] | dict(ours.visits(round=round)[0].after), trained)


def test_what_is_local_steps_along_its_own_gradient() -> None:
    """One batch a client: the shared step has c - c_i in it, the local head's has not; buffers have no variate."""
    data = {"one": (1, 1, 1, 1), "two": (2, 0, 1, 1)}
    trial = Trial(SCAFFOLD(), GN, data, clip_norm=None, weight_decay=DECAY).run(2)
    first, second = trial.visits("one")
    control = memory(trial, "one")
    client = loaded(trial, "one", 2, second.down.under("state"))
    client.restore(second.before)
    (step,) = client.steps(1)
    parameters = dict(client.model.named_parameters())
    names = client.rules.names(Owner.SHARED, Owner.LOCAL)
    gradients = torch.autograd.grad(step.task_loss, [parameters[name] for name in names])
    for name, g in zip(names, gradients, strict=True):
        direction = g + DECAY * parameters[name].detach()
        if name in control:
            torch.testing.assert_close(control[name], direction, rtol=1e-3, atol=1e-5)
            c, own = second.down.under("target")[name], first.up.under("statistic")[name]  # c_i was 0 before
            direction = direction + c - own
        after = {**second.up.under("state"), **second.after}[name]
        torch.testing.assert_close(after, parameters[name].detach() - 0.05 * direction, rtol=1e-4, atol=1e-6)
    assert control.keys() == set(client.rules.names(Owner.SHARED)) == {n for n in names if not n.startswith("head.")}


def test_buffers_are_averaged_whatever_the_servers_step() -> None:
    """A running variance beyond the clients' would not be a variance; parameters go half the way."""
    trial = Trial(SCAFFOLD(server_lr=0.5), BN, ["large", "small"]).run(1)
    start, end = trial.history.servers
    states = [visit.up.under("state") for visit in trial.visits()]
    parameters = trial.side.statistic_shapes("train").keys()
    for name in start.keys() - {n for n in start if n.endswith("num_batches_tracked")}:
        mean = (states[0][name].double() + states[1][name].double()) / 2
        expected = (start[name] + mean) / 2 if name in parameters else mean
        torch.testing.assert_close(end[name].double(), expected, rtol=1e-5, atol=1e-7)
    assert {n for n in start if "running" in n}
    assert not any("running" in n for n in parameters)


def test_nothing_shared_is_nothing_to_correct() -> None:
    network = Network("wardround:cnn-bn", 20, 0)
    ours, alone = (Trial(method, network, ["large", "small"]).run(2) for method in (SCAFFOLD(), Isolated()))
    for one, other in zip(ours.visits(), alone.visits(), strict=True):
        assert same(one.after, other.after)


def test_without_images_the_server_stays_as_it_is() -> None:
    server = Server({"w": torch.tensor([9.0])}, {"w": torch.tensor([1.0])}, clients=2)
    empty = Reply("a", Message(named("state", {"w": torch.tensor([5.0])}), {"examples": 0}))
    SCAFFOLD(server_lr=0.5).combine(server, "train", iter([empty]))
    assert server.state == {"w": torch.tensor([9.0])}
    assert server.memory == {"w": torch.tensor([1.0])}


def test_a_message_on_its_way_does_not_change() -> None:
    """c is replaced, not moved in place."""
    trial = Trial(SCAFFOLD(), GN, ["large", "small"]).run(1)
    sent = dict(trial.loop.server.memory)
    copies = {name: tensor.clone() for name, tensor in sent.items()}
    trial.run(2)
    assert same(sent, copies)
    assert not same(sent, trial.loop.server.memory)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"momentum": 0.9}, r"training\.momentum = 0\.9: .*allowed: 0\)"),
        ({"optimizer": "adam"}, r'training\.optimizer = "adam": .*allowed: "sgd"\)'),
        ({"optimizer": "adamw"}, r'training\.optimizer = "adamw"'),
    ],
)
def test_other_optimisers_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SCAFFOLD().refuse(TrainingOptions(**keys))
    SCAFFOLD().refuse(TrainingOptions(weight_decay=0.1, lr_decay=0.9))


def test_clients_that_drop_out_do_not_count_as_answers() -> None:
    """|S| is of those that answered, not of those that were asked."""
    trial = Trial(SCAFFOLD(), GN, ["large", "small"])
    trial.loop.options = RoundOptions(quorum=0.5, evaluate_every=10**6, evaluate_server=False)
    answer = trial.answerer.answer

    def lossy(client: str, frame: bytes) -> bytes:
        return b"" if client == "small" else answer(client, frame)

    trial.answerer.answer = lossy  # type: ignore[method-assign]
    trial.run(1)
    for name, change in trial.visits("large")[0].up.under("statistic").items():
        torch.testing.assert_close(trial.loop.server.memory[name], change / 2)
