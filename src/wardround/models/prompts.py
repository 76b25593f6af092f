"""Class names in words, and what an encoder's text side makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional

from wardround import seeds
from wardround.errors import InputError
from wardround.options import Options

if TYPE_CHECKING:
    from wardround.models.encoders.text import TextTower

SLOT = "{class}"


class TextOptions(Options):
    """The `[text]` section: the words for classes, for encoders that have a text side."""

    templates: tuple[str, ...] = Field(
        ("a picture of a {class}",), min_length=1, description="sentences around a class's name, {class}; averaged"
    )
    names: dict[str, str] = Field(default_factory=dict, description='a class in plain words, as mel = "melanoma"')
    descriptions: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="more sentences about a class, averaged with the templates'"
    )
    random: bool = Field(False, description="random vectors instead of text, as a control")

    @field_validator("templates")
    @classmethod
    def _every_template_has_a_slot(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        without = [template for template in value if SLOT not in template]
        if without:
            raise ValueError(f"{without[0]!r} has no {SLOT}")
        return value

    @field_validator("descriptions", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: tuple(lines) if isinstance(lines, list) else lines for name, lines in value.items()}


class Aside:
    """Something that goes with a model without being part of it: neither saved nor copied with it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> Aside:
        return self


class Prompts(nn.Module):
    """The classes as an encoder's text side sees them; frozen.

    Attributes:
        vectors: `(C, D)`, of length 1.
        scale: multiplies cosines.
        names: of the classes, in plain words.
        tower: the encoder's text side.
    """

    vectors: Tensor

    def __init__(self, vectors: Tensor, scale: float, names: Sequence[str], tower: TextTower) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors)
        self.scale, self.names, self._aside = scale, tuple(names), Aside(tower)

    @property
    def tower(self) -> TextTower:
        """The encoder's text side."""
        found: TextTower = self._aside.value
        return found

    def cosines(self, v: Tensor) -> Tensor:
        """Of image vectors `(B, D)` of length 1 with the classes, `(B, C)`."""
        return functional.linear(v, self.vectors)

    def logits(self, v: Tensor) -> Tensor:
        """Cosines times the encoder's scale, `(B, C)`."""
        return self.scale * self.cosines(v)


def prompts_for(tower: TextTower, classes: Sequence[str], options: TextOptions, scale: float, seed: int) -> Prompts:
    """The prompts of a federation's classes.

    A class's vector is the mean of the normalised vectors of its sentences, normalised.

    Raises:
        InputError: two classes have the same name, or `[text]` speaks of a class that does not exist.
    """
    names = _plain_names(classes, options)
    if options.random:
        vectors = torch.randn(len(classes), tower.dim, generator=seeds.torch_stream(seed, "random text"))
    else:
        vectors = torch.stack([_mean_vector(tower, sentences) for sentences in _sentences(classes, names, options)])
    return Prompts(functional.normalize(vectors, dim=1), scale, names, tower)


def _plain_names(classes: Sequence[str], options: TextOptions) -> list[str]:
    strangers = [name for name in (*options.names, *options.descriptions) if name not in classes]
    if strangers:
        raise InputError(f"text: there is no class {strangers[0]!r} (classes: {', '.join(classes)})")
    names = [options.names.get(name, name) for name in classes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not all(name.strip() for name in names):
        raise InputError(f"text.names: {twice[0] if twice else 'an empty name'!r} stands for several classes, or none")
    return names


def _sentences(classes: Sequence[str], names: Sequence[str], options: TextOptions) -> list[list[str]]:
    return [
        [*(template.replace(SLOT, name) for template in options.templates), *options.descriptions.get(label, ())]
        for label, name in zip(classes, names, strict=True)
    ]


def _mean_vector(tower: TextTower, sentences: Sequence[str]) -> Tensor:
    return functional.normalize(tower.encode(sentences), dim=1).mean(0)
