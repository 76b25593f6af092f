"""Prompts with one learned context and a frozen key for every client, among which an image chooses (FedAPT)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.methods.learned_context import encode_many, new_context
from wardround.models.prompts import Aside, Prompts


class Keys(nn.Module):
    """Keys `(K, L, W)` of numbers between 0 and 1, which never train."""

    values: Tensor

    def __init__(self, domains: int, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.rand(domains, length, width))


class KeyedPromptHead(nn.Module):
    """In the place of a linear head: scaled cosines with prompts whose context is multiplied by 1 + a key.

    Attributes:
        context: what clients learn together.
        domain: tells clients apart by their images (Q).
        keys: of all clients.
        seen: bool `(K,)`, which clients have trained.
        own: the client whose key is used for every image; None to mix a key for each.

    Args:
        prompts: the classes, with the encoder's text side.
        size: D.
        domains: K.
        length: tokens of the context.
        per_class: a context for every class instead of one for all.
        temperature: of the softmax that mixes keys.
        at_once: texts in one pass of the text side.
    """

    seen: Tensor

    def __init__(
        self, prompts: Prompts, size: int, *, domains: int, length: int, per_class: bool, temperature: float,
        at_once: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.context = new_context(prompts, length, per_class)
        self.domain = nn.Linear(size, domains, bias=False)
        self.keys = Keys(domains, length, prompts.tower.context_width)
        self.register_buffer("seen", torch.zeros(domains, dtype=torch.bool))
        self.own: int | None = None
        self._aside, self._temperature, self._at_once = Aside(prompts), temperature, at_once
        self.in_features, self.out_features = size, len(prompts.names)

    def forward(self, features: Tensor) -> Tensor:
        """Image features `(B, D)`, not normalised, to logits `(B, C)`."""
        prompts: Prompts = self._aside.value
        keys, of_image = self._keys_for(features)
        contexts = self.context.expand(len(prompts.names), -1, -1)
        vectors = encode_many(prompts, len(keys), lambda key, label: contexts[label] * (1 + keys[key]), self._at_once)
        return prompts.scale * torch.einsum("bd,bcd->bc", functional.normalize(features, dim=1), vectors[of_image])

    def mixture(self, features: Tensor) -> Tensor:
        """How much of each key an image gets, `(B, K)`: `softmax(standardised Q(I) / tau)` over the clients seen.

        Before any client has trained, all count.
        """
        known = self.seen if bool(self.seen.any()) else torch.ones_like(self.seen)
        scores = self.domain(features).float()
        among = scores[:, known]
        deviation = among.std(1, keepdim=True, correction=min(1, among.shape[1] - 1))  # one score has no deviation
        standardised = (among - among.mean(1, keepdim=True)) / deviation.clamp(min=torch.finfo(among.dtype).tiny)
        weights = torch.zeros_like(scores)
        weights[:, known] = torch.softmax(standardised / self._temperature, dim=1)
        return weights

    def _keys_for(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that the images `(B, D)` need, `(n, L, W)`, and which of them each needs, `(B,)`."""
        if self.own is not None:
            nothing = torch.zeros(len(features), dtype=torch.int64, device=features.device)
            return self.keys.values[self.own, None], nothing
        weights, of_image = distinct(self.mixture(features))
        return torch.einsum("nk,klw->nlw", weights, self.keys.values), of_image


def distinct(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows of mixtures `(B, K)`, `(n, K)`, and for each of the B which one it is, `(B,)`.

    A row whose largest weight is 1 to the precision of its numbers is taken for exactly that one key.
    """
    certain = weights.amax(1, keepdim=True) == 1
    rows = torch.where(certain, weights.round(), weights)
    _, place = torch.unique(rows.detach(), dim=0, return_inverse=True)
    numbers = torch.arange(len(rows), device=rows.device)
    first = numbers.new_full((int(place.max()) + 1,), len(rows)).scatter_reduce(0, place, numbers, "amin")
    return rows[first], place
