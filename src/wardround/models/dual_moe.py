"""FM²'s pair of mixtures: experts by imaging modality, which all clients share, and a client's own experts by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from wardround.models.experts import WIDTH, MixtureOfExperts, Sizes
from wardround.models.label_counts import KnowsLabelCounts
from wardround.models.routing import PRIOR, Assigned, Gate, RoutingKind, routing_for

Size = Literal["tiny", "medium", "large"]
LAYERS: dict[Size, int] = {"tiny": 2, "medium": 4, "large": 8}
"""L, layers of an expert after its first."""


class DomainMoE(MixtureOfExperts):
    """M_d: an expert for each modality of a vocabulary that is fixed before the first round.

    With `hard` routing an expert learns from the images of its modality alone; where modalities do not meet at any
    client, what clients have in common is then the backbone and the classifier.

    Args:
        sizes: of experts and classifier.
        modalities: N_d.
        routing: see `routing_for`.
        prior: b of the routing kind `prior`.
    """

    def __init__(self, sizes: Sizes, modalities: int, routing: RoutingKind = "hard", prior: float = PRIOR) -> None:
        super().__init__(sizes, modalities)
        self.routing = routing_for(routing, sizes.features, modalities, prior)

    def mixture(self, x: Tensor, modality: Tensor | None = None) -> Tensor:
        """`(B, d)` to X `(B, w)`; `modality` int64 `(B,)`, None where it is not known."""
        if modality is not None and isinstance(self.routing, Assigned):
            return self.dispatch(x, modality)
        return self.blend(x, self.routing(x, modality))

    def forward(self, x: Tensor, modality: Tensor | None = None) -> Tensor:
        """`(B, d)` to logits `(B, C)`; `modality` as above."""
        return self.classify(self.mixture(x, modality))


class ClassMoE(MixtureOfExperts, KnowsLabelCounts):
    """M_c: an expert for each class that a client has, and a gate that learns whom to ask.

    The module has an expert for every class of the federation, so that one module serves all clients in turn, but a
    client has only those of its own classes: the others neither run nor learn. Nothing ties an expert to the class that
    it is counted for, unless a loss on `gate_logits` does.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, sizes.classes)
        self.gate = Gate(sizes.features, sizes.classes)

    def set_counts(self, counts: Sequence[int] | Tensor) -> None:
        """Tell whose experts these are: training images per class, `(C,)`. With none of any class, all experts run.

        Until then all do. Raises ValueError for another length.
        """
        self.gate.admit(torch.as_tensor(counts) > 0)

    @property
    def own(self) -> list[int]:
        """The experts that the client has."""
        numbers: list[int] = self.gate.present.nonzero().flatten().tolist()
        return numbers

    @property
    def own_elements(self) -> int:
        """Numbers in the client's own M_c: the paper's N_c experts, their N_c rows of the gate, and the classifier."""
        experts = [self.experts[n] for n in self.own]
        gate = len(experts) * (self.gate.linear.in_features + 1)
        return gate + sum(p.numel() for part in [*experts, self.classifier] for p in part.parameters())

    def gate_logits(self, x: Tensor) -> Tensor:
        """`(B, d)` to what the gate's softmax is taken of, `(B, C)`; minus infinity for classes of others."""
        return self.gate.logits(x)

    def mixture(self, x: Tensor) -> Tensor:
        """`(B, d)` to X `(B, w)`."""
        return self.blend(x, self.gate(x), self.own)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, d)` to logits `(B, C)`."""
        return self.classify(self.mixture(x))


class DualMoE(nn.Module):
    """`y = gamma_d M_d(v) + gamma_c M_c(v)` on logits; a part that counts 0 does not run.

    The paper has both gammas in 0..1 and their sum 1. ValueError where both are 0.
    """

    def __init__(self, domain: DomainMoE, by_class: ClassMoE, gamma_d: float = 0.5, gamma_c: float = 0.5) -> None:
        super().__init__()
        if not (gamma_d or gamma_c):
            raise ValueError("gamma_d = gamma_c = 0 leaves nothing to predict with")
        self.domain, self.by_class = domain, by_class
        self.gamma_d, self.gamma_c = gamma_d, gamma_c

    def forward(self, v: Tensor, modality: Tensor | None = None) -> Tensor:
        """Pooled features `(B, d)` to logits `(B, C)`; `modality` int64 `(B,)`, None where it is not known."""
        parts: list[Tensor] = []
        if self.gamma_d:
            parts.append(self.gamma_d * self.domain(v, modality))
        if self.gamma_c:
            parts.append(self.gamma_c * self.by_class(v))
        return torch.stack(parts).sum(0)

    def mixtures(self, v: Tensor, modality: Tensor | None = None) -> Tensor:
        """`[gamma_d X_d ; gamma_c X_c]`, what stands before the classifiers, of features `(B, d)`.

        `(B, 2w)`, or `(B, w)` where a part counts 0; `modality` as above.
        """
        parts: list[Tensor] = []
        if self.gamma_d:
            parts.append(self.gamma_d * self.domain.mixture(v, modality))
        if self.gamma_c:
            parts.append(self.gamma_c * self.by_class.mixture(v))
        return torch.cat(parts, 1)


def dual_moe(
    size: Size,
    features: int,
    classes: int,
    modalities: int,
    *,
    width: int = WIDTH,
    routing: RoutingKind = "hard",
    prior: float = PRIOR,
    gamma_d: float = 0.5,
    gamma_c: float = 0.5,
) -> DualMoE:
    """The pair for pooled features `(B, features)`, of a size that the paper names."""
    sizes = Sizes(features, classes, LAYERS[size], width)
    return DualMoE(DomainMoE(sizes, modalities, routing, prior), ClassMoE(sizes), gamma_d, gamma_c)
