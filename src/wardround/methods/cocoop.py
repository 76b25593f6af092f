"""CoCoOp: the words of the prompt depend on the image, through a small network that clients learn together."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.federation.rules import Rules
from wardround.methods.base import Method, Weights
from wardround.methods.learned_context import encode_many, new_context
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.classifier import Classifier
from wardround.models.prompts import Aside, Prompts
from wardround.models.text_head import UnitLength

SHRINKING = 16  # D over the width of the meta-net's hidden layer, as published


class ConditionalPromptHead(nn.Module):
    """In the place of a linear head: scaled cosines with prompts whose context an image shifts.

    Args:
        prompts: the classes, with the encoder's text side.
        size: D.
        length: tokens of the context.
        at_once: texts in one pass of the text side.
    """

    def __init__(self, prompts: Prompts, size: int, length: int, at_once: int) -> None:
        super().__init__()
        hidden = max(1, size // SHRINKING)
        self.context = new_context(prompts, length)
        self.meta = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, prompts.tower.context_width))
        self._aside, self._at_once = Aside(prompts), at_once
        self.in_features, self.out_features = size, len(prompts.names)

    def vectors(self, v: Tensor) -> Tensor:
        """The classes' vectors as images `(B, D)` of length 1 see them, `(B, C, D)`, of length 1."""
        shifts = self.meta(v)[:, None]  # (B, 1, W): the same for every token
        return encode_many(self._prompts, len(v), lambda image, _: self.context + shifts[image], self._at_once)

    def forward(self, v: Tensor) -> Tensor:
        """Vectors of length 1 `(B, D)` to logits `(B, C)`."""
        return self._prompts.scale * torch.einsum("bd,bcd->bc", v, self.vectors(v))

    @property
    def _prompts(self) -> Prompts:
        found: Prompts = self._aside.value
        return found


class CoCoOp(Method):
    """Zhou et al., CVPR 2022, in a federation: prompts whose context depends on the image.

    For an image with vector v of length 1, token j of the context is

        c_j + meta(v),   meta = Linear(D, D / 16), ReLU, Linear(D / 16, W)

    and the logits are the scaled cosines of v with the classes' prompts. The context starts at N(0, 0.02^2), one for
    all classes. Clients minimise the task loss over context and meta-net; the server averages both, each client the
    same.
    """

    name: ClassVar[str] = "cocoop"
    title: ClassVar[str] = "CoCoOp: a learned prompt that depends on the image, shared"
    citation: ClassVar[str] = "Zhou, Yang, Loy, Liu. Conditional Prompt Learning for Vision-Language Models. CVPR 2022."
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = "the context: L token embeddings; the meta-net: two linear layers"
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "nothing that trains"
    extra_cost: ClassVar[str] = (
        "the text side runs forwards and backwards in every step, and forwards in predicting, once a class and image"
    )

    predicts_with_text: ClassVar[bool] = True

    weights: Weights = "uniform"
    length: int = Field(16, ge=1, description="tokens of the context (L)")
    texts_at_once: int = Field(256, ge=1, description="texts in one pass of the text side; fewer take less memory")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put prompts with a context that depends on the image in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = UnitLength()
        model.head = ConditionalPromptHead(  # type: ignore[assignment]
            prompts_of(model), model.head.in_features, self.length, self.texts_at_once
        )

    def rules(self, model: Classifier) -> Rules:
        """Context and meta-net are shared, whatever `model.head` says."""
        return super().rules(model).shared(model.head)
