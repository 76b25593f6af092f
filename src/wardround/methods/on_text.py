"""What methods have in common that compare an encoder's image features with its text side."""

from __future__ import annotations

from torch import nn

from wardround.errors import InputError
from wardround.models.classifier import Classifier
from wardround.models.prompts import Prompts
from wardround.models.text_head import CosineHead


def prompts_of(model: Classifier) -> Prompts:
    """The classes in the encoder's text side."""
    assert isinstance(model.prompts, Prompts)
    return model.prompts


def need_plain_features(model: Classifier, method: str) -> None:
    """See that nothing stands between features and a linear head, for a method that puts something of its own there.

    Raises:
        InputError: `model.adapter` or `model.classifier` has put something there.
    """
    if not isinstance(model.neck, nn.Identity) or isinstance(model.head, CosineHead):
        raise InputError(
            f'model.adapter, model.classifier: {method} brings what follows the features itself (allowed: "none", '
            '"linear")'
        )


def need_prompts(model: Classifier, method: str) -> None:
    """See that a model is an encoder with a text side, of which nothing is tuned.

    Raises:
        InputError: it is not.
    """
    if not isinstance(model.prompts, Prompts):
        raise InputError(
            f"model.backbone = {model.name!r} has no text side, which {method} needs; take an encoder such as "
            "open_clip:ViT-B-32/openai or bridge:lite0-minilm"
        )
    need_plain_features(model, method)
    if len(model.tuned):
        raise InputError(f"model.finetune_blocks: {method} trains on the frozen encoder's features (allowed: 0)")
