"""How plainly a phantom shows its own structure, and how much of another lies beside it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wardround.data.phantoms.family import Family
from wardround.data.phantoms.skew import partner

FAINT = 0.9  # how much of everything the faintest picture loses at difficulty 1
HAZE = 1.2  # how borderline the least clear picture is at difficulty 1, where 1 is the most there can be
FADE = 0.5  # how much of its own structure the most borderline picture loses
INTRUSION = 0.75  # how much of another's it then shows
ON_BLANK = 0.5  # the same where its own is the absence of all others


def strengths(
    rng: np.random.Generator, family: Family, structure: int, classes: int, difficulty: float, clarity: float
) -> NDArray[np.float64]:
    """Strength of each of the family's structures in one picture; all but two are 0.

    `clarity` in 0..1 is 1 for a picture that shows its own structure alone, and 0 for the most borderline one.
    The other structure is its look-alike (see `partner`) in half of the pictures, else any of the `classes`.
    Apart from that each picture is more or less faint.
    """
    haze = min(HAZE * difficulty * (1 - clarity), 1)
    visible = 1 - FAINT * difficulty * rng.random()
    intrusion = ON_BLANK if family.blank and structure == 0 else INTRUSION
    strength = np.zeros(len(family.classes))
    strength[structure] = visible * (1 - FADE * haze)
    strength[other_structure(rng, structure, classes)] = visible * intrusion * haze
    return strength


def other_structure(rng: np.random.Generator, structure: int, classes: int) -> int:
    """The structure that lies beside `structure`."""
    others = [c for c in range(classes) if c != structure]
    twin = partner(structure, classes)
    return twin if twin is not None and rng.random() < 0.5 else others[int(rng.integers(len(others)))]
