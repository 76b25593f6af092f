"""FedBN: batch norms stay at their client, everything else is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from wardround.federation.rules import BATCH_NORMS, Rules, modules_of_type
from wardround.methods.base import FedAvg, Weights
from wardround.models.classifier import Classifier


class FedBN(FedAvg):
    """Li et al., ICLR 2021. Batch norms, their affine parameters and running statistics alike, never travel.

    They are found by type, wherever they are nested. The authors average with equal weights, whatever the clients'
    sizes; `weights = "examples"` weighs as FedAvg does.
    """

    name: ClassVar[str] = "fedbn"
    title: ClassVar[str] = "FedBN: local batch norms"
    citation: ClassVar[str] = (
        "Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. "
        "ICLR 2021."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature",)
    travels: ClassVar[str] = "the trained blocks without their batch norms; the head where it is shared"
    stays: ClassVar[str] = "batch norms; the head where it is local; a logit corrector"

    weights: Weights = "uniform"

    def rules(self, model: Classifier) -> Rules:
        """FedAvg's, with the batch norms that are not frozen local."""
        return super().rules(model).local(*modules_of_type(model, BATCH_NORMS)).frozen(model.frozen)

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """Without a batch norm that trains, none stays at its client: FedBN is federated averaging then."""
        if modules_of_type(model.tuned, BATCH_NORMS):
            return super().cautions(model, examples)
        return [f"{self.name}: no batch norm among the trained blocks of {model.name}, so none stays at its client."]
