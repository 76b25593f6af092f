"""A contact sheet: what a person looks at to see a federation's classes and sites."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wardround.data.federation import ClientData, Federation, Samples

MARGIN = 130
HEADER = 18
GAP = 4


def contact_sheet(federation: Federation, per_class: int = 4) -> Image.Image:
    """Training images of every class (rows) at every client (groups of `per_class` columns), with both named.

    A class with fewer images at a client leaves its places white.
    """
    side = federation.clients[0].train.images.shape[1]
    group = per_class * side + GAP
    size = (MARGIN + group * len(federation.clients), HEADER + len(federation.classes) * (side + GAP))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for column, client in enumerate(federation.clients):
        pen.text((MARGIN + column * group, 3), client.name, fill="black")
        for row in range(len(federation.classes)):
            corner = (MARGIN + column * group, HEADER + row * (side + GAP))
            paste(sheet, examples(client, row, per_class), corner)
    for row, name in enumerate(federation.classes):
        pen.text((2, HEADER + row * (side + GAP) + side // 2), name.replace(": ", ":\n"), fill="black")
    return sheet


def examples(client: ClientData, label: int, count: int) -> NDArray[np.uint8]:
    """The first `count` training images of a class, `(n, S, S, C)` with n at most `count`."""
    train: Samples = client.train
    return train.images[np.flatnonzero(train.labels == label)[:count]]


def paste(sheet: Image.Image, images: NDArray[np.uint8], corner: tuple[int, int]) -> None:
    """Put images side by side on the sheet from `corner` on."""
    for i, image in enumerate(images):
        tile = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
        sheet.paste(tile, (corner[0] + i * image.shape[1], corner[1]))
