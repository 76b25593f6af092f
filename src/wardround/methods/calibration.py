"""What CCVR adds to a method: an exchange of features' moments after the last round, and a new training of the head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround import seeds
from wardround.errors import InputError
from wardround.federation.messages import Message, named
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Reply, Server
from wardround.methods.base import Method
from wardround.methods.class_gaussians import ClassGaussians, class_moments, retrain
from wardround.models.classifier import Classifier
from wardround.training.client import Client

if TYPE_CHECKING:
    Hooks = Method
else:
    Hooks = object  # were the mixin a Method itself, it would reset fields that the method below it has changed

MOMENTS, UNCALIBRATED = "moments", "uncalibrated"
HEAD = ("head.weight", "head.bias")  # as in the state of every Classifier


class Calibration(Hooks):
    """CCVR (Luo et al., NeurIPS 2021) on top of a method that shares its feature extractor and its head.

    After the last round its clients measure how the features of their training images are distributed under the final
    global model, in eval mode: n_kc, mu_kc, Sigma_kc for each class c. The server pools them (equations 3 and 4), draws
    `samples` virtual features a class from N(mu_c, Sigma_c), and trains the head on these, from where it was, by SGD
    with momentum 0.9 on the plain cross-entropy in batches of 64.

    The result is the server's model in the final evaluation; personal models are those of the last local training.
    A class without images is left out, a single image has no spread; few images can be told from their moments. No
    official code is known; defaults are of smduan/Fed-CCVR.
    """

    samples: int = Field(2000, ge=1, description="virtual features a class")
    covariance: Literal["full", "diagonal", "shrunk"] = Field(
        "full", description="of a class's features; diagonal: variances, far less to send; shrunk: for rare classes"
    )
    calibration_epochs: int = Field(10, ge=1, description="passes over the virtual features")
    calibration_lr: float = Field(0.001, gt=0, description="learning rate on the virtual features")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Let the method edit `model`. InputError where features or head are not the same for all clients."""
        super().edit(model, image_size)
        if not isinstance(model.head, nn.Linear):
            raise InputError(f"method.name = {self.name}: CCVR trains a linear head, which this method does not have")
        needed = set(Rules.of(model).local(model.before, model.tuned, model.neck, model.head).names(Owner.LOCAL))
        personal = [name for name in self.rules(model).names(Owner.LOCAL) if name in needed]
        if personal:
            raise InputError(
                f"method.name = {self.name}: CCVR needs features and a head that are the same for all clients, so a "
                f'method that shares them and model.head = "shared"; here {", ".join(personal[:3])} are personal'
            )

    def closing_phases(self) -> Sequence[str]:
        """The exchange of moments."""
        return (*super().closing_phases(), MOMENTS)

    def sends_state(self, phase: str) -> bool:
        """Moments travel without the model."""
        return phase != MOMENTS and super().sends_state(phase)

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """The moments in their own exchange, else the method's statistics."""
        if phase != MOMENTS:
            return super().statistic_shapes(model, image_size, phase)
        classes, d = model.head.weight.shape
        return {"count": (classes,), "mean": (classes, d), "covariance": self._covariances(classes, d)}

    def _covariances(self, classes: int, d: int) -> tuple[int, ...]:
        return (classes, d) if self.covariance == "diagonal" else (classes, d, d)

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """The method's own training; for the moments none."""
        return float("nan") if phase == MOMENTS else super().train(client, phase)

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The moments in their own exchange, else the method's statistics."""
        if client.phase != MOMENTS:
            return super().statistics(client)
        diagonal = self.covariance == "diagonal"
        return class_moments(client.training_features(), client.labels, len(client.counts), diagonal)

    def release(self, client: Client, statistics: Mapping[str, Tensor], least: int) -> Mapping[str, Tensor]:
        """Moments without the classes that have fewer images than `least`, else as the method says."""
        if client.phase != MOMENTS:
            return super().release(client, statistics, least)
        enough = statistics["count"] >= least
        return {
            name: torch.where(enough.view(-1, *[1] * (tensor.dim() - 1)), tensor, torch.zeros_like(tensor))
            for name, tensor in statistics.items()
        }

    # ---- server half

    def state_for(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """As the method says. A run that goes on after its calibration does so with the head from before it."""
        return super().state_for(_below(server), client)

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """As the method says."""
        return super().targets(_below(server), client)

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """As the method does; in the exchange of moments pool them and calibrate the head."""
        if phase != MOMENTS:
            below = _below(server)
            server.state, server.memory = below.state, below.memory
            return super().combine(server, phase, replies)
        gaussians = ClassGaussians(self._covariances(*server.state[HEAD[0]].shape))
        for reply in replies:
            gaussians.add(**reply.message.under("statistic"))
        return self._calibrate(server, gaussians)

    def _calibrate(self, server: Server, gaussians: ClassGaussians) -> None:
        old, order = {name: server.state[name] for name in HEAD}, seeds.torch_stream(server.seed, "virtual batches")
        virtual = gaussians.draw(self.samples, server.seed, self.covariance == "shrunk")
        new = retrain(list(old.values()), *virtual, self.calibration_epochs, self.calibration_lr, order)
        server.memory = server.memory | named(UNCALIBRATED, old)
        server.state = server.state | dict(zip(HEAD, new, strict=True))


def _below(server: Server) -> Server:
    """The server as the method itself knows it: its own memory alone, the calibrated head only when all is over."""
    kept = Message(server.memory).under(UNCALIBRATED)
    memory = {name: t for name, t in server.memory.items() if not name.startswith(f"{UNCALIBRATED}/")}
    return replace(server, state=server.state | kept if server.round < server.rounds else server.state, memory=memory)
