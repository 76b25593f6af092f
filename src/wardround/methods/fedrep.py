"""FedRep: the personal head learns first, on a fixed base; then the shared base, under a fixed head."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from wardround.federation.rules import Owner
from wardround.methods.fedper import FedPer
from wardround.training.client import Client, Step
from wardround.training.local import fit
from wardround.training.options import TrainingOptions


class FedRep(FedPer):
    """Collins et al., ICML 2021, algorithm 1. A client takes tau_h steps on its head h_k with the representation phi
    fixed, then steps on phi with h_k fixed, and sends phi.

    `epochs` has `head_epochs` passes for the head and then the round's own local epochs for the base: 10 and 1 in the
    paper's experiments, 1 and 1 by default. `halves` splits the local epochs between the two, so that FedRep sees no
    more images than other methods. While the base is fixed, so are its batch norms' running statistics.
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep: head and representation take turns"
    citation: ClassVar[str] = (
        "Collins, Hassani, Mokhtari, Shakkottai. Exploiting Shared Representations for Personalized Federated "
        "Learning. ICML 2021."
    )
    extra_cost: ClassVar[str] = "the head's passes over the images; none with `halves`"

    head_epochs: int = Field(1, ge=1, description="passes for the head before those for the base (schedule = epochs)")
    schedule: Literal["epochs", "halves"] = Field(
        "epochs", description="epochs: passes for each; halves: the first half of the round's batches is the head's"
    )

    def passes(self, training: TrainingOptions, round: int) -> int:
        """Those for the head, where it has some of its own, and those for the base."""
        return training.local_epochs + (self.head_epochs if self.schedule == "epochs" else 0)

    def train(self, client: Client, phase: str) -> float:
        """The personal parameters, then the shared ones; returns the latter's mean loss."""
        head_steps, base_steps = self.turns(client)
        loss = self._fit(client, client.owned(Owner.LOCAL), head_steps)
        base = client.owned(Owner.SHARED)
        return self._fit(client, base, base_steps) if base else loss

    def turns(self, client: Client) -> tuple[Iterable[Step], Iterable[Step]]:
        """The batches for the head and those for the base."""
        if self.schedule == "epochs":
            return client.steps(self.head_epochs, "head"), self.steps(client)
        steps, count = iter(self.steps(client)), client.batches(client.options.local_epochs)
        return itertools.islice(steps, count // 2), steps

    def _fit(self, client: Client, parameters: list[nn.Parameter], steps: Iterable[Step]) -> float:
        return fit(client, parameters, self.optimizer(client, parameters), self.backward, steps)
