"""Fed-CO2: an online model in the federation and an offline one beside it teach each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from wardround.federation.messages import Message, named
from wardround.federation.rounds import TRAIN
from wardround.federation.server import Reply, Server
from wardround.methods.base import ServerSide
from wardround.methods.fedbn import FedBN
from wardround.methods.peers import crossed_loss, distillation_loss
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step
from wardround.training.options import TrainingOptions

OFFLINE = "offline"


class FedCO2(FedBN):
    """Cai et al., NeurIPS 2023. An online model, shared as in FedBN, and an offline one that is never averaged.

    From a client's second round on, either takes one epoch of `KL(teacher || student)`, the teacher being the other
    model as the round began, in eval mode. Then either takes the local epochs on `L(z, y) + sum_j L(C_j(f), y)`: L is
    the task loss, f the model's features, C_j the offline classifier of client j != k as that client last sent it.
    Both models see the same batches, as in the authors' loop. The prediction is the sum of both models' logits; the
    server's model is the online one alone. The authors' variant for label skew has both switches off; the online model
    is then FedBN's, to the bit. The offline model starts as the first online model that its client receives. In the
    first round nobody has sent a classifier; the authors' code then takes K - 1 copies of the initial one.
    """

    name: ClassVar[str] = "fedco2"
    title: ClassVar[str] = "Fed-CO2: an online and an offline model that cooperate"
    citation: ClassVar[str] = (
        "Cai, Shi, Huang, Wang. Fed-CO2: Cooperation of Online and Offline Models for Severe Data Heterogeneity in "
        "Federated Learning. NeurIPS 2023."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = f"{FedBN.travels}; the offline classifiers, one up and those of all others down"
    stays: ClassVar[str] = f"the offline model but for its classifier; {FedBN.stays}"
    extra_cost: ClassVar[str] = "a second model to train; a pass of distillation for each, with a teacher beside it"
    individual: ClassVar[bool] = True
    predicts_from_memory: ClassVar[bool] = True

    distil: bool = Field(True, description="mutual distillation before the supervised epochs")
    cross_classifiers: bool = Field(True, description="a loss through the other clients' offline classifiers")

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """The offline classifier, where others learn from it."""
        classes, d = model.head.weight.shape
        return {"weight": (classes, d), "bias": (classes,)} if self.cross_classifiers else {}

    def target_shapes(self, side: ServerSide) -> Mapping[str, Sequence[int]]:
        """The others' classifiers, one upon another: `(K - 1, C, d)` and `(K - 1, C)`."""
        return {part: (-1, *shape) for part, shape in side.statistic_shapes(TRAIN).items()}

    def passes(self, training: TrainingOptions, round: int) -> int:
        """For each model the supervised ones and, from the client's second round on, one of distillation."""
        return 2 * (training.local_epochs + int(self.distil and round > 1))

    def train(self, client: Client, phase: str) -> float:
        """The online model's passes, then the offline one's; returns the online model's mean loss."""
        offline = Message(client.memory).under(OFFLINE) or client.snapshot()
        teachers = (client.reference(offline), client.reference()) if self.distil and client.memory else (None, None)
        loss = self._learn(client, phase, teachers[0])
        online = client.snapshot()
        client.restore(offline)
        self._learn(client, phase, teachers[1])
        client.memory |= named(OFFLINE, client.snapshot())
        client.scratch.pop(OFFLINE, None)
        client.restore(online)
        return loss

    def _learn(self, client: Client, phase: str, teacher: Classifier | None) -> float:
        """Distillation where there is a teacher, then the supervised epochs; returns the latter's mean loss."""
        if teacher is not None:
            client.scratch["teacher"] = teacher
            super().train(client, phase)
        client.scratch["teacher"] = None
        return super().train(client, phase)

    def steps(self, client: Client) -> Iterable[Step]:
        """The supervised epochs, or one epoch of distillation."""
        return super().steps(client) if client.scratch["teacher"] is None else client.steps(1, "distillation")

    def loss(self, step: Step) -> Tensor:
        """The distance to the teacher; or the task loss, through the model's own and the others' classifiers."""
        if step.client.scratch["teacher"] is not None:
            return distillation_loss(step, step.client.scratch["teacher"])
        crossed = crossed_loss(step, **step.client.received) if step.client.received else 0.0
        return super().loss(step) + crossed

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The offline classifier."""
        parts = ("weight", "bias") if self.cross_classifiers else ()
        return {part: client.memory[f"{OFFLINE}/head.{part}"] for part in parts}

    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        """The sum of both models' logits; the online one's before there is an offline one."""
        online = super().predict(client, inputs)
        if client.memory and OFFLINE not in client.scratch:
            client.scratch[OFFLINE] = client.reference(Message(client.memory).under(OFFLINE))
        return online + client.scratch[OFFLINE](inputs) if client.memory else online

    def predict_received(self, client: Client, inputs: Tensor) -> Tensor:
        """The online model's logits."""
        return super().predict(client, inputs)

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """The classifiers of all clients but `client` that have sent one, in the order of their names."""
        parts = {part: Message(server.memory).under(part) for part in ("weight", "bias")}
        others = sorted(parts["weight"].keys() - {client})
        return {part: torch.stack([of[name] for name in others]) for part, of in parts.items()} if others else {}

    def digest(self, reply: Reply) -> Mapping[str, Tensor]:
        """Classifiers are kept, not averaged."""
        return {}

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average as FedBN does, and keep every client's last classifier as `weight/CLIENT` and `bias/CLIENT`."""
        sent: dict[str, Tensor] = {}
        super().combine(server, phase, (_noted(reply, sent) for reply in replies))
        server.memory = server.memory | sent


def _noted(reply: Reply, sent: dict[str, Tensor]) -> Reply:
    """The reply as it is; in `sent` also the classifier of a client that has images."""
    if reply.examples:
        sent |= {f"{part}/{reply.client}": tensor for part, tensor in reply.message.under("statistic").items()}
    return reply
