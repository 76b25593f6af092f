"""What a family of phantoms is: names for its classes and a painter that shows any mixture of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Painter = Callable[[np.random.Generator, int, NDArray[np.float64]], NDArray[np.float32]]


@dataclass(frozen=True)
class Family:
    """A modality.

    Attributes:
        name: what the options call it.
        classes: eight names of visible structures; 0 and 1, 2 and 3, ... are the pairs that resemble each other.
        paint: `paint(rng, size, strength)` gives a float32 picture `(3, size, size)` in 0..1. `strength` has one
            value in 0..1 for each class: how plainly its structure shows.
        grey: whether the modality has no colour, so that a scanner can give it none.
        blank: whether class 0 is the absence of the others (a healthy eye), which then intrude on it but faintly.
    """

    name: str
    classes: tuple[str, ...]
    paint: Painter
    grey: bool = False
    blank: bool = False
