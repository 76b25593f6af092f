"""Heads and adapters that turn an encoder's image features into cosines with the classes' texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.models.prompts import Aside, Prompts


class UnitLength(nn.Module):
    """Vectors at length 1, as cosines want them."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, D)` to `(B, D)`."""
        return functional.normalize(x, dim=1)


class AttentionAdapter(nn.Module):
    """FedCLIP's adapter: `v = (a * I) / ||a * I||` with `a = softmax(W2 tanh(W1 I))` over the features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))

    def forward(self, features: Tensor) -> Tensor:
        """Image features I `(B, D)` to v `(B, D)`."""
        return functional.normalize(torch.softmax(self.layers(features), dim=1) * features, dim=1)


class CosineHead(nn.Module):
    """In the place of a linear head: scaled cosines with the prompts, which stay the model's own.

    Args:
        prompts: the classes.
        size: D.
    """

    def __init__(self, prompts: Prompts, size: int) -> None:
        super().__init__()
        self._aside = Aside(prompts)
        self.in_features, self.out_features = size, len(prompts.names)

    @property
    def weight(self) -> Tensor:
        """The classes' vectors, `(C, D)`."""
        vectors: Tensor = self._aside.value.vectors
        return vectors

    def forward(self, v: Tensor) -> Tensor:
        """Vectors of length 1 `(B, D)` to logits `(B, C)`."""
        logits: Tensor = self._aside.value.logits(v)
        return logits
