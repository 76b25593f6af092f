"""Which slices of a volume are images: evenly spaced among those that show enough."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from wardround.data.benchmark_options import SliceOptions
from wardround.data.remembering import remembered
from wardround.data.volumes import PLANES, nibabel_package, read_volume

PLANE = "axial"


def choose_slices(shown: Sequence[tuple[Path, Path]], options: SliceOptions) -> list[list[int]]:
    """For every volume the axial slices to use, in ascending order.

    The files that show what counts are read for this, which is remembered until one of them changes.

    Args:
        shown: for every volume the file whose voxels that are not 0 count (the volume itself or its segmentation),
            and the volume.
        options: the `[data.slices]` section.

    Raises:
        InputError: a file cannot be read, or does not fit its volume.
    """
    nibabel_package()
    files = [file for pair in shown for file in pair]
    counts: list[list[int]] = remembered(f"filled-{PLANE}", files, lambda: _count_all(shown))
    return [spread(each, options.per_volume, options.min_share) for each in counts]


def _count_all(shown: Sequence[tuple[Path, Path]]) -> list[list[int]]:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda pair: filled(*pair), shown))


def filled(file: Path, like: Path) -> list[int]:
    """How many voxels of every axial slice are not 0; `like`: see `read_volume`."""
    others = tuple(axis for axis in range(3) if axis != PLANES[PLANE])
    counts: list[int] = np.count_nonzero(read_volume(file, like), axis=others).tolist()
    return counts


def spread(counts: Sequence[int], number: int, min_share: float) -> list[int]:
    """`number` positions, evenly spaced among those with at least `min_share` of the largest count, and not 0.

    Those that count are cut into `number` equal runs, and the middle of each is taken; all where they are fewer.

    >>> spread([0, 1, 8, 9, 8, 7, 1], 2, 0.5), spread([0, 0], 3, 0.5)
    ([3, 5], [])
    """
    least = max(1.0, min_share * max(counts, default=0))
    enough = [position for position, count in enumerate(counts) if count >= least]
    if len(enough) <= number:
        return enough
    return [enough[(2 * run + 1) * len(enough) // (2 * number)] for run in range(number)]
