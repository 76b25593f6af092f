"""Ditto: a personal model beside the global one, held to it by a spring."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from wardround.federation.rules import Owner
from wardround.methods.base import FedAvg
from wardround.methods.proximal import anchors, pull
from wardround.training.client import Client, Step
from wardround.training.local import fit
from wardround.training.options import TrainingOptions


class Ditto(FedAvg):
    """Li et al., ICML 2021, algorithm 1. w is trained and averaged as in FedAvg. Client k also keeps a model v_k with

        v_k <- v_k - eta * (grad F_k(v_k) + lambda (v_k - w_t)),

    w_t the shared parameters as received. v_k is all that is not frozen, a local head and the running statistics of
    batch norms included; it starts as the first model received, is never averaged, and is what is evaluated. w does
    not depend on v_k, so the order of the two is no matter.

    The authors try lambda = 0.1, 1 and 2. With lambda = 0 v_k is isolated training.
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto: personal models near the global one"
    citation: ClassVar[str] = (
        "Li, Hu, Beirami, Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021."
    )
    skews: ClassVar[tuple[str, ...]] = ("label", "feature", "concept")
    stays: ClassVar[str] = (
        "the personal model v_k, as large as all that trains; for w, what stays in federated averaging"
    )
    extra_cost: ClassVar[str] = "the passes of v_k over the images: as many again, unless `epochs` says otherwise"

    strength: float = Field(1.0, ge=0, alias="lambda", description="pull of v_k towards w_t (lambda); 0: isolated")
    epochs: int | None = Field(None, ge=1, description="passes of v_k in a round; none: as many as w's, local_epochs")
    schedule: Literal["epochs", "interleaved"] = Field(
        "epochs",
        description="epochs: v_k passes over the images in an order of its own; interleaved: it steps on w's very "
        "batches, as in the authors' code",
    )

    def passes(self, training: TrainingOptions, round: int) -> int:
        """Those of w and those of v_k."""
        return training.local_epochs + (self.epochs or training.local_epochs)

    def train(self, client: Client, phase: str) -> float:
        """The round of w, then that of v_k; w is left in the model, v_k in the memory. Returns w's mean loss."""
        shared = client.owned(Owner.SHARED)
        client.scratch["received"] = shared, anchors(shared)
        personal = client.memory or client.snapshot()
        loss = super().train(client, phase)
        trained = client.snapshot()
        client.restore(personal)
        client.log["personal_loss"] = self.train_personal(client)
        client.memory |= client.snapshot()
        client.restore(trained)
        return loss

    def train_personal(self, client: Client) -> float:
        """The round of v_k, which is in the model; returns its mean loss F_k."""
        parameters = self.parameters(client)
        purpose = "batches" if self.schedule == "interleaved" else "personal"
        steps = client.steps(self.epochs or client.options.local_epochs, purpose)
        return fit(client, parameters, self.optimizer(client, parameters), self.backward_personal, steps)

    def backward_personal(self, step: Step) -> Tensor:
        """The gradient of `F_k(v) + lambda/2 ||v - w_t||^2`."""
        loss = self.backward(step)
        pull(self.strength, *step.client.scratch["received"])
        return loss

    def personalise(self, client: Client) -> None:
        """Put v_k into the model."""
        client.restore(client.memory)
