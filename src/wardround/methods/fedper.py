"""FedPer: the last layers are personal, the base is shared, both train together."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from wardround.errors import InputError
from wardround.federation.rules import Rules
from wardround.methods.base import FedAvg
from wardround.models.classifier import Classifier


class FedPer(FedAvg):
    """Arivazhagan et al., 2019. Base layers are averaged, personalisation layers stay; one SGD trains both.

    The head is always personal. `personal_blocks` adds the last blocks of the backbone, the paper's K_P.
    """

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer: personal last layers"
    citation: ClassVar[str] = (
        "Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers. arXiv:1912.00818."
    )
    skews: ClassVar[tuple[str, ...]] = ("label", "concept")
    travels: ClassVar[str] = "the trained blocks that are not personal, buffers included"
    stays: ClassVar[str] = "the head, the last `personal_blocks` blocks; a logit corrector"

    personal_blocks: int = Field(0, ge=0, description="blocks before the head that are personal too (K_P)")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Change nothing, but see that there are so many blocks."""
        if self.personal_blocks > len(model.tuned):
            raise InputError(
                f"method.personal_blocks = {self.personal_blocks}: {len(model.tuned)} blocks train "
                f"(allowed: 0 to {len(model.tuned)})"
            )

    def rules(self, model: Classifier) -> Rules:
        """The head and the last blocks are local."""
        first = len(model.tuned) - self.personal_blocks
        return super().rules(model).local(model.head, *model.tuned[first:])
