"""Which images may have a caption at all: a share of them, chosen image by image."""

from __future__ import annotations

from wardround import seeds

_KEYS = 1 << 63  # `seeds.key` is below this


def place(seed: int, name: str) -> float:
    """Where an image stands in the order of coverage, in 0..1: it is covered by every share above this.

    It depends on the seed and the image's name alone. So the images that a smaller share covers are among those of a
    larger one, whichever client has them.
    """
    return seeds.key(seed, "caption coverage", client=name) / _KEYS
