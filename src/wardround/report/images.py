"""Contact sheets: a few training images of each client, one column a class, so that eyes can compare the clients."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from wardround import seeds
from wardround.data import ClientData, Federation, Samples

if TYPE_CHECKING:
    from PIL.Image import Image

TILE = 96  # pixels; the page shows tiles at two thirds of it, which stays sharp on a dense screen
ROWS = 2
MOST_COLUMNS = 10
EMPTY = (128, 128, 128)


def file_name(client: str) -> str:
    """The file of `client` in the folder `samples`, safe whatever characters its name holds.

    >>> file_name("St. Mary's / A")
    'St.%20Mary%27s%20%2F%20A.jpg'
    """
    return f"{quote(client, safe='')}.jpg"


def columns(counts: NDArray[np.int64]) -> list[int]:
    """The classes that a sheet shows, in their order: the most frequent ones where there are more than ten.

    Args:
        counts: images per client and class `(clients, classes)`; the same for every sheet of a federation.
    """
    frequent = np.argsort(-counts.sum(0), kind="stable")[:MOST_COLUMNS]
    return sorted(int(c) for c in frequent)


def save_samples(federation: Federation, folder: Path) -> list[Path]:
    """Write `folder/samples/<client>.jpg`, one contact sheet for each client that has training images.

    The choice of images depends on the federation alone, so that all runs on it show the same ones.
    """
    shown = columns(federation.counts())
    target = folder / "samples"
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for client in federation.clients:
        if len(client.train):
            path = target / file_name(client.name)
            path.write_bytes(contact_sheet(client, shown))
            written.append(path)
    return written


def contact_sheet(client: ClientData, classes: Sequence[int]) -> bytes:
    """A JPEG of `ROWS` training images for each of `classes`, side by side; grey where the client has no more."""
    from PIL import Image

    sheet = Image.new("RGB", (TILE * len(classes), TILE * ROWS), EMPTY)
    for column, label in enumerate(classes):
        for row, index in enumerate(_choose(client, label)):
            sheet.paste(_tile(client.train, index), (column * TILE, row * TILE))
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _choose(client: ClientData, label: int) -> list[int]:
    """Rows of up to `ROWS` training images of class `label`."""
    rows = np.flatnonzero(client.train.labels == label)
    stream = seeds.numpy_stream(0, f"samples of class {label}", 0, client.name)
    return [int(i) for i in stream.permutation(rows)[:ROWS]]


def _tile(samples: Samples, index: int) -> Image:
    """One image, scaled and padded to a square tile; small ones are enlarged without smoothing."""
    from PIL import Image, ImageOps

    pixels = np.asarray(samples.images[index])
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
    method = Image.Resampling.NEAREST if max(picture.size) < TILE else Image.Resampling.LANCZOS
    return ImageOps.pad(picture, (TILE, TILE), method, EMPTY)
