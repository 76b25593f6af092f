"""A vector that is added to pooled features: what is particular to one client's images (DBE)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PersonalVector(nn.Module):
    """`z + r` for pooled features z, `(B, d)`; the parameter r, `vector` `(d,)`, starts at 0."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(features))

    def forward(self, z: Tensor) -> Tensor:
        """z + r, `(B, d)`."""
        return z + self.vector
