"""Fed-RoD: one network, two heads: a generic one that all share and a personal one beside it."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from wardround.federation.rules import Rules
from wardround.methods.base import FedAvg
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step
from wardround.training.losses import balanced_softmax

PERSONAL_HEAD = "personal_head"


class FedRoD(FedAvg):
    """Chen and Chao, ICLR 2022. Client k minimises two losses of one forward pass with features f:

    - base and generic head, shared: the balanced softmax `CE(z_G + log n_k, y)`, n_k its training images per class;
    - personal head, local: `CE(sg(z_G) + z_P, y)` with `z_P = P_k sg(f)`; sg stops gradients.

    The personal model's logits are `z_G + z_P`, the server's model has z_G alone. The generic head is shared whatever
    `model.head` says. The losses are the method's own: `training.loss` and the class weights do not apply, for the
    balanced softmax corrects the same imbalance. A class that a client lacks takes no part in its balanced softmax.
    P_k starts at zero, a reading of ours, so that a client starts with the generic model. The two parts are clipped
    apart. With `generic_loss = "cross-entropy"` the shared part is federated averaging on the plain cross-entropy.
    """

    name: ClassVar[str] = "fedrod"
    title: ClassVar[str] = "Fed-RoD: a generic and a personal head"
    citation: ClassVar[str] = (
        "Chen, Chao. On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022."
    )
    skews: ClassVar[tuple[str, ...]] = ("label",)
    travels: ClassVar[str] = "the trained blocks, buffers included; the generic head"
    stays: ClassVar[str] = "the personal head; a logit corrector"
    extra_cost: ClassVar[str] = "a second linear layer"

    generic_loss: Literal["balanced-softmax", "cross-entropy"] = Field(
        "balanced-softmax", description="loss of the base and the generic head"
    )
    personal_lr: float | None = Field(None, gt=0, description="learning rate of the personal head; none: as the rest")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Add the personal head, with weights of zero."""
        head = nn.Linear(model.head.in_features, model.head.out_features)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        model.extras[PERSONAL_HEAD] = head

    def rules(self, model: Classifier) -> Rules:
        """FedAvg's, with the generic head shared and the personal one local."""
        return super().rules(model).shared(model.head).local(model.extras[PERSONAL_HEAD])

    def optimizer(self, client: Client, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Two groups, so that each part is clipped by its own norm."""
        own = client.model.extras[PERSONAL_HEAD].parameters()
        return client.optimizer(client.apart(parameters, own, self.personal_lr))

    def loss(self, step: Step) -> Tensor:
        """The generic and the personal loss; neither's gradient reaches the other's parameters."""
        features, labels = step.features.detach(), step.labels  # before the logits: one forward pass for both
        residual = step.client.model.extras[PERSONAL_HEAD](features)
        personal = functional.cross_entropy(step.logits.detach() + residual, labels)
        return step.with_captions(self.generic(step) + personal)

    def generic(self, step: Step) -> Tensor:
        """The loss of the base and the generic head, a scalar."""
        if self.generic_loss == "cross-entropy":
            return functional.cross_entropy(step.logits, step.labels)
        counts = step.client.counts.to(step.logits.device)
        return balanced_softmax(step.logits, step.labels, counts, torch.ones_like(step.logits[0]))

    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        """z_G + z_P."""
        features = client.model.features(inputs)
        residual: Tensor = client.model.extras[PERSONAL_HEAD](features)
        return client.model.classify(features) + residual

    def predict_received(self, client: Client, inputs: Tensor) -> Tensor:
        """z_G."""
        return super().predict(client, inputs)
