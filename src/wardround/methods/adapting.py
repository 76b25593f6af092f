"""A last piece of training that makes the personal model and is never sent: what fine-tuning and Per-FedAvg share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import Field

from wardround.methods.base import FedAvg
from wardround.training.client import Client


class Adapting(FedAvg):
    """Federated averaging whose personal model is adapted to its client once the reply is safe.

    A variant says in `adapt` how. Nothing of it travels or outlasts the round.
    """

    start: Literal["trained", "received"] = Field(
        "trained", description="adapt the model that local training left, or the one that the round began with"
    )

    def train(self, client: Client, phase: str) -> float:
        """Local training, with a copy of the model that the round begins with where it will be wanted."""
        if self.start == "received":
            client.scratch["received"] = client.snapshot()
        return super().train(client, phase)

    def personalise(self, client: Client) -> None:
        """Go back to where `start` says, and adapt."""
        client.restore(client.scratch.get("received", {}))
        self.adapt(client)

    @abstractmethod
    def adapt(self, client: Client) -> None:
        """Train `client.model` further on the client's training images."""
