"""What methods have in common that compare an encoder's image features with its text side."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.models.classifier import Classifier
from wardround.models.prompts import Aside, Prompts


def prompts_of(model: Classifier) -> Prompts:
    """The classes in the encoder's text side."""
    assert isinstance(model.prompts, Prompts)
    return model.prompts


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
    if len(model.tuned):
        raise InputError(f"model.finetune_blocks: {method} trains on the frozen encoder's features (allowed: 0)")


class UnitLength(nn.Module):
    """Vectors at length 1, as cosines want them."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, D)` to `(B, D)`."""
        return functional.normalize(x, dim=1)


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
