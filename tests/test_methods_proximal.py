"""FedProx, FedBN, FedPer, FedRep and Ditto: each rule by hand, what stands still, and what each reduces to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linear_trial import DECAY, LR, batches, gradient, linear_trial, loaded, matrix, memory, partial
from wardround.errors import InputError
from wardround.federation.rules import BATCH_NORMS, Owner, modules_of_type
from wardround.methods.base import FedAvg, Method
from wardround.methods.check import NETWORKS
from wardround.methods.ditto import Ditto
from wardround.methods.fedbn import FedBN
from wardround.methods.fedco2 import FedCO2
from wardround.methods.fedper import FedPer
from wardround.methods.fedprox import FedProx
from wardround.methods.fedrep import FedRep
from wardround.methods.isolated import Isolated
from wardround.methods.proximal import anchors, pull
from wardround.methods.trial import Network, Trial
from wardround.training.client import Client, Step

BN, GN = NETWORKS["bn-cnn"], NETWORKS["gn-cnn"]
PLAIN_BN, PLAIN_GN = (Network(f"wardround:cnn-{norm}", 20, 2, dropout=0.0) for norm in ("bn", "gn"))
BOTH = ("large", "small")
SHARES = {"large": 13 / 22, "small": 9 / 22}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def alike(one: Trial, other: Trial) -> bool:
    """Whether the clients of two trials sent and kept the same, to the bit."""
    pairs = list(zip(one.visits(), other.visits(), strict=True))
    return all(same(a.up.under("state"), b.up.under("state")) and same(a.after, b.after) for a, b in pairs)


def near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def pulled(
    trial: Trial, client: str, round: int, v: np.ndarray, w_t: np.ndarray, pull: float, *order: object
) -> np.ndarray:
    """Gradient descent from `v` on the task loss plus `pull / 2 ||v - w_t||^2`."""
    rate = LR * trial.options.lr_decay ** (round - 1)
    for batch in batches(trial, client, round, *order):
        v = v - rate * (gradient(v, batch) + pull * (v - w_t))
    return v


# ---- the proximal term


@pytest.mark.parametrize("strength", [2.0, 0.25])
def test_the_pulls_gradient(strength: float) -> None:
    """Against autograd of the formula, on top of a task's gradient; a parameter that the task misses is pulled too."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    start = anchors(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn(parameter.shape)
    distance = sum(((p - s) ** 2).sum() for p, s in zip(parameters, start, strict=True))
    task = parameters[0].sin().sum()
    expected = torch.autograd.grad(task + strength / 2 * distance, parameters)
    parameters[0].sin().sum().backward()
    pull(strength, parameters, start)
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def test_fedprox_by_hand() -> None:
    """Two clients, two rounds, three and two steps; the anchor is the model as received."""
    trial = linear_trial(FedProx(mu=0.8), lr_decay=0.5).run(2)
    w = matrix(trial.history.servers[0])
    for round in (1, 2):
        w = sum(p * pulled(trial, client, round, w, w, 0.8) for client, p in SHARES.items())  # type: ignore[assignment]
        near(matrix(trial.history.servers[round]), w)
    free = linear_trial(FedAvg(), lr_decay=0.5).run(2)
    assert np.abs(matrix(free.history.servers[2]) - w).max() > 1e-3


@pytest.mark.parametrize("network", [BN, GN], ids=["bn", "gn"])
def test_fedprox_without_its_term_is_federated_averaging(network: Network) -> None:
    ours, theirs = (Trial(method, network, BOTH).run(2) for method in (FedProx(mu=0.0), FedAvg()))
    assert alike(ours, theirs)
    assert not alike(Trial(FedProx(mu=0.5), network, BOTH).run(2), theirs)


@pytest.mark.parametrize("method", [FedProx(mu=0.5), Ditto(strength=0.5, schedule="interleaved")])
def test_with_nothing_shared_nothing_pulls(method: Method) -> None:
    """A local head on a frozen backbone: what is local is never held to anything."""
    network = Network("wardround:cnn", 20, 0, dropout=0.0)
    ours, alone = (Trial(m, network, BOTH).run(2) for m in (method, Isolated()))
    assert all(same(a.after, b.after) for a, b in zip(ours.visits(), alone.visits(), strict=True))
    assert method.name != "ditto" or same(memory(ours, "small"), alone.visits("small")[-1].after)


# ---- Ditto


@pytest.mark.parametrize(
    ("method", "order"),
    [
        (Ditto(strength=0.5), (1, "personal")),
        (Ditto(strength=0.5, epochs=2), (2, "personal")),
        (Ditto(strength=0.0), (1, "personal")),
        (Ditto(strength=2.0, schedule="interleaved"), (1, "batches")),
    ],
    ids=["its own batches", "two epochs", "no pull", "the batches of w"],
)
def test_ditto_by_hand(method: Ditto, order: tuple[object, ...]) -> None:
    """Two of three clients a round: v_k waits while k is away, and starts as the first model that k receives."""
    trial = partial(linear_trial(method, *BOTH, "single", lr_decay=0.5), 0.67).run(3)
    v: dict[str, np.ndarray] = {}
    for visit in trial.visits():
        w_t = matrix(trial.history.servers[visit.round - 1])
        v[visit.client] = pulled(
            trial, visit.client, visit.round, v.get(visit.client, w_t), w_t, method.strength, *order
        )
    assert len({visit.client for visit in trial.visits(round=1)}) == 2
    assert len(v) == 3
    for client, expected in v.items():
        near(matrix(memory(trial, client)), expected)


@pytest.mark.parametrize("schedule", ["epochs", "interleaved"])
def test_dittos_global_half_is_federated_averaging(schedule: str) -> None:
    """To the bit, with dropout, buffers and a local head."""
    method = Ditto(strength=0.3, schedule=schedule, epochs=2)  # type: ignore[arg-type]
    assert alike(Trial(method, BN, BOTH).run(2), Trial(FedAvg(), BN, BOTH).run(2))


def test_without_a_pull_v_is_isolated_training() -> None:
    """To the bit on the same batches, running statistics and head included; on others it still ignores the rest."""
    ours, alone = (Trial(m, PLAIN_BN, BOTH).run(2) for m in (Ditto(strength=0.0, schedule="interleaved"), Isolated()))
    assert all(same(memory(ours, client), alone.visits(client)[-1].after) for client in BOTH)
    for strength, ignores in ((0.0, True), (0.5, False)):
        together, single = (Trial(Ditto(strength=strength), BN, names).run(2) for names in (BOTH, ("small",)))
        assert same(memory(together, "small"), memory(single, "small")) is ignores


def test_v_is_the_personal_model_and_its_statistics_are_its_own() -> None:
    """The last client's model is the personal one after the last round; the reply was w."""
    trial = Trial(Ditto(epochs=2), BN, ["large"]).run(2)
    kept, sent = memory(trial, "large"), trial.visits()[-1].up.under("state")
    rules, model = trial.side.rules, trial.answerer.model.state_dict()
    assert same(kept, rules.pick(model, Owner.SHARED, Owner.LOCAL))
    assert not same({name: kept[name] for name in sent}, sent)
    counter = next(name for name in sent if name.endswith("num_batches_tracked"))
    assert (int(sent[counter]), int(kept[counter])) == (2 * 3, 2 * 2 * 3)


def test_lambda_is_the_key() -> None:
    assert Ditto(**{"lambda": 0.1}).strength == 0.1
    assert Ditto().to_toml()["lambda"] == 1.0


# ---- FedBN


def test_fedbn_keeps_every_batch_norm_at_its_client() -> None:
    trial = Trial(FedBN(), BN, BOTH).run(1)
    inside = [f"tuned.0.1.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert {owner for name, owner in trial.side.rules.owners.items() if name in inside} == {Owner.LOCAL}
    assert not {name for name in trial.visits()[0].up.under("state") if name in inside}
    frozen = modules_of_type(trial.model.frozen, BATCH_NORMS)
    assert frozen
    assert all(trial.side.rules.owners[f"frozen.{name}"] is Owner.FROZEN for name in trial.model.frozen.state_dict())


@pytest.mark.parametrize(("weights", "share"), [("uniform", 1 / 2), ("examples", 13 / 22)])
def test_fedbn_averages_with_equal_weights(weights: str, share: float) -> None:
    trial = Trial(FedBN(weights=weights), BN, BOTH).run(1)  # type: ignore[arg-type]
    large, small = (visit.up.under("state") for visit in trial.visits())
    for name, tensor in trial.history.servers[1].items():
        torch.testing.assert_close(tensor, share * large[name] + (1 - share) * small[name])


def test_fedbn_without_batch_norms_says_so_and_is_federated_averaging() -> None:
    (caution,) = FedBN().cautions(GN.model(FedBN()), {"large": 13})
    assert caution.startswith("fedbn: no batch norm")
    (inherited,) = FedCO2().cautions(GN.model(FedCO2()), {"large": 13})
    assert inherited.startswith("fedco2: no batch norm")
    assert "wardround:cnn-gn" in caution
    assert FedBN().cautions(BN.model(FedBN()), {"large": 13}) == []
    only_frozen = Network("wardround:cnn-bn", 20, 1)
    assert FedBN().cautions(only_frozen.model(FedBN()), {"large": 13})
    assert alike(Trial(FedBN(weights="examples"), GN, BOTH).run(2), Trial(FedAvg(), GN, BOTH).run(2))


# ---- FedPer and FedRep


@pytest.mark.parametrize(
    ("blocks", "local"), [(0, ["head"]), (1, ["head", "tuned.1"]), (2, ["head", "tuned.0", "tuned.1"])]
)
@pytest.mark.parametrize("kind", [FedPer, FedRep])
def test_the_last_blocks_may_be_personal_too(kind: type[FedPer], blocks: int, local: list[str]) -> None:
    """And the head always is, whatever the model says."""
    network = Network("wardround:cnn-bn", 20, 2, head="shared")
    method = kind(personal_blocks=blocks)
    names = method.rules(network.model(method)).names(Owner.LOCAL)
    assert sorted({name if name.startswith("head") else name[:7] for name in names}) == sorted(
        {f"head.{part}" for part in ("weight", "bias")} | set(local) - {"head"}
    )


@pytest.mark.parametrize("kind", [FedPer, FedRep])
def test_there_must_be_so_many_blocks(kind: type[FedPer]) -> None:
    with pytest.raises(InputError, match=r"personal_blocks = 3: 2 blocks train \(allowed: 0 to 2\)"):
        BN.model(kind(personal_blocks=3))


def test_fedper_is_federated_averaging_with_a_local_head() -> None:
    """To the bit: one optimiser trains base and head."""
    shared_head = Network("wardround:cnn-bn", 20, 2, head="shared")
    assert alike(Trial(FedPer(), shared_head, BOTH).run(2), Trial(FedAvg(), BN, BOTH).run(2))
    assert not alike(Trial(FedRep(), shared_head, BOTH).run(2), Trial(FedAvg(), BN, BOTH).run(2))


@pytest.mark.parametrize(
    ("method", "passes", "epochs"),
    [(FedRep(), 1, 1), (FedRep(head_epochs=2), 2, 1), (FedRep(schedule="halves"), None, 2)],
    ids=["1 + 1", "2 + 1", "halves"],
)
def test_fedrep_by_hand(method: FedRep, passes: int | None, epochs: int) -> None:
    """The head's gradient steps on the received base, then the base's under the new head; a loop of plain tensors."""
    keys = {"clip_norm": None, "weight_decay": DECAY, "local_epochs": epochs}
    trial = Trial(method, PLAIN_GN, BOTH, **keys).run(1)
    client = loaded(trial, "small")
    base, head = client.owned(Owner.SHARED), client.owned(Owner.LOCAL)
    own = list(client.steps(epochs))  # 2 an epoch
    turns = (
        [(head, own[:2]), (base, own[2:])] if passes is None else [(head, client.steps(passes, "head")), (base, own)]
    )
    for weights, steps in turns:
        for step in steps:
            for weight, slope in zip(weights, torch.autograd.grad(step.task_loss, weights), strict=True):
                weight.data -= 0.05 * (slope + DECAY * weight.data)
    (visit,) = trial.visits("small")
    after = {**visit.up.under("state"), **visit.after}
    for name, expected in client.snapshot().items():
        torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-6)


class HeadsTurn(FedRep):
    """Only the first turn."""

    def turns(self, client: Client) -> tuple[Iterable[Step], Iterable[Step]]:
        return super().turns(client)[0], []


class BasesTurn(FedRep):
    """Only the second turn."""

    def turns(self, client: Client) -> tuple[Iterable[Step], Iterable[Step]]:
        return [], super().turns(client)[1]


def test_each_turn_leaves_the_other_half_alone() -> None:
    """Bit for bit; running statistics and counters of the base's batch norms included."""
    (head,) = Trial(HeadsTurn(), BN, ["large"]).run(1).visits()
    assert head.changed == {"head.weight", "head.bias"}
    (base,) = Trial(BasesTurn(), BN, ["large"]).run(1).visits()
    assert base.changed == base.up.under("state").keys()


def test_halves_see_the_batches_of_federated_averaging() -> None:
    """As many and the same ones, split between the turns; an odd one is the base's."""
    method = FedRep(schedule="halves")
    trial = Trial(method, PLAIN_GN, ["large"], local_epochs=3)
    client = loaded(trial, "large")
    head, base = (list(turn) for turn in method.turns(client))
    assert (len(head), len(base)) == (4, 5)
    for ours, theirs in zip(itertools.chain(head, base), client.steps(3), strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)
