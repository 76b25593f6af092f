"""Which captions are fit for use."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from wardround.captions.options import CaptionOptions
from wardround.captions.vocabulary import Vocabulary

EMPTY = "empty"
REFUSES = "the writer refuses"
UNNAMED = "does not name the modality"
CONTRADICTS = "names another class and not its own"
REPEATS = "more images than captions.max_duplicates have it"
"""Why a caption is left out. Numbers of words come with their bound."""

_REFUSAL = re.compile(
    r"\b(i'?m sorry|i am sorry|i apologi[sz]e|as an ai|language model|i (cannot|can't|can not|am unable|am not able|"
    r"won't)|(unable|not able) to (help|assist|provide|analy[sz]e|interpret|identify|view|see)|cannot (help|assist|"
    r"provide|analy[sz]e|interpret|view))",
    re.IGNORECASE,
)
_NEGATED = r"\b(?:no|not|without|rather than|free of|absence of|lack of|rules? out|excludes?|excluding|negative for)\b"
_BETWEEN = r"(?:[^\w.;]+\w+){0,3}[^\w.;]+"  # up to three words of the same sentence
ORDINARY = frozenset({"normal", "none", "background", "other", "others", "healthy", "no finding", "negative", "benign"})
"""Classes whose names are ordinary words: a report of a tumour may say that the heart is normal."""


@dataclass(frozen=True)
class Filter:
    """Looks at one caption at a time; how many images share one is for `CaptionBook`.

    Attributes:
        vocabulary: the federation's words.
        least, most: words that a caption may have.
    """

    vocabulary: Vocabulary
    least: int
    most: int

    @classmethod
    def of(cls, options: CaptionOptions, vocabulary: Vocabulary) -> Filter:
        """The filter that the `[captions]` section describes."""
        return cls(vocabulary, options.min_words, options.max_words)

    def fault(self, text: str, modality: int, label: int | None = None, rivals: Collection[int] = ()) -> str | None:
        """Why a caption is not fit for use; None where it is.

        Args:
            text: the caption.
            modality: of its image, as an index.
            label: of its image. None where it may not be known, outside training: then nothing contradicts it.
            rivals: the classes that an image of this modality may show.
        """
        words = len(text.split())
        if not words:
            return EMPTY
        if words < self.least:
            return f"fewer than {self.least} words"
        if words > self.most:
            return f"more than {self.most} words"
        if _REFUSAL.search(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")):
            return REFUSES
        if not self.vocabulary.names_modality(text, modality):
            return UNNAMED
        if label is not None and self._contradicts(text, modality, label, rivals):
            return CONTRADICTS
        return None

    def _contradicts(self, text: str, modality: int, label: int, rivals: Collection[int]) -> bool:
        """Whether a text names another class, without a negation before it, and not its own."""
        own = self.vocabulary.finding(label, modality)
        if _names(text, own):
            return False
        others = {self.vocabulary.finding(rival, modality) for rival in rivals} - {own}
        return any(_names(text, other) and other.lower() not in ORDINARY for other in others)


def _names(text: str, finding: str) -> bool:
    """Whether a text names a finding, in the singular or plural, somewhere without a negation before it.

    `proliferative` does not occur in `non-proliferative`, nor after `no signs of`.
    """
    word = rf"(?<![\w-]){re.escape(finding)}(?:s|es)?(?![\w-])"
    denied = rf"{_NEGATED}{_BETWEEN}{word}"
    named, no = re.findall(word, text, re.IGNORECASE), re.findall(denied, text, re.IGNORECASE)
    return len(named) > len(no)
