"""Blood smear: one white cell among red ones. A structure is a cell type: the shape, size and grain of its parts.

A cell is a vector of traits, so a mixture of types is the mean of their traits: a cell between two kinds.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.data.phantoms import canvas
from wardround.data.phantoms.canvas import Array
from wardround.data.phantoms.family import Family

Points = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """The traits of a cell type.

    Attributes:
        radius: of the cell; the picture is 2 broad.
        nucleus: radius of the nucleus (of all its lobes together), as a share of the cell's.
        lobes: how many lobes it has.
        spread: how far the lobes lie apart (0: one round nucleus).
        dent: how deeply the nucleus is indented, like a bean.
        violet: how dark the nucleus is.
        plasma_red, plasma_green, plasma_blue: colour of the cytoplasm.
        grains: granules in the cytoplasm.
        grain_radius: of one granule, as a share of the cell's.
        grain_red, grain_green, grain_blue: colour of the granules.
        cover: whether the granules lie over the nucleus too (0..1).
    """

    radius: float
    nucleus: float
    lobes: float
    spread: float
    dent: float
    violet: float
    plasma_red: float
    plasma_green: float
    plasma_blue: float
    grains: float
    grain_radius: float
    grain_red: float
    grain_green: float
    grain_blue: float
    cover: float


CELLS = {
    "neutrophil": Cell(0.50, 0.33, 4, 0.45, 0.0, 0.9, 0.90, 0.78, 0.84, 110, 0.030, 0.72, 0.50, 0.66, 0),
    "eosinophil": Cell(0.52, 0.42, 2, 0.42, 0.0, 0.8, 0.92, 0.74, 0.72, 120, 0.065, 0.88, 0.44, 0.30, 0),
    "lymphocyte": Cell(0.38, 0.84, 1, 0.0, 0.05, 1.0, 0.66, 0.76, 0.92, 0, 0.030, 0.6, 0.4, 0.6, 0),
    "monocyte": Cell(0.60, 0.66, 1, 0.0, 0.6, 0.65, 0.70, 0.72, 0.83, 40, 0.020, 0.62, 0.52, 0.70, 0),
    "basophil": Cell(0.47, 0.50, 2, 0.25, 0.0, 0.6, 0.80, 0.70, 0.84, 75, 0.085, 0.22, 0.10, 0.42, 1),
    "immature granulocyte": Cell(0.64, 0.72, 1, 0.0, 0.25, 0.7, 0.76, 0.72, 0.90, 90, 0.040, 0.58, 0.25, 0.55, 0.4),
    "erythroblast": Cell(0.36, 0.56, 1, 0.0, 0.0, 1.15, 0.72, 0.64, 0.74, 0, 0.030, 0.6, 0.4, 0.6, 0),
    "platelets": Cell(0.17, 0.05, 1, 0.0, 0.0, 0.5, 0.72, 0.62, 0.80, 14, 0.160, 0.50, 0.32, 0.62, 1),
}
TRAITS = np.array([astuple(cell) for cell in CELLS.values()])
VARIATION = 0.05  # relative deviation of a cell's traits around its type's


def between(rng: np.random.Generator, strength: NDArray[np.float64]) -> Cell:
    """The cell whose traits are the mean over `CELLS`, weighted by `strength` `(8,)`.

    What the strengths leave of 1 goes to the types at large, so a faint picture shows a cell of no clear type.
    """
    rest = max(0.0, 1 - float(strength.sum())) / len(CELLS)
    traits = np.average(TRAITS, axis=0, weights=strength + rest)
    return Cell(*(traits * np.exp(VARIATION * rng.standard_normal(len(traits)))).tolist())


def red_cells(rng: np.random.Generator, image: Array, clear: float) -> Array:
    """Red cells with pale middles, kept `clear` of the centre of the picture."""
    places = canvas.scatter(rng, rng.uniform(0.46, 0.56), rng.uniform(0.65, 1.0), 1.3)
    places = places[np.hypot(*places.T) > clear + 0.2]
    radii = rng.uniform(0.23, 0.28, len(places))
    size, colour = image.shape[-1], np.array([0.88, 0.60, 0.58]) * rng.uniform(0.94, 1.06)
    image = canvas.blend(image, colour, 0.85 * canvas.spots(size, places, radii))
    pallor = canvas.soft(canvas.spots(size, places + 0.01, radii * rng.uniform(0.35, 0.5)), 0.05)
    return canvas.blend(image, (0.96, 0.82, 0.80), 0.7 * pallor)


def body(rng: np.random.Generator, centre: Points, radius: float, ripple: float, corners: int = 28) -> Points:
    """A roundish outline `(corners, 2)` whose radius ripples."""
    t = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    radii = np.full(corners, radius)
    for k in range(2, 6):
        radii = radii + radius * ripple / k * rng.normal() * np.cos(k * t + rng.uniform(0, 2 * np.pi))
    outline: Points = canvas.unit(t) * radii[:, None] + centre
    return outline


def nucleus(rng: np.random.Generator, size: int, centre: Points, cell: Cell) -> Array:
    """Mask of the nucleus: lobes on an arc with bridges between them, less the dent."""
    lobes = max(1, round(cell.lobes + rng.normal(0, 0.35 * (cell.lobes > 1.5))))
    reach, turn = cell.radius * cell.spread, rng.uniform(0, 2 * np.pi)
    step = np.pi * rng.uniform(0.75, 1.0) if lobes == 2 else rng.uniform(1.1, 1.5)
    angles = turn + np.arange(lobes) * step + rng.normal(0, 0.12, lobes)
    places = canvas.unit(angles) * reach + centre
    radius = cell.radius * cell.nucleus
    mask = canvas.polygons(size, np.stack([body(rng, p, radius * rng.uniform(0.9, 1.1), 0.12) for p in places]))
    if lobes > 1:
        mask = np.maximum(mask, canvas.strokes(size, [places], [radius * 0.5]))
    bite = centre + radius * (1.35 - 0.5 * cell.dent) * np.array([np.cos(turn), np.sin(turn)])
    return mask * (1 - canvas.spots(size, bite[None], np.array([radius * cell.dent])))


def chromatin(rng: np.random.Generator, size: int, cell: Cell) -> Array:
    """The nucleus's colour `(3, S, S)`: violet, coarsely clumped."""
    clumps = 1 + 0.14 * canvas.clouds(rng, size, 18, octaves=2)
    tone = 1 - np.array([0.58, 0.74, 0.38]) * cell.violet * rng.uniform(0.9, 1.05)
    return np.clip(canvas.planes(tone) * clumps, 0, 1)


def granules(rng: np.random.Generator, size: int, centre: Points, cell: Cell) -> Array:
    """Mask of the granules, even over the cell."""
    count = round(cell.grains * rng.uniform(0.8, 1.2))
    angle, distance = rng.uniform(0, 2 * np.pi, count), 0.9 * cell.radius * np.sqrt(rng.uniform(0, 1, count))
    places = canvas.unit(angle) * distance[:, None] + centre
    radii = cell.radius * cell.grain_radius * rng.uniform(0.75, 1.25, count)
    return canvas.spots(size, places, radii, rng.uniform(0.65, 1, count))


def white_cell(rng: np.random.Generator, image: Array, centre: Points, cell: Cell) -> Array:
    """The picture with a white cell on it."""
    size = image.shape[-1]
    outer = canvas.soft(canvas.polygons(size, body(rng, centre, cell.radius, 0.08)[None]), 0.01)
    inner = canvas.soft(nucleus(rng, size, centre, cell), 0.01) * outer
    plasma = np.array([cell.plasma_red, cell.plasma_green, cell.plasma_blue]) * rng.uniform(0.95, 1.04)
    grain = (cell.grain_red, cell.grain_green, cell.grain_blue)
    mask = granules(rng, size, centre, cell) * outer
    image = canvas.blend(image, plasma, 0.92 * outer)
    image = canvas.blend(image, grain, 0.85 * mask)
    image = canvas.blend(image, chromatin(rng, size, cell), 0.95 * inner)
    return canvas.blend(image, grain, 0.85 * cell.cover * mask)


def paint(rng: np.random.Generator, size: int, strength: NDArray[np.float64]) -> Array:
    """A smear `(3, size, size)` around one white cell whose traits lie between the types of `CELLS`."""
    cell = between(rng, strength)
    light = rng.uniform(0.90, 0.98)
    tone = light * np.array([1.0, rng.uniform(0.92, 0.97), rng.uniform(0.90, 0.97)])
    image = canvas.flat(size, tone) + 0.012 * canvas.clouds(rng, size, 5)
    image = red_cells(rng, image, cell.radius)
    return white_cell(rng, image, rng.normal(0, 0.06, 2), cell)


BLOOD = Family("blood", tuple(CELLS), paint)
