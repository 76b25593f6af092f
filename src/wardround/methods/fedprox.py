"""FedProx: a client may not go far from where the round began."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from wardround.federation.rules import Owner
from wardround.methods.base import FedAvg
from wardround.methods.proximal import anchors, pull
from wardround.training.client import Client, Step


class FedProx(FedAvg):
    """Li et al., MLSys 2020. Client k minimises `F_k(w) + mu/2 ||w - w_t||^2`, equation 2.

    w are the shared parameters that train, w_t their values as received. With mu = 0 it is federated averaging. The
    loss that is logged is F_k, as that of other methods.
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx: federated averaging with a proximal term"
    citation: ClassVar[str] = (
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020."
    )
    skews: ClassVar[tuple[str, ...]] = ("label", "quantity")
    extra_cost: ClassVar[str] = "two passes over the parameters a step"

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")

    def train(self, client: Client, phase: str) -> float:
        """Local training, with the received parameters at hand."""
        shared = client.owned(Owner.SHARED)
        client.scratch["received"] = shared, anchors(shared)
        return super().train(client, phase)

    def backward(self, step: Step) -> Tensor:
        """The gradient of the task loss, and of the proximal term."""
        loss = super().backward(step)
        pull(self.mu, *step.client.scratch["received"])
        return loss
