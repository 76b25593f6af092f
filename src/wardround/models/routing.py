"""How much of each expert an image gets: routing weights `(B, N)`, every row a distribution."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

RoutingKind = Literal["hard", "soft", "prior"]
PRIOR = 2.0
"""b of the routing kind `prior`; a reading of ours."""


class Assigned(nn.Module):
    """Each image's own expert, as was agreed beforehand. It has no state.

    Args:
        experts: N.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """One-hot `(B, N)` at `index`, int64 `(B,)`; every expert alike where that is not known."""
        if index is None:
            return x.new_full((len(x), self.experts), 1 / self.experts)
        return functional.one_hot(index, self.experts).to(x.dtype)


class Gate(nn.Module):
    """`softmax(A x + a + b onehot(index))` over the experts that are present; the weights of the others are 0.

    Who is present belongs to a client and is no part of the state: at first, every expert.

    Args:
        features: d of x.
        experts: N.
        prior: b. With 0 the index has no influence.
    """

    present: Tensor

    def __init__(self, features: int, experts: int, prior: float = 0.0) -> None:
        super().__init__()
        self.linear, self.prior = nn.Linear(features, experts), prior
        self.register_buffer("present", torch.ones(experts, dtype=torch.bool), persistent=False)

    def admit(self, present: Tensor) -> None:
        """Say which experts are present, bool `(N,)`. Where none would be, all are: a client without images."""
        if present.shape != self.present.shape:
            raise ValueError(f"{len(self.present)} experts, found a choice of shape {tuple(present.shape)}")
        self.present.copy_(present if bool(present.any()) else torch.ones_like(present))

    def logits(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """What the softmax is taken of, `(B, N)`; minus infinity where an expert is absent."""
        logits: Tensor = self.linear(x)
        if self.prior and index is not None:
            logits = logits + self.prior * functional.one_hot(index, len(self.present))
        return logits.masked_fill(~self.present, -math.inf)

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """`(B, d)` and, where it is known, int64 `(B,)` to weights `(B, N)`."""
        return torch.softmax(self.logits(x, index), dim=1)


def routing_for(kind: RoutingKind, features: int, experts: int, prior: float = PRIOR) -> Assigned | Gate:
    """The module `(x (B, d), index (B,) or None) -> weights (B, N)` of a kind.

    =====  ==================================  ======================
    kind   weights                             without an index
    =====  ==================================  ======================
    hard   one-hot at the index                1 / N
    soft   softmax(A x + a)                    the same
    prior  softmax(A x + a + b onehot(index))  softmax(A x + a)
    =====  ==================================  ======================
    """
    if kind == "hard":
        return Assigned(experts)
    return Gate(features, experts, prior if kind == "prior" else 0.0)
