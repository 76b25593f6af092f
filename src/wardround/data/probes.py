"""Look at every image file once: does it decode, and what is in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from wardround.data.images import ImageOpener, to_8_bit
from wardround.data.records import ImageRef
from wardround.errors import InputError


@dataclass(frozen=True)
class Probe:
    """What one image is.

    Attributes:
        fault: why it cannot be read; empty where it can. The rest is then meaningless.
        missing: whether the file is not there at all.
        digest: equal for images with equal pixels, however they are stored.
        width: pixels.
        height: pixels.
        grey: whether all its pixels are grey, also in a colour file.
        deep: whether it has more than 8 bits a channel.
        frames: number of pictures in the file; the first is used.
    """

    fault: str = ""
    missing: bool = False
    digest: str = ""
    width: int = 0
    height: int = 0
    grey: bool = False
    deep: bool = False
    frames: int = 1


def probe_images(refs: Sequence[ImageRef]) -> list[Probe]:
    """Probe images in threads, in the given order."""
    opener = ImageOpener()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda ref: probe(ref, opener), refs))


def probe(ref: ImageRef, opener: ImageOpener) -> Probe:
    """Decode one image at full size and describe it; never an error."""
    if not ref.path.is_file():
        return Probe(f"{ref}: no such file", missing=True)
    try:
        image = opener.open(ref)
        return _describe(image, _frames(ref))
    except (InputError, OSError, ValueError, MemoryError) as error:
        return Probe(str(error))


def _describe(image: Image.Image, frames: int) -> Probe:
    colour = to_8_bit(image).convert("RGB")
    pixels = np.asarray(colour)
    grey = bool(np.all(pixels == pixels[..., :1]))
    digest = hashlib.blake2b(f"{colour.size}".encode() + pixels.tobytes(), digest_size=16).hexdigest()
    deep = image.mode.startswith(("I", "F"))
    return Probe("", False, digest, colour.width, colour.height, grey, deep, frames)


def _frames(ref: ImageRef) -> int:
    """Number of pictures in a file of a format that can hold several."""
    if ref.array or ref.path.suffix.lower() not in (".tif", ".tiff", ".gif", ".webp", ".png"):
        return 1
    with Image.open(ref.path) as image:
        return int(getattr(image, "n_frames", 1))
