"""Where captions enter a network: in the place of its pooling, before a method edits it."""

from __future__ import annotations

from torch import nn

from wardround.captions.options import CaptionOptions
from wardround.models.caption_fusion import CaptionedPool, CaptionFusion
from wardround.models.classifier import Classifier
from wardround.seeds import torch_scope


def insert_captions(model: Classifier, options: CaptionOptions, text_features: int | None, seed: int) -> None:
    """Let `model` take captions, in place: its pooled features are those of images fused with captions from now on.

    With `fusion` they are `width` long, and a new linear head takes the head's place; without it, both stay as they
    are. What is shared is drawn from the seed whatever the text encoder, which clients may choose for themselves.

    Args:
        model: as `build_classifier` makes it, with a linear head.
        options: the `[captions]` section.
        text_features: D of the text encoder; None where there will be no captions.
        seed: the experiment's.
    """
    features, classes = model.head.in_features, model.head.out_features
    with torch_scope(seed, "captions"):  # P_t comes last: the rest is drawn alike whatever its size
        fusion = CaptionFusion(options.width, options.heads, options.dropout) if options.fusion else None
        if fusion is not None:
            model.head = nn.Linear(options.width, classes)
        model.pool = CaptionedPool(model.pool, features, text_features, fusion, options.width)
