"""Mixtures of experts on pooled features: small networks side by side, some of which an image goes through."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH = 105
"""Of experts: with 168 features, 37 classes and five experts it gives the upload that FM² publishes."""


@dataclass(frozen=True)
class Sizes:
    """Of a mixture of experts.

    Attributes:
        features: d of what comes in.
        classes: C of the logits.
        layers: L, how many an expert has after its first.
        width: w of every layer.
    """

    features: int
    classes: int
    layers: int
    width: int = WIDTH


class Expert(nn.Module):
    """`ReLU(MLP(x))`: a linear layer d -> w, then L of w -> w, and a ReLU after every one.

    Weights start as He et al. (2015) draw them and biases at 0, a choice of ours: with torch's own start, images leave
    the ninth layer differing by less than a hundredth of what they have in common, and nothing is learned.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inputs = [sizes.features] + [sizes.width] * sizes.layers
        self.layers = nn.ModuleList(nn.Linear(size, sizes.width) for size in inputs)
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.get_parameter("weight"), nonlinearity="relu")
            nn.init.zeros_(layer.get_parameter("bias"))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, d)` to `(B, w)`, nowhere negative."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class MixtureOfExperts(nn.Module):
    """`X = sum_n W_n E_n(x)`, and one linear classifier of X for all experts. Who is asked is the subclass's matter.

    Every expert is a block of the state by itself, `experts.N.`, so that a server can average one expert over the
    clients that train it.

    Args:
        sizes: of each expert and of the classifier.
        experts: N.
    """

    def __init__(self, sizes: Sizes, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(sizes) for _ in range(experts))
        self.classifier = nn.Linear(sizes.width, sizes.classes)

    def blend(self, x: Tensor, weights: Tensor, asked: Sequence[int] | None = None) -> Tensor:
        """`(B, d)` and weights `(B, N)` to X `(B, w)`.

        The experts run one after the other. Stacked into one batched product they take as long on a processor with 32
        images, and a fifth longer with 256, since stacking copies their weights in every step.

        Args:
            x: of every image.
            weights: W.
            asked: the experts that run, where the others' weights are 0; those get no gradient. None for all.
        """
        numbers = range(len(self.experts)) if asked is None else asked
        return torch.stack([weights[:, n, None] * self.experts[n](x) for n in numbers]).sum(0)

    def dispatch(self, x: Tensor, index: Tensor) -> Tensor:
        """`(B, d)` to X `(B, w)`, each image through one expert, given by `index`, int64 `(B,)`.

        As `blend` with one-hot weights, but experts see their own images alone; one without images gets no gradient.
        Raises ValueError for an index that is no expert's.
        """
        numbers = sorted(set(index.tolist()))
        if not set(numbers) <= set(range(len(self.experts))):
            raise ValueError(f"experts are 0 to {len(self.experts) - 1}, found {numbers}")
        order = index.argsort(stable=True)
        counts = index.bincount()[numbers].tolist()
        parts = zip(numbers, torch.split(x[order], counts), strict=True)
        outputs = torch.cat([self.experts[n](part) for n, part in parts])
        return outputs[order.argsort()]

    def classify(self, mixture: Tensor) -> Tensor:
        """X `(B, w)` to logits `(B, C)`."""
        logits: Tensor = self.classifier(mixture)
        return logits


def expert_of(entry: str) -> int | None:
    """Which expert's a state entry is; None where it is no expert's.

    >>> expert_of("domain.experts.3.layers.0.weight"), expert_of("domain.classifier.weight")
    (3, None)
    """
    found = re.search(r"(?:^|\.)experts\.(\d+)\.", entry)
    return int(found[1]) if found else None
