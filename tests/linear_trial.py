"""A federation that NumPy can follow: softmax regression on frozen features, trained by plain gradient descent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from wardround.answering import MEMORY, under
from wardround.federation.messages import Message, named
from wardround.federation.rounds import RoundOptions
from wardround.methods.base import Method
from wardround.methods.trial import CLASSES, Network, Trial
from wardround.training.client import Client

LINEAR = Network("wardround:cnn", 20, 0, head="shared", dropout=0.0)
LR, DECAY = 0.5, 0.01
TRAINING = {"lr": LR, "weight_decay": DECAY, "loss": "cross-entropy", "class_weights": "none", "clip_norm": None}

Batch = tuple[np.ndarray, np.ndarray]


def linear_trial(method: Method, *clients: str, **training: Any) -> Trial:
    """A trial of a linear model. With batches of 4, "large" takes 3 steps an epoch, "small" 2 and "single" 1."""
    return Trial(method, LINEAR, clients or ("large", "small"), **TRAINING | training)


def matrix(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """The head's weight and bias, or what goes with them, side by side: float64 `(C, F + 1)`."""
    weight, bias = (tensors[f"head.{part}"].double().numpy() for part in ("weight", "bias"))
    return np.concatenate([weight, bias[:, None]], 1)


def loaded(trial: Trial, client: str, round: int = 1, state: Mapping[str, Tensor] | None = None) -> Client:
    """`client` as it begins `round`, in a model of its own; `state` is what the server has sent."""
    sent = named("state", trial.side.initial_state if state is None else state)
    return trial.new_answerer().load(client, Message(sent, {"round": round, "phase": "train"}))


def batches(trial: Trial, client: str, round: int, *arguments: Any, **keywords: Any) -> Iterator[Batch]:
    """The batches of `Client.steps` as features with a 1 at the end, `(B, F + 1)`, and labels `(B,)`."""
    for step in loaded(trial, client, round).steps(*arguments or (trial.options.local_epochs,), **keywords):
        x = trial.model.pool(step.inputs).double().numpy()
        yield np.concatenate([x, np.ones((len(x), 1))], 1), step.labels.numpy()


def gradient(w: np.ndarray, batch: Batch, decay: float = DECAY) -> np.ndarray:
    """Of the mean cross-entropy, and of `decay / 2 ||w||^2`, at `w`, `(C, F + 1)`."""
    x, y = batch
    logits = x @ w.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return (p - np.eye(CLASSES)[y]).T @ x / len(y) + decay * w


def memory(trial: Trial, client: str) -> dict[str, Tensor]:
    """What the method has kept at `client`."""
    return under(MEMORY, trial.answerer.store.get(client))


def partial(trial: Trial, participation: float) -> Trial:
    """The same trial with only some clients in a round."""
    trial.loop.options = RoundOptions(
        quorum=1.0, evaluate_every=10**6, evaluate_server=False, participation=participation
    )
    return trial
