"""What methods have in common whose prompts have a context that learns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wardround.models.prompts import Prompts

DEVIATION = 0.02
ContextOf = Callable[[Tensor, Tensor], Tensor]  # (n,) numbers of contexts and (n,) classes to contexts (n, L, W)


def new_context(prompts: Prompts, length: int, per_class: bool = False) -> nn.Parameter:
    """A context that learns, `(L, W)`, or `(C, L, W)` for one a class; it starts at N(0, 0.02^2)."""
    shape = (length, prompts.tower.context_width)
    return nn.Parameter(torch.randn((len(prompts.names), *shape) if per_class else shape) * DEVIATION)


def encode_many(prompts: Prompts, count: int, context_of: ContextOf, at_once: int) -> Tensor:
    """Vectors of length 1 of every class under each of `count` contexts, `(count, C, D)`.

    Contexts are made as they are needed. Where texts are split and a gradient is wanted, the text side runs again for
    it, so that memory grows with `at_once` and not with `count`.

    Args:
        prompts: the classes, with the encoder's text side.
        count: how many contexts there are.
        context_of: gives the contexts of some texts.
        at_once: texts in one pass.
    """
    names = prompts.names

    def encode(texts: Tensor) -> Tensor:
        numbers, labels = texts // len(names), texts % len(names)
        return prompts.tower.encode_context(context_of(numbers, labels), [names[label] for label in labels.tolist()])

    parts = torch.split(torch.arange(count * len(names)), at_once)
    if len(parts) > 1 and torch.is_grad_enabled():
        vectors = [checkpoint(encode, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    else:
        vectors = [encode(part) for part in parts]
    return functional.normalize(torch.cat(vectors), dim=1).view(count, len(names), -1)
