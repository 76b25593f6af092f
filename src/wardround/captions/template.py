"""Captions from modality and class: no one has to write them, and they state the label."""

from __future__ import annotations

from typing import ClassVar

from wardround import seeds
from wardround.captions.caption import Caption, Labelled, LabelStating
from wardround.captions.vocabulary import Vocabulary

PARAPHRASES = (
    "This {modality} is an example of {finding} as seen in practice.",
    "On this {modality} the most likely reading is {finding}.",
    "The {modality} was labelled by its readers as {finding}.",
    "In the {modality} shown here one can see {finding}.",
    "The finding on this {modality} is most consistent with {finding}.",
)


class TemplateCaptions(LabelStating):
    """One of five sentences around a modality and a class, drawn for each image by the seed.

    All captions of one modality and class make the same statement.

    Args:
        vocabulary: the federation's words.
        seed: the experiment's.
    """

    source: ClassVar[str] = "template"

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        super().__init__(vocabulary)
        self.seed = seed

    def describe(self, image: Labelled) -> Caption:
        """The caption of a training image."""
        modality = self.vocabulary.phrase(image.modality)
        finding = self.vocabulary.finding(image.label, image.modality)
        drawn = PARAPHRASES[seeds.key(self.seed, "caption paraphrase", client=image.name) % len(PARAPHRASES)]
        text = drawn.format(modality=modality, finding=finding)
        return Caption(text, self.source, statement=f"{modality}: {finding}")
