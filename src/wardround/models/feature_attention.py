"""FedMedCLIP's two parts on frozen features: the shared attention over features, and the private classifier."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.models.masked_linear import MaskedLinear, Surrogate

Norm = Literal["instance", "batch"]
Activation = Literal["relu", "relu6"]
HIDDEN_LAYERS = 3


class InstanceNorm(nn.Module):
    """What InstanceNorm1d makes of a `(B, D)` tensor: each image normalised over its features, no state."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, D)` to `(B, D)`."""
        return functional.layer_norm(x, x.shape[-1:])


class FeatureAttention(nn.Module):
    """FAM: a weight for every feature of an image, and the weighted features at length 1.

    `a = softmax(ML(act(norm(ML(I)))))` over the D features, `v = (a * I) / ||a * I||`.

    Args:
        size: D.
        norm: `instance` (the released code) or `batch` (its first release).
        activation: `relu`, or `relu6` as its README has it.
        surrogate: see `MaskedLinear`.
    """

    def __init__(
        self, size: int, norm: Norm = "instance", activation: Activation = "relu", surrogate: Surrogate = "dst"
    ) -> None:
        super().__init__()
        self.first = MaskedLinear(size, size, surrogate)
        self.norm: nn.Module = InstanceNorm() if norm == "instance" else nn.BatchNorm1d(size)
        self.activation: nn.Module = nn.ReLU() if activation == "relu" else nn.ReLU6()
        self.second = MaskedLinear(size, size, surrogate)

    def forward(self, features: Tensor) -> Tensor:
        """Image features I `(B, D)`, not normalised, to v `(B, D)`."""
        attention = torch.softmax(self.second(self.activation(self.norm(self.first(features)))), dim=1)
        return functional.normalize(attention * features, dim=1)


class PrivateMLP(nn.Module):
    """Three times masked linear, batch norm and ReLU, then a masked linear layer to the classes."""

    def __init__(self, size: int, classes: int, hidden: int = 512, surrogate: Surrogate = "dst") -> None:
        super().__init__()
        sizes = [size] + [hidden] * HIDDEN_LAYERS
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [MaskedLinear(inputs, outputs, surrogate), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.last = MaskedLinear(hidden, classes, surrogate)

    @property
    def weight(self) -> Tensor:
        """Of the last layer, `(classes, hidden)`: what a linear head has."""
        return self.last.weight

    @property
    def in_features(self) -> int:
        """Features that it takes."""
        first = self.layers[0]
        assert isinstance(first, MaskedLinear)
        return first.in_features

    @property
    def out_features(self) -> int:
        """How many classes."""
        return self.last.out_features

    def forward(self, v: Tensor) -> Tensor:
        """`(B, size)` to logits `(B, classes)`."""
        logits: Tensor = self.last(self.layers(v))
        return logits
