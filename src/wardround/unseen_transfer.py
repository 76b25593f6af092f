"""What a federation has learned, put to use on a modality that it never saw, beside the same network from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wardround import run_folder
from wardround.answering import STATE, Predict, under
from wardround.config import Experiment
from wardround.errors import RunError
from wardround.evaluation.metrics import Metrics, evaluate_probabilities, softmax
from wardround.experiment import make_answerer, set_up
from wardround.federation.averaging import WeightedMean
from wardround.federation.checkpoints import Checkpoints
from wardround.federation.messages import Message, named
from wardround.federation.rounds import TRAIN
from wardround.federation.rules import Owner
from wardround.methods.fm2 import DOMAIN, MIXTURES, mixtures
from wardround.models.classifier import Classifier
from wardround.models.experts import expert_of
from wardround.training.client import Client, Step
from wardround.training.local import fit
from wardround.unseen import SITE, FewImages

State = Mapping[str, Tensor]

FRESH = ("head.", "corrector.", "prompts.", "extras.")
"""Parts that speak of the federation's own classes, or that a method keeps beside the network: they start anew."""

ROUTING = f"{DOMAIN}routing."


@dataclass(frozen=True)
class Outcome:
    """Of one fine-tuning.

    Attributes:
        metrics: on the modality's test images.
        loss: mean over all steps.
        taken: how many of the trained numbers began as the federation left them; an appended expert counts.
        trained: how many numbers trained.
    """

    metrics: Metrics
    loss: float
    taken: int
    trained: int


def learned_state(folder: Path) -> dict[str, Tensor]:
    """What the finished run in `folder` has learned: the server's entries, else the mean of its clients'.

    Every client that trained counts the same in the mean. RunError where the run left no whole checkpoint.
    """
    checkpoint = Checkpoints(folder / "checkpoints", None).latest()
    if checkpoint is None:
        raise RunError(f"{folder / 'checkpoints'}: holds no whole checkpoint")
    roster = json.loads((folder / run_folder.ROSTER).read_text(encoding="utf-8"))
    mean = WeightedMean()
    for entry in roster["clients"]:
        own = under(STATE, checkpoint.client(entry["name"])) if sum(entry["counts"]["train"]) else {}
        if own:
            mean.add(own, 1.0)
    return mean.result() | checkpoint.server().state


def start_of(learned: State, model: Classifier) -> dict[str, Tensor]:
    """The entries with which `model` begins: V, and M_d with one expert more, where the model has M_d."""
    found = {name: tensor for name, tensor in learned.items() if not name.startswith(FRESH)}
    found |= with_appended_expert(learned) if MIXTURES in model.extras else {}
    entries = model.state_dict()
    return {name: t for name, t in found.items() if name in entries and entries[name].shape == t.shape}


def with_appended_expert(learned: State) -> dict[str, Tensor]:
    """M_d's experts and, after the last, their mean, entry by entry; a gate gets the mean of its rows.

    M_d's classifier is not among them: it speaks of classes.
    """
    experts = {name: tensor for name, tensor in learned.items() if _number(name) is not None}
    count = len({_number(name) for name in experts})
    appended = {
        name.replace(".experts.0.", f".experts.{count}.", 1): _mean_over_experts(experts, name, count)
        for name in experts
        if _number(name) == 0
    }
    gate = {
        name: torch.cat([t, t.mean(0, keepdim=True)]) for name, t in learned.items() if name.startswith(ROUTING)
    }  # fmt: skip
    return experts | appended | gate


def _number(entry: str) -> int | None:
    """Which of M_d's experts an entry is part of."""
    return expert_of(entry) if entry.startswith(DOMAIN) else None


def _mean_over_experts(experts: State, first: str, count: int) -> Tensor:
    """The mean of one entry over all experts; `first` is its name in expert 0."""
    return torch.stack([experts[first.replace(".experts.0.", f".experts.{n}.", 1)] for n in range(count)]).mean(0)


def fine_tune(experiment: Experiment, few: FewImages, epochs: int, learned: State | None) -> Outcome:
    """Train the experiment's network on a few images of a new modality, and test it.

    The objective is the task loss of what the network predicts: FM²'s y through both mixtures, else its head's logits,
    whatever else the method adds in the federation. Optimiser, rate, batches, loss and augmentation are the
    experiment's. Fresh parts, the order of images and dropout depend on the seed alone, so that two calls differ in
    nothing but `learned`.

    Args:
        experiment: of the federation, everything `auto` decided.
        few: the images.
        epochs: passes over the training images.
        learned: what to begin with; None begins as the federation itself began.
    """
    setup = set_up(experiment, few.federation)
    answerer = make_answerer(setup, None, None, 1)
    client = answerer.load(
        SITE, Message(named(STATE, answerer.side.initial_state), {"round": 1, "phase": TRAIN})
    )  # fmt: skip
    start = {} if learned is None else start_of(learned, client.model)
    client.restore(start)
    predict = through_mixtures if MIXTURES in client.model.extras else through_head
    loss = _fit(client, predict, epochs)
    test = few.client.test
    metrics = evaluate_probabilities(softmax(answerer.logits(client, "test", test, predict)), test.labels)
    parameters = client.rules.named_parameters(client.model, Owner.SHARED, Owner.LOCAL)
    trained = {name: parameter.numel() for name, parameter in parameters.items()}
    return Outcome(metrics, loss, sum(n for name, n in trained.items() if name in start), sum(trained.values()))


def _fit(client: Client, predict: Predict, epochs: int) -> float:
    """Train all that is not frozen in one go; the mean loss."""
    parameters = client.owned(Owner.SHARED, Owner.LOCAL)

    def backward(step: Step) -> Tensor:
        client.shown = step.modality
        with client.arithmetic():
            logits = predict(client, step.inputs).float()
        loss = client.task_loss(logits, step.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer = client.optimizer([{"params": parameters}])
    return fit(client, parameters, optimizer, backward, client.steps(epochs, "unseen"))


def through_head(client: Client, inputs: Tensor) -> Tensor:
    """The network's own logits `(B, C)`, whatever its method predicts with."""
    logits: Tensor = client.model(inputs)
    return logits


def through_mixtures(client: Client, inputs: Tensor) -> Tensor:
    """FM²'s y `(B, C)`, of images whose modality is known."""
    logits: Tensor = mixtures(client.model)(client.model.features(inputs).float(), client.shown)
    return logits


def transfer(experiment: Experiment, folder: Path, few: FewImages, epochs: int) -> dict[str, Any]:
    """Both fine-tunings after the finished run in `folder`: from what it learned, and from scratch."""
    after = fine_tune(experiment, few, epochs, learned_state(folder))
    scratch = fine_tune(experiment, few, epochs, None)
    return {
        "federation": after.metrics,
        "scratch": scratch.metrics,
        "loss": {"federation": after.loss, "scratch": scratch.loss},
        "parameters": {"trained": after.trained, "taken": after.taken},
    }
