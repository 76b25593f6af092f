"""Captions by the name of their provider."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from wardround.captions.asked import AskedCaptions, function_named
from wardround.captions.caption import Provider
from wardround.captions.file import SeenCaptions, StatedCaptions, read_captions
from wardround.captions.options import CaptionOptions
from wardround.captions.template import TemplateCaptions
from wardround.captions.vocabulary import Vocabulary


def provider_for(
    options: CaptionOptions, vocabulary: Vocabulary, known: Collection[str], seed: int, folder: Path | None = None
) -> Provider | None:
    """What the `[captions]` section asks for; None for no captions.

    Args:
        options: the section.
        vocabulary: the federation's words.
        known: names of all images of the source, used in this experiment or not.
        seed: the experiment's.
        folder: of caches; by default the user's.

    Raises:
        InputError: the file or the function is wrong.
    """
    if options.provider == "template":
        return TemplateCaptions(vocabulary, seed)
    if options.file is not None:
        captions = read_captions(Path(options.file), known)
        if options.states_label:
            return StatedCaptions(vocabulary, captions)
        return SeenCaptions(vocabulary, captions, options.at_test)
    if options.callable is not None:
        words = (options.min_words, options.max_words)
        ask = function_named(options.callable)
        return AskedCaptions(vocabulary, ask, options.callable, words, options.at_test, folder)
    return None
