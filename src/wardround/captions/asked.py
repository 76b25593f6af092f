"""Captions from any function that answers a prompt about an image, such as one that asks a language model.

After ReAct (Yao et al., ICLR 2023): the function is asked to observe, to hypothesise, to check itself against what it
observed, for as long as it finds something to correct, and then to write. It is never told the label.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from wardround.captions.caption import Caption, ImageConditioned, Shown, digest
from wardround.captions.vocabulary import Vocabulary
from wardround.data.cache import atomically, default_folder
from wardround.errors import InputError, RunError

OBSERVE = (
    "This is a {phrase}. List what can be seen in it: shapes, textures, colours, where they are. Do not interpret yet."
)
HYPOTHESISE = (
    "This is a {phrase}. Observations:\n{observations}\n{correction}"
    "What is the most likely diagnostic reading, and which observations support it?"
)
CORRECTION = "An earlier reading was criticised:\n{criticism}\n"
CHECK = (
    "This is a {phrase}. Observations:\n{observations}\nReading:\n{reading}\nLook again. Does the image support every "
    "part of the reading? Answer with the word SUPPORTED alone, or say what it does not support."
)
WRITE = (
    "This is a {phrase}. Observations:\n{observations}\nReading:\n{reading}\n{doubt}Write one sentence of {least} to "
    "{most} words about the image, as in a report. Say what kind of image it is, what it shows and what that is "
    "consistent with. Leave out what the image does not support."
)
DOUBT = "What the image may not support:\n{criticism}\n"
SUPPORTED = "supported"
CHECKS = 2
"""How often a reading is checked at most."""
TEMPERATURE = 0.0
PROMPTS = digest("|".join((OBSERVE, HYPOTHESISE, CORRECTION, CHECK, WRITE, DOUBT, str(CHECKS))))


class Ask(Protocol):
    """A function that looks at an image and answers."""

    def __call__(self, image: NDArray[np.uint8], prompt: str, *, temperature: float) -> str:
        """The answer to `prompt` about `image`, uint8 `(H, W, C)`; a temperature of 0 asks for the likeliest one."""


class AskedCaptions(ImageConditioned):
    """Captions that a function writes, kept on disk under the image's own digest.

    A kept caption is not asked for again, by whatever name the image goes.

    Args:
        vocabulary: the federation's words.
        ask: the function.
        model: what it is called; captions by another name are kept apart.
        words: fewest and most that are asked for.
        at_test: see `ImageConditioned`.
        folder: where captions are kept; by default in the user's cache.
    """

    source: ClassVar[str] = "callable"

    def __init__(
        self,
        vocabulary: Vocabulary,
        ask: Ask,
        model: str,
        words: tuple[int, int],
        at_test: bool = False,
        folder: Path | None = None,
    ) -> None:
        super().__init__(vocabulary, at_test)
        self.ask, self.model, self.words = ask, model, words
        self.folder = (folder or default_folder()) / "captions" / "asked"

    def describe(self, image: Shown) -> Caption:
        """The caption of an image, kept or asked for now.

        Raises:
            RunError: the function failed, or its caption cannot be kept.
            InputError: its answer is no text.
        """
        file = self.folder / f"{self._key(image)}.json"
        text = _kept(file)
        if text is None:
            text = self._written(image)
            _keep(file, text)
        return Caption(text, self.source, self.model)

    def _written(self, image: Shown) -> str:
        """Observe, hypothesise, check, write."""
        phrase = self.vocabulary.phrase(image.modality)
        observations = self._answer(image, OBSERVE.format(phrase=phrase))
        reading, criticism = self._checked(image, phrase, observations)
        doubt = DOUBT.format(criticism=criticism) if criticism else ""
        least, most = self.words
        prompt = WRITE.format(
            phrase=phrase, observations=observations, reading=reading, doubt=doubt, least=least, most=most
        )
        return " ".join(self._answer(image, prompt).split())

    def _checked(self, image: Shown, phrase: str, observations: str) -> tuple[str, str]:
        """The last reading, and what the last check had against it: empty where that is nothing."""
        reading = criticism = ""
        for _ in range(CHECKS):
            correction = CORRECTION.format(criticism=criticism) if criticism else ""
            prompt = HYPOTHESISE.format(phrase=phrase, observations=observations, correction=correction)
            reading = self._answer(image, prompt)
            check = CHECK.format(phrase=phrase, observations=observations, reading=reading)
            criticism = self._answer(image, check)
            if criticism.lower().startswith(SUPPORTED):
                return reading, ""
        return reading, criticism

    def _answer(self, image: Shown, prompt: str) -> str:
        try:
            answer: Any = self.ask(image.pixels, prompt, temperature=TEMPERATURE)
        except Exception as error:  # a stranger's function may raise anything
            raise RunError(
                f"captions.callable = {self.model!r} failed at {image.name} ({type(error).__name__}: {error}); captions"
                " that it has given are kept, and a new start goes on after them"
            ) from error
        if not isinstance(answer, str):
            raise InputError(
                f"captions.callable = {self.model!r}: the answer about {image.name} is a {type(answer).__name__} "
                "(allowed: a text)"
            )
        return answer.strip()

    def _key(self, image: Shown) -> str:
        """A digest of the pixels and of all else that decides what is asked."""
        about = (self.model, PROMPTS, self.vocabulary.phrase(image.modality), self.words, image.pixels.shape)
        found = hashlib.sha256("|".join(map(str, about)).encode())
        found.update(np.ascontiguousarray(image.pixels).data)
        return found.hexdigest()[:32]


def _kept(file: Path) -> str | None:
    """The caption in `file`; None where there is none, or a damaged one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        text = json.loads(file.read_text(encoding="utf-8"))["text"]
        return text if isinstance(text, str) else None
    return None


def _keep(file: Path, text: str) -> None:
    """Write the caption, whole or not at all.

    Raises:
        RunError: the folder cannot be written to. Going on would mean to ask, and perhaps to pay, again every time.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomically(file) as stream:
            stream.write(json.dumps({"text": text}).encode())
    except OSError as error:
        raise RunError(
            f"captions cannot be kept in {file.parent} ({error.strerror or error}); $WARDROUND_CACHE may name another "
            "folder"
        ) from error


def function_named(name: str) -> Ask:
    """The function that `module:function` names.

    Raises:
        InputError: it is written otherwise, cannot be imported, or is no function.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InputError(f'captions.callable = {name!r} (allowed: "module:function")')
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # importing runs a stranger's code
        raise InputError(
            f"captions.callable = {name!r}: its module cannot be imported ({type(error).__name__}: {error}); its "
            "folder has to be on PYTHONPATH"
        ) from error
    if not callable(found):
        raise InputError(f"captions.callable = {name!r}: {module} has no function {function!r}")
    return found
