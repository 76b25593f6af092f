"""Captions that someone has written down, image by image, in a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from wardround.captions.caption import Caption, ImageConditioned, Labelled, LabelStating, Shown
from wardround.captions.vocabulary import Vocabulary
from wardround.data.records import some
from wardround.errors import InputError

KEYS = ("image", "text", "source", "model")
"""What a line may hold; `image` and `text` it must."""

Captions = Mapping[str, Caption]


class StatedCaptions(LabelStating):
    """Captions of a file whose authors may have known the labels: for training images alone.

    Args:
        vocabulary: the federation's words.
        captions: by the image's name; see `read_captions`.
    """

    source: ClassVar[str] = "file"

    def __init__(self, vocabulary: Vocabulary, captions: Captions) -> None:
        super().__init__(vocabulary)
        self.captions = captions

    def describe(self, image: Labelled) -> Caption | None:
        """The caption of a training image; None where the file has none."""
        return self.captions.get(image.name)


class SeenCaptions(ImageConditioned):
    """Captions of a file whose authors saw the images and not the labels.

    Args:
        vocabulary: the federation's words.
        captions: by the image's name; see `read_captions`.
        at_test: see `ImageConditioned`.
    """

    source: ClassVar[str] = "file"

    def __init__(self, vocabulary: Vocabulary, captions: Captions, at_test: bool = False) -> None:
        super().__init__(vocabulary, at_test)
        self.captions = captions

    def describe(self, image: Shown) -> Caption | None:
        """The caption of an image; None where the file has none."""
        return self.captions.get(image.name)


def read_captions(file: Path, known: Collection[str]) -> dict[str, Caption]:
    """The captions of a JSONL file by the images' names; empty where the file is.

    A line is `{"image": NAME, "text": SENTENCE}`, and may say its `source` and the `model` that wrote it.

    Args:
        file: in UTF-8; empty lines count for nothing.
        known: names of all images of the source, used in this experiment or not.

    Raises:
        InputError: the file or a line of it cannot be read, a name is unknown, or an image has two captions; the
            message names the rows.
    """
    rows = _rows(file)
    strangers = [f"row {row} ({one['image']})" for row, one in rows if one["image"] not in known]
    if strangers:
        raise InputError(
            f"{file}: {len(strangers)} captions are of images that the data do not have: {some(strangers)}; names are "
            f"those of the source, such as {next(iter(known), 'none: it has no image')}"
        )
    first: dict[str, int] = {}
    twice = [(first[one["image"]], row) for row, one in rows if first.setdefault(one["image"], row) != row]
    if twice:
        pairs = some(f"rows {before} and {row}" for before, row in twice)
        raise InputError(f"{file}: {len(twice)} captions are of an image that has one already: {pairs}")
    return {one["image"]: _caption(one) for _, one in rows}


def _caption(one: Mapping[str, str]) -> Caption:
    return Caption(" ".join(one["text"].split()), one.get("source", "file"), one.get("model", ""))


def _rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    """Row numbers from 1, and what the rows hold. InputError naming all rows that are no captions."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"captions.file: {file} is not a readable text file in UTF-8 ({error})") from error
    parsed = [(row, _parsed(line)) for row, line in enumerate(lines, start=1) if line.strip()]
    wrong = [f"row {row} ({one})" for row, one in parsed if isinstance(one, str)]
    if wrong:
        raise InputError(f'{file}: {len(wrong)} rows are no captions, as {{"image": "a.png", "text": "..."}} is one: '
                         f"{some(wrong)}")  # fmt: skip
    return [(row, one) for row, one in parsed if not isinstance(one, str)]


def _parsed(line: str) -> dict[str, str] | str:
    """A row, or what is wrong with it."""
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(found, dict):
        return f"a {type(found).__name__}"
    missing = [key for key in KEYS[:2] if not (isinstance(found.get(key), str) and found[key].strip())]
    strangers = [key for key in found if key not in KEYS]
    if missing or strangers:
        return f"no {', no '.join(missing)}" if missing else f"unknown key {strangers[0]!r}, allowed {', '.join(KEYS)}"
    return {key: str(value) for key, value in found.items() if value is not None}
