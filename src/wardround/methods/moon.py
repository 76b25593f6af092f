"""MOON: features are drawn to those of the received model and away from those of the client's last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from wardround.methods.base import FedAvg
from wardround.methods.on_text import need_plain_features
from wardround.models.caption_fusion import telling
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step


class MOON(FedAvg):
    """Li, He, Song, CVPR 2021: model-contrastive learning. A client minimises

        L_task + mu * mean_i -log( e^{cos(z_i, g_i) / T} / (e^{cos(z_i, g_i) / T} + e^{cos(z_i, p_i) / T}) )

    z are its features of a batch, g those of the model that it received, p those of the model that it had after its
    last training. Both references are fixed and in eval mode, so that their batch norms do not move. There is no such
    term when a client trains for the first time: without a last model of its own p would be g, and the term constant.

    z comes from the authors' projection head, `Linear(d, d)-ReLU-Linear(d, 256)`, behind which stands a new linear
    classifier. Both are added before the run, and are shared unless the head is local, which the classifier then is.
    `projection = 0` adds nothing: z are the pooled features, as in PFLlib. The authors keep one last model, and use
    T = 0.5 and, by default, mu = 1. With mu = 0 this is federated averaging of the same network.
    """

    name: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON: model-contrastive federated learning"
    citation: ClassVar[str] = "Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021."
    skews: ClassVar[tuple[str, ...]] = ("label", "feature")
    travels: ClassVar[str] = "the trained blocks, buffers included; the projection head; the head where it is shared"
    stays: ClassVar[str] = "the last local model, to compare with; the head where it is local; a logit corrector"
    extra_cost: ClassVar[str] = "two more forward passes a step; a second copy of the trained entries at each client"

    mu: float = Field(1.0, ge=0, description="weight of the contrastive term; 0: federated averaging")
    temperature: float = Field(0.5, gt=0, description="divides the cosines (T)")
    projection: int = Field(256, ge=0, description="outputs of the added projection head; 0 adds none")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Add the projection head and put a new classifier behind it.

        Raises:
            InputError: `model.adapter` or `model.classifier` stand in its place; `projection = 0` goes with them.
        """
        if self.projection:
            need_plain_features(model, "moon with method.projection > 0")
            features = model.head.in_features
            model.neck = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, self.projection))
            model.head = nn.Linear(self.projection, model.head.out_features)

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """The network is not the one that other methods train."""
        found = super().cautions(model, examples)
        if self.projection:
            added = sum(parameter.numel() for parameter in model.neck.parameters())
            found.append(
                f"moon added a projection head to {model.name}: {added:,} parameters and {self.projection} outputs, "
                "which its classifier takes. Other methods run without it; method.projection = 0 leaves it out."
            )
        return found

    def train(self, client: Client, phase: str) -> float:
        """Local training beside the received model and the client's last one, which is then replaced."""
        if not self.mu:
            return super().train(client, phase)
        if client.memory:
            client.scratch["references"] = client.reference(), client.reference(client.memory)
        loss = super().train(client, phase)
        client.memory.update(client.snapshot())
        return loss

    def loss(self, step: Step) -> Tensor:
        """The task loss and, from a client's second training on, the contrastive term."""
        references = step.client.scratch.get("references")
        if references is None:
            return super().loss(step)
        z = step.features  # asked for first, so that one forward pass serves both terms
        received, last = (reference_features(reference, step) for reference in references)
        return super().loss(step) + self.mu * contrast(z, received, last, self.temperature)


@torch.no_grad()
def reference_features(reference: Classifier, step: Step) -> Tensor:
    """What another network makes of a batch: features `(B, d)`, float32, without a graph."""
    with step.client.arithmetic(), telling(reference, step.captions):
        return reference.features(step.inputs).float()


def contrast(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """The cross-entropy of telling `near` from `far` by their cosine with `z`, all `(B, d)`; a scalar, mean over B."""
    cosines = torch.stack([functional.cosine_similarity(z, other) for other in (near, far)], dim=1)
    return -functional.log_softmax(cosines / temperature, dim=1)[:, 0].mean()
