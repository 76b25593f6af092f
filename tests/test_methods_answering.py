"""The client half: what it loads, what it keeps, what it refuses to send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from wardround.answering import MEMORY, PERSONAL, STATE
from wardround.federation.messages import BadMessage, Message, named
from wardround.federation.rounds import EVALUATE
from wardround.federation.server import Server
from wardround.methods.base import FedAvg
from wardround.methods.pafp_alt import PAFPAlt
from wardround.methods.trial import Network, Trial
from wardround.models.classifier import Classifier
from wardround.training.client import Client

BN = Network("wardround:cnn-bn", 20, 2)


def message(trial: Trial, round: int = 1, **scalars: object) -> Message:
    """What the server sends at first."""
    state = named("state", trial.side.initial_state)
    return Message(state, {"round": round, "phase": "train", **scalars})


class Breaks(FedAvg):
    """Leaves a NaN in one of its local entries, from the second round on."""

    def train(self, client: Client, phase: str) -> float:
        loss = super().train(client, phase)
        if client.round > 1:
            with torch.no_grad():
                client.model.head.bias[0] = math.nan
        return loss


def test_a_local_entry_that_is_not_finite_is_not_kept() -> None:
    """Nobody else sees local state: kept once, a NaN would spoil every later round of this client."""
    trial = Trial(Breaks(), BN, ["large"])
    trial.answerer.reply("large", message(trial))
    kept = trial.answerer.store.get("large")
    with pytest.raises(
        BadMessage, match=r"'state/head.bias' holds 1 values that are not finite; a smaller training.lr"
    ):
        trial.answerer.reply("large", message(trial, round=2))
    after = trial.answerer.store.get("large")
    assert all(torch.equal(tensor, after[name]) for name, tensor in kept.items())


class Remembers(FedAvg):
    """Counts its rounds in the client's memory, in place."""

    broken: ClassVar[bool] = False

    def train(self, client: Client, phase: str) -> float:
        client.memory.setdefault("rounds", torch.zeros(1)).add_(1)
        loss = super().train(client, phase)
        if self.broken:
            with torch.no_grad():
                client.model.tuned[0][0].bias.fill_(math.nan)  # type: ignore[index, union-attr, operator]
        return loss


class RemembersAndBreaks(Remembers):
    broken: ClassVar[bool] = True


def test_memory_lasts_at_its_client() -> None:
    trial = Trial(Remembers(), BN, ["large", "small"])
    for client, round in (("large", 1), ("small", 1), ("large", 2)):
        trial.answerer.reply(client, message(trial, round))
    assert [trial.answerer.store.get(c)[f"{MEMORY}/rounds"].item() for c in ("large", "small")] == [2, 1]


def test_memory_of_a_failed_round_is_forgotten() -> None:
    """Even though the method changed it in place."""
    trial = Trial(Remembers(), BN, ["large"])
    trial.answerer.reply("large", message(trial))
    trial.answerer.method = RemembersAndBreaks()
    with pytest.raises(BadMessage, match="training went wrong: tensor 'state/tuned"):
        trial.answerer.reply("large", message(trial, round=2))
    assert trial.answerer.store.get("large")[f"{MEMORY}/rounds"].item() == 1


class Spoils(FedAvg):
    """Changes in place what the server sent."""

    def target_shapes(self, side: object) -> Mapping[str, Sequence[int]]:
        return {"goal": (2,)}

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        return {"goal": torch.ones(2)}

    def train(self, client: Client, phase: str) -> float:
        client.log["goal"] = float(client.received["goal"].sum())
        client.received["goal"].mul_(5)
        return super().train(client, phase)


def test_one_clients_targets_are_not_the_nexts() -> None:
    visits = Trial(Spoils(), BN, ["large", "small"]).run(1).visits()
    assert [visit.up.scalars["log"]["goal"] for visit in visits] == [2, 2]


class Announces(FedAvg):
    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        return {"mean": (2,)}

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        return {"mean": torch.tensor([float(len(client)), 1.0])} if client.name != "small" else {}


def test_a_missing_statistic_is_an_error_and_no_zero() -> None:
    """Zeros would pull the server's average towards nothing at all. A client without images has none to give."""
    trial = Trial(Announces(), BN)
    assert trial.answerer.reply("large", message(trial)).tensors["statistic/mean"].tolist() == [13, 1]
    assert trial.answerer.reply("empty", message(trial)).tensors["statistic/mean"].tolist() == [0, 0]
    with pytest.raises(BadMessage, match="'statistic/mean' is missing"):
        trial.answerer.reply("small", message(trial))


# ---- messages


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state/head.weight": torch.ones(4, 512)}, "unexpected tensor 'state/head.weight'"),
        ({"state/frozen.0.0.bias": torch.ones(32)}, "unexpected tensor 'state/frozen.0.0.bias'"),
        ({"target/0/mean": torch.ones(1)}, "unexpected tensor 'target/0/mean'"),
        ({"state/tuned.0.0.bias": torch.full((64,), math.inf)}, "64 values that are not finite"),
        ({"state/tuned.0.0.bias": torch.ones(3)}, r"shape \(3,\), expected \(64,\)"),
    ],
)
def test_a_client_refuses_what_it_does_not_expect(change: dict[str, Tensor], problem: str) -> None:
    """A server can neither overwrite a client's own parts nor its frozen ones."""
    trial = Trial(FedAvg(), BN, ["large"])
    frame = trial.answerer.codec.encode(Message({**message(trial).tensors, **change}, message(trial).scalars))
    with pytest.raises(BadMessage, match=problem):
        trial.answerer.answer("large", frame)
    assert not trial.answerer.store.get("large")


def test_evaluation_alone_trains_nothing() -> None:
    trial = Trial(FedAvg(), BN, ["large"])
    answer = trial.answerer.reply(
        "large", Message(message(trial).tensors, {"round": 1, "phase": EVALUATE, "evaluate_received": True})
    )
    assert not answer.tensors
    assert answer.scalars["received"]["test"]["n"] == 4
    assert not trial.answerer.store.get("large")


def test_received_is_before_training_and_personal_after() -> None:
    trial = Trial(FedAvg(), BN, ["large"], lr=1.0)
    answer = trial.answerer.reply("large", message(trial, evaluate_received=True, evaluate_personal=True))
    client = trial.answerer.load("large", message(trial))
    assert client.model is trial.model
    before = trial.answerer.logits(client, "test", trial.federation.client("large").test)
    assert answer.scalars["received"]["test"] != answer.scalars["personal"]["test"]
    trial.answerer.store.put("large", {})
    fresh = trial.answerer.load("large", message(trial))
    start = trial.answerer.logits(fresh, "test", trial.federation.client("large").test)
    assert not np.allclose(before, start)  # the local head has trained


def test_an_empty_split_has_empty_logits() -> None:
    trial = Trial(FedAvg(), BN, ["empty"])
    client = trial.answerer.load("empty", message(trial))
    logits = trial.answerer.logits(client, "train", trial.federation.client("empty").train)
    assert logits.shape == (0, 4)
    assert logits.dtype == np.float32


@pytest.mark.parametrize("cache", [True, False])
def test_the_frozen_blocks_compute_alike_in_training_and_evaluation(cache: bool) -> None:
    """`precision` is of the trained blocks, wherever they run: the frozen ones stay in float32."""
    trial = Trial(FedAvg(), BN, ["large"], precision="bfloat16", cache=cache)
    seen: dict[str, set[bool]] = {"frozen": set(), "tuned": set()}
    for part, module in (("frozen", trial.model.frozen), ("tuned", trial.model.tuned[1])):
        module.register_forward_hook(lambda *_, part=part: seen[part].add(torch.is_autocast_enabled("cpu")))
    trial.run(1)
    assert seen == {"frozen": {False}, "tuned": {True}}


# ---- checkpoints


def test_a_restored_client_goes_on_where_it_was(tmp_path: Path) -> None:
    """Local state of a checkpoint is taken over; the final personal model beside it is not local state."""
    trial = Trial(PAFPAlt(), BN, ["large", "small"]).run(2)
    states = {name: trial.answerer.store.get(name) for name in ("large", "small")}
    fresh = trial.new_answerer()
    extra = {f"{PERSONAL}/tuned.0.0.bias": torch.ones(64)}
    fresh.restore({name: {**state, **extra} for name, state in states.items()})
    frame = trial.answerer.codec.encode(
        Message(
            named("state", trial.history.servers[-1]) | named("target", trial.method.targets(trial.loop.server, "")),
            {"round": 3, "phase": "train"},
        )
    )
    for client in ("large", "small"):
        ours, theirs = (a.codec.decode(a.answer(client, frame)) for a in (trial.answerer, fresh))
        assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())
        assert not any(name.startswith(PERSONAL) for name in fresh.store.get(client))
        assert any(name.startswith(STATE) for name in fresh.store.get(client))
