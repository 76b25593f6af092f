"""Local fine-tuning: the simplest personalisation, and the one that others have to beat."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from wardround.methods.adapting import Adapting
from wardround.training.client import Client
from wardround.training.local import fit


class FineTuning(Adapting):
    """Federated averaging; each client then fine-tunes the model on its own images, by the task loss (Yu et al., 2020).

    By default the model that local training left is trained for `epochs` passes more. With `start = "received"` it is
    the global model as it came, with `what = "head"` the head alone is trained and the backbone stays as it is, the
    running statistics of its batch norms included.
    """

    name: ClassVar[str] = "finetune"
    title: ClassVar[str] = "Local fine-tuning of a global model"
    citation: ClassVar[str] = (
        "Yu, Bagdasaryan, Shmatikov. Salvaging Federated Learning by Local Adaptation. arXiv:2002.04758."
    )
    skews: ClassVar[tuple[str, ...]] = ("label", "feature", "concept")
    stays: ClassVar[str] = f"{Adapting.stays}; what fine-tuning changes"
    extra_cost: ClassVar[str] = "`epochs` passes over the images whenever personal models are evaluated"

    epochs: int = Field(1, ge=1, description="passes of fine-tuning over the client's images")
    what: Literal["all", "head"] = Field("all", description="fine-tune all that trains, or the head alone")
    lr: float | None = Field(None, gt=0, description="learning rate of fine-tuning, before decay; none: training.lr")

    def adapt(self, client: Client) -> None:
        """Train `what` for `epochs` passes, in an order of their own."""
        parameters = self.parameters(client) if self.what == "all" else list(client.model.head.parameters())
        optimizer = client.optimizer([{"params": parameters, "lr": client.rate(self.lr)}])
        fit(client, parameters, optimizer, self.backward, client.steps(self.epochs, "fine-tuning"))
