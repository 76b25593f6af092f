"""Local training without a federation: the baseline that every federated method has to beat."""

from __future__ import annotations

from typing import ClassVar

from wardround.federation.rules import Rules
from wardround.methods.base import Method
from wardround.models.classifier import Classifier


class Isolated(Method):
    """Each client trains alone from the same pretrained start, with the same budget as the federated methods.

    A rule says it all: whatever is trained is local, so nothing travels.
    """

    name: ClassVar[str] = "isolated"
    title: ClassVar[str] = "Isolated training"
    citation: ClassVar[str] = "The non-federated reference of the PAFP paper (FLTA 2026), Table II."

    travels: ClassVar[str] = "nothing"
    stays: ClassVar[str] = "everything that trains"

    def rules(self, model: Classifier) -> Rules:
        """Everything that trains belongs to its client."""
        return Rules.of(model).local(model).frozen(model.frozen, model.prompts)
