"""What a caption is, who gives one, and the rule that keeps labels out of tests.

There are two kinds of providers. A `LabelStating` one is handed the label and exists for training images alone: asked
for any other, it raises. An `ImageConditioned` one is never handed a label, and answers for images outside training
only where `captions.at_test` says so. What each is handed is a type of its own, so that a type checker finds a
provider which would use a label that it may not have.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from wardround.captions.vocabulary import Vocabulary
from wardround.data.federation import WITHHELD, ClientData, SplitName
from wardround.errors import WardroundError


class CaptionLeak(WardroundError):
    """A caption was asked for where it would tell a test the answer: a mistake of the program, not of its input."""


@dataclass(frozen=True)
class Caption:
    """A sentence about an image.

    Attributes:
        text: the sentence.
        source: which kind of provider gave it.
        model: what wrote it, as far as that is known.
        statement: what it says, whatever the words; two captions with the same statement are both right for an image
            of either. The text itself where nothing else is given.
    """

    text: str
    source: str
    model: str = ""
    statement: str = ""

    @cached_property
    def hash(self) -> str:
        """A digest of the text: 32 hexadecimal digits."""
        return digest(self.text)

    @property
    def meaning(self) -> str:
        """`statement`, or the text."""
        return self.statement or self.text


def digest(text: str) -> str:
    """SHA-256 of a text, its first 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Shown:
    """An image as a provider sees it, without its label.

    Attributes:
        name: unique within the federation.
        modality: index into the federation's.
        pixels: uint8 `(H, W, C)`.
    """

    name: str
    modality: int
    pixels: NDArray[np.uint8]


@dataclass(frozen=True)
class Labelled(Shown):
    """A training image, whose label may be told.

    Attributes:
        label: index into the federation's classes.
    """

    label: int


class Provider(ABC):
    """Gives captions.

    Args:
        vocabulary: the federation's classes and modalities in words.

    Attributes:
        source: what captions say they come from.
    """

    source: ClassVar[str]

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def answers(self, split: SplitName) -> bool:
        """Whether it may be asked about images of `split`."""

    @abstractmethod
    def get(self, client: ClientData, split: SplitName, row: int) -> Caption | None:
        """The caption of one image; None where it has none.

        Raises:
            CaptionLeak: it may not be asked about images of `split`.
        """

    def _refuse(self, split: SplitName, why: str) -> None:
        if not self.answers(split):
            raise CaptionLeak(f"captions of the {split} split were asked of provider {self.source!r}, {why}")


class LabelStating(Provider):
    """Its captions may state the label, so it answers for training images alone."""

    @final
    def answers(self, split: SplitName) -> bool:
        """For `train` alone."""
        return split == "train"

    @final
    def get(self, client: ClientData, split: SplitName, row: int) -> Caption | None:
        """See `Provider.get`. An image whose label is withheld has no caption."""
        self._refuse(split, "whose captions may state the label")
        samples = client.train
        label = int(samples.labels[row])
        if label == WITHHELD:
            return None
        return self.describe(Labelled(samples.names[row], int(samples.modality[row]), samples.images[row], label))

    @abstractmethod
    def describe(self, image: Labelled) -> Caption | None:
        """The caption of a training image; None where it has none."""


class ImageConditioned(Provider):
    """Its captions are made without the label.

    Args:
        vocabulary: see `Provider`.
        at_test: whether it answers for validation and test images too.
    """

    def __init__(self, vocabulary: Vocabulary, at_test: bool = False) -> None:
        super().__init__(vocabulary)
        self.at_test = at_test

    @final
    def answers(self, split: SplitName) -> bool:
        """For `train`, and for all splits with `at_test`."""
        return split == "train" or self.at_test

    @final
    def get(self, client: ClientData, split: SplitName, row: int) -> Caption | None:
        """See `Provider.get`."""
        self._refuse(split, "and captions.at_test is false")
        samples = client.split(split)
        return self.describe(Shown(samples.names[row], int(samples.modality[row]), samples.images[row]))

    @abstractmethod
    def describe(self, image: Shown) -> Caption | None:
        """The caption of an image; None where it has none."""
