"""SCAFFOLD: control variates take the clients' drift out of every local step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.federation.rules import Owner
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg, Weights
from wardround.methods.proximal import anchors
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step
from wardround.training.options import TrainingOptions


class SCAFFOLD(FedAvg):
    """Karimireddy et al., ICML 2020, algorithm 1 with option II for the control variates.

    - Client i steps along `g + c - c_i`; after K steps at rate eta, `c_i+ = c_i - c + (w_t - w_i) / (K eta)`.
    - Server: `w <- w + server_lr * mean(w_i - w)`, `c <- c + |S|/N * mean(c_i+ - c_i)`, with |S|/N the share of the
      clients that answered.

    c and every c_i start at 0. They are as large as the shared parameters that train; what is frozen or local steps
    along g. K and eta are those of the round, so unequal numbers of steps and a decaying rate keep the identity. It
    needs plain SGD. Weight decay counts as part of the objective. Gradients are clipped once corrected: where
    `training.clip_norm` acts, c_i is the mean of clipped directions. Buffers are averaged as in FedAvg.
    """

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD: control variates against client drift"
    citation: ClassVar[str] = (
        "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for Federated "
        "Learning. ICML 2020."
    )
    skews: ClassVar[tuple[str, ...]] = ("label", "feature")
    travels: ClassVar[str] = (
        f"{FedAvg.travels}; c down and the change of c_i up, each as large as the trained parameters"
    )
    stays: ClassVar[str] = f"{FedAvg.stays}; the client's control variate c_i"
    extra_cost: ClassVar[str] = "twice the traffic; one pass over the parameters a step"

    weights: Weights = "uniform"
    server_lr: float = Field(1.0, gt=0, description="step of the server towards the clients' average (eta_g)")

    def refuse(self, training: TrainingOptions) -> None:
        """Raise `InputError` for any optimiser but plain SGD, whose path is the sum of its gradients."""
        if training.optimizer != "sgd":
            raise InputError(f'training.optimizer = "{training.optimizer}": scaffold needs plain SGD (allowed: "sgd")')
        if training.momentum:
            raise InputError(f"training.momentum = {training.momentum:g}: scaffold needs plain SGD (allowed: 0)")

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """A change of the control variate for every parameter that has one."""
        return {name: tuple(p.shape) for name, p in self.rules(model).named_parameters(model, Owner.SHARED).items()}

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """Local training with corrected gradients, and then the new control variate."""
        parameters = client.rules.named_parameters(client.model, Owner.SHARED)
        own, common = (_variates(kept, parameters) for kept in (client.memory, client.received))
        start = anchors(list(parameters.values()))
        corrections = [c - c_i for c, c_i in zip(common, own, strict=True)]
        client.scratch |= {"corrected": list(zip(parameters.values(), corrections, strict=True)), "steps": 0}
        loss = super().train(client, phase)
        pace = client.scratch["steps"] * client.rate()
        changes = [(w_t - w.detach()) / pace - c for w_t, w, c in zip(start, parameters.values(), common, strict=True)]
        client.scratch["changes"] = dict(zip(parameters, changes, strict=True))
        client.memory |= {name: c_i + change for name, c_i, change in zip(parameters, own, changes, strict=True)}
        return loss

    def backward(self, step: Step) -> Tensor:
        """The gradient, and c - c_i on top."""
        loss = super().backward(step)
        trained = [(p.grad, correction) for p, correction in step.client.scratch["corrected"] if p.grad is not None]
        if trained:
            torch._foreach_add_([gradient for gradient, _ in trained], [correction for _, correction in trained])
        step.client.scratch["steps"] += 1
        return loss

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The change of c_i in this round."""
        changes: dict[str, Tensor] = client.scratch["changes"]
        return changes

    # ---- server half

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """c; nothing in the first round, when it is 0."""
        return server.memory

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        """Move c by the mean change; `combine` shortens the step to the share of the clients that answered."""
        server.memory |= {name: change + server.memory.get(name, 0) for name, change in average.items()}

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average as ever, counting the replies; then go as far towards the averages as `server_lr` and |S|/N say."""
        before, answered = server.snapshot(), itertools.count()
        super().combine(server, phase, (reply for reply, _ in zip(replies, answered, strict=False)))
        share = next(answered) / server.clients
        for name, control in server.memory.items():
            server.memory[name] = before.memory.get(name, torch.zeros_like(control)).lerp(control, share)
            server.state[name] = before.state[name].lerp(server.state[name], self.server_lr)


def _variates(kept: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """A control variate for each of `parameters`; 0 before the first."""
    return [kept[name] if name in kept else torch.zeros_like(p) for name, p in parameters.items()]
