"""Which modality images are of, for a client that does not know: the nearest running mean of features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Distance = Literal["cosine", "euclidean"]


class ModalityClusters(nn.Module):
    """A running mean of features for every modality, `mu_m <- beta mu_m + (1 - beta) mean of its images in the batch`.

    Clients that know their modality tell it to `update`; one that does not takes the nearest mean. FM² names online
    clustering of features for unknown modalities and leaves it to an appendix; all of this is our reading. A modality
    starts with the mean of its first images. Means are comparable only while the backbone is the same, hence beta < 1.
    A mean of few images says as much about them as they do themselves.

    Args:
        modalities: N_d, of the vocabulary.
        features: d.
        momentum: beta, from 0 (the last batch alone) to below 1.
        distance: `cosine` leaves out how large the features are.

    Attributes:
        means: `(N_d, d)`, part of the state; 0 for a modality that was never seen.
        images: int64 `(N_d,)`, part of the state: how many each mean has seen.
    """

    means: Tensor
    images: Tensor

    def __init__(self, modalities: int, features: int, momentum: float = 0.9, distance: Distance = "cosine") -> None:
        super().__init__()
        self.momentum, self.distance = momentum, distance
        self.register_buffer("means", torch.zeros(modalities, features))
        self.register_buffer("images", torch.zeros(modalities, dtype=torch.int64))

    @torch.no_grad()
    def assign(self, features: Tensor) -> Tensor | None:
        """Features `(B, d)` to the nearest modality of each, int64 `(B,)`, the first of equals.

        None, which means unknown, as long as there is no mean.
        """
        seen = self.images > 0
        if not bool(seen.any()):
            return None
        return self._closeness(features).masked_fill(~seen, -torch.inf).argmax(dim=1)

    @torch.no_grad()
    def update(self, features: Tensor, modality: Tensor | None = None) -> None:
        """Move the means towards a batch `(B, d)`.

        Args:
            features: detached or not; no gradient passes.
            modality: int64 `(B,)`; None takes what `assign` says, and nothing moves where that is unknown.
        """
        index = self.assign(features) if modality is None else modality
        if index is None:
            return
        members = functional.one_hot(index, len(self.images))  # (B, N_d)
        counts = members.sum(0)
        batch = members.T.to(features.dtype) @ features / counts.clamp(min=1)[:, None]
        share = torch.where(self.images > 0, 1 - self.momentum, 1.0) * (counts > 0)
        self.means.lerp_(batch.to(self.means.dtype), share[:, None].to(self.means.dtype))
        self.images += counts

    def _closeness(self, features: Tensor) -> Tensor:
        """`(B, N_d)`, larger where nearer."""
        if self.distance == "cosine":
            return functional.normalize(features, dim=1) @ functional.normalize(self.means, dim=1).T
        # By differences: torch's faster way for large batches makes an image's distance depend on the batch.
        return -torch.cdist(features, self.means, compute_mode="donot_use_mm_for_euclid_dist")
