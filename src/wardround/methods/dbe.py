"""DBE: each client's domain bias goes into a personal vector, and what is shared is drawn to a common mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.federation.rounds import TRAIN
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Server
from wardround.methods.base import FedAvg, ServerSide
from wardround.methods.on_text import need_plain_features
from wardround.models.classifier import Classifier
from wardround.models.personal_vector import PersonalVector
from wardround.training.client import Client, Step
from wardround.training.options import TrainingOptions

MEANS = "means"


class DBE(FedAvg):
    """Zhang et al., NeurIPS 2023: domain bias eliminator, on top of federated averaging.

    Logits are `head(z + r_k)`: z are pooled features, r_k is a vector that stays at client k, starts at 0 and has an
    optimiser group of its own, without weight decay. Base and head are shared, whatever `model.head` says. A client
    minimises `L_task + kappa * mean_d 1/2 (m_k - m_g)^2`, where `m_k <- (1 - m) m_k + m mean(z)` with every batch;
    gradients pass through the batch alone. Each round m_k starts as the first batch's mean. The official code starts
    from 0 (`mean_start = "zero"`), which makes m_k too small, by `1 - (1 - m)^batches`: 0.41 with m = 0.1 and five.

    `m_g = sum_k p_k m_k` is found once, in an exchange before the first round: clients train the shared parameters as
    in that round, on the task alone, and send m_k; what this did to their weights is undone. m_g then stays, and
    clients that join later get it too. kappa and m are those of the official run on Fashion-MNIST. With kappa = 0 and
    `vector_lr = 0` this is federated averaging with a shared head.
    """

    name: ClassVar[str] = "dbe"
    title: ClassVar[str] = "DBE: domain bias in a personal vector"
    citation: ClassVar[str] = (
        "Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan. Eliminating Domain Bias for Federated Learning in Representation "
        "Space. NeurIPS 2023."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = "the trained blocks, buffers included; the head; the mean of pooled features"
    stays: ClassVar[str] = "the personal vector; a logit corrector"
    extra_cost: ClassVar[str] = "one round's local training before the first; a vector down a round"

    kappa: float = Field(50.0, ge=0, description="weight of the distance between the client's mean and the common one")
    momentum: float = Field(1.0, gt=0, le=1, description="weight of the new batch in the client's mean (m)")
    mean_start: Literal["first", "zero"] = Field(
        "first", description="a round's mean starts as that of its first batch, or at 0 as in the official code"
    )
    vector_lr: float | None = Field(
        None, ge=0, description="learning rate of the personal vector; none: as for the rest; 0: it stays 0"
    )

    def edit(self, model: Classifier, image_size: int) -> None:
        """Add r_k to the pooled features.

        Raises:
            InputError: `model.adapter` or `model.classifier` have put something else there.
        """
        need_plain_features(model, self.name)
        model.neck = PersonalVector(model.head.in_features)

    def rules(self, model: Classifier) -> Rules:
        """Base and head are shared, r_k is local."""
        return super().rules(model).shared(model.head).local(model.neck)

    def phases(self, round: int) -> Sequence[str]:
        """Before the first round the common mean is found."""
        return (MEANS, TRAIN) if round == 1 and self.kappa else (TRAIN,)

    def passes(self, training: TrainingOptions, round: int) -> int:
        """Those for the mean count in the first round, although their weights are discarded."""
        return training.local_epochs * len(self.phases(round))

    def sends_state(self, phase: str) -> bool:
        """The weights of the pass for the mean are discarded."""
        return phase != MEANS

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """m_k, once."""
        return {"mean": (model.head.in_features,)} if phase == MEANS else {}

    def target_shapes(self, side: ServerSide) -> Mapping[str, Sequence[int]]:
        """m_g, which is like m_k."""
        return side.statistic_shapes(MEANS)

    def train(self, client: Client, phase: str) -> float:
        """Local training, whose effect on the model is undone where it only served to find the mean."""
        if phase != MEANS:
            return super().train(client, phase)
        start = client.snapshot()
        loss = super().train(client, phase)
        client.restore(start)
        return loss

    def parameters(self, client: Client) -> list[nn.Parameter]:
        """All that are not frozen; for the mean the shared ones alone."""
        return client.owned(Owner.SHARED) if client.phase == MEANS else super().parameters(client)

    def optimizer(self, client: Client, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """r_k apart from the rest."""
        own = client.model.neck.parameters()
        return client.optimizer(client.apart(parameters, own, self.vector_lr, weight_decay=0.0))

    def loss(self, step: Step) -> Tensor:
        """The task loss and, once there is a common mean, kappa times the distance to it."""
        if not self.kappa:
            return super().loss(step)
        mean, target = self.running_mean(step), step.client.received.get("mean")
        task = super().loss(step)
        return task if target is None else task + self.kappa * (mean - target).square().mean() / 2

    def running_mean(self, step: Step) -> Tensor:
        """m_k `(d,)` with this batch taken in; gradients pass through the batch."""
        new = (step.features - step.client.model.neck.get_parameter("vector")).mean(0)
        old = step.client.scratch.get("mean", new if self.mean_start == "first" else torch.zeros_like(new))
        mean = torch.lerp(old, new, self.momentum)
        step.client.scratch["mean"] = mean.detach()
        return mean

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """m_k at the end of the pass."""
        return {"mean": client.scratch["mean"]} if client.phase == MEANS else {}

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """m_g; nothing before it is known."""
        return {name: tensor for name, tensor in server.memory.items() if name == "mean"}

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        """Keep m_g."""
        server.memory.update(average)
