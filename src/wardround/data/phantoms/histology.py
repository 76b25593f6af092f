"""Histology: a tile of tissue in haematoxylin (blue-violet nuclei) and eosin (pink ground).

A structure is a tissue. The tile is shared out among the tissues by their strengths, along borders that wander.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wardround.data.phantoms import canvas
from wardround.data.phantoms.canvas import Array
from wardround.data.phantoms.family import Family

Points = NDArray[np.float64]

NUCLEUS = (0.42, 0.28, 0.58)
EPITHELIUM = (0.80, 0.56, 0.74)
PINK = (0.93, 0.66, 0.78)
LUMEN = (0.96, 0.93, 0.95)
COARSE = 64  # pixels a side at which distances to fat cells are computed
MARGIN = 0.07  # how far outside its region a cell is still painted
STAINING = 0.15  # deviation of the logarithm of a slide's stain depth
LARGEST_SHARE = 0.34  # of a tile that the classes' tissues cover when the strengths sum to 1 or more


def tinted(rng: np.random.Generator, size: int, colour: canvas.Colour, grain: float) -> Array:
    """A ground of one colour with a texture of deviation `grain`."""
    texture = grain * canvas.clouds(rng, size, 7, octaves=2)
    return canvas.flat(size, colour) * (1 + texture * canvas.planes((0.7, 1.2, 0.6)))


def cells_in(rng: np.random.Generator, region: Array, gap: float, keep: float = 1.0, reach: float = 1.1) -> Points:
    """`canvas.scatter`, less the points that lie well outside `region` `(S, S)` and would be painted in vain."""
    points = canvas.scatter(rng, gap, keep, reach)
    around = points[:, None] + np.array([(0, 0), (-MARGIN, 0), (MARGIN, 0), (0, -MARGIN), (0, MARGIN)])
    pixel = np.clip(((around + 1) * (len(region) / 2)).astype(int), 0, len(region) - 1)
    near = region[pixel[..., 1], pixel[..., 0]].max(axis=1) > 0
    return np.compress(near, points, axis=0)


def nuclei(rng: np.random.Generator, image: Array, places: Points, radii: tuple[float, float], stretch: float) -> Array:
    """Violet ovals at `places` `(N, 2)`; radii between two bounds, `stretch` times longer than broad."""
    count = len(places)
    short = rng.uniform(*radii, count)
    shape = np.stack([short * stretch, short], axis=1)
    return canvas.blend(
        image,
        NUCLEUS,
        0.9 * canvas.blobs(image.shape[-1], places, shape, rng.uniform(0, np.pi, count), tones(rng, count)),
    )


def tones(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """How deeply each of `count` nuclei takes the stain."""
    return rng.uniform(0.6, 1.0, count)


def rim(rng: np.random.Generator, centre: Points, radii: Points, turn: float, gap: float) -> tuple[Points, Points]:
    """Nuclei on an ellipse, about `gap` apart: their places `(N, 2)` and outward angles `(N,)`."""
    count = max(6, int(np.pi * radii.sum() / gap))
    t = np.linspace(0, 2 * np.pi, count, endpoint=False) + rng.normal(0, 0.12 / np.sqrt(count), count)
    local = canvas.unit(t) * radii * (1 + rng.normal(0, 0.035, (count, 1)))
    rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return local @ rotation + centre, np.arctan2(local[:, 1], local[:, 0]) + turn


def gland_ring(rng: np.random.Generator, image: Array, places: Points, radii: Points, lumen: float) -> Array:
    """Glands at `places` `(N, 2)`: epithelium, a lumen of `lumen` times the radius, and a rim of nuclei."""
    if not len(places):
        return image
    size, turns = image.shape[-1], rng.uniform(0, np.pi, len(places))
    image = canvas.blend(image, EPITHELIUM, 0.9 * canvas.blobs(size, places, radii, turns, 1.0))
    image = canvas.blend(image, LUMEN, canvas.blobs(size, places, radii * lumen, turns, 1.0))
    middle = 0.55 + 0.45 * lumen
    rings = [rim(rng, c, r * middle + 0.01, turn, 0.065) for c, r, turn in zip(places, radii, turns, strict=True)]
    spots, angles = (np.concatenate(parts) for parts in zip(*rings, strict=True))
    ovals = rng.uniform(0.02, 0.028, (len(spots), 1)) * np.array([1.6, 1.0])
    return canvas.blend(image, NUCLEUS, 0.9 * canvas.blobs(size, spots, ovals, angles, tones(rng, len(spots))))


def glands(rng: np.random.Generator, region: Array) -> Array:
    """Well-formed round glands, each with one open lumen, in pink stroma."""
    size = len(region)
    places = cells_in(rng, region, rng.uniform(0.66, 0.78), 0.9, 1.2)
    radii = rng.uniform(0.19, 0.33, (len(places), 1)) * rng.uniform(0.85, 1.15, (len(places), 2))
    ground = nuclei(rng, tinted(rng, size, PINK, 0.04), cells_in(rng, region, 0.16, 0.6), (0.014, 0.02), 2.2)
    return gland_ring(rng, ground, places, radii, rng.uniform(0.5, 0.65))


def cribriform(rng: np.random.Generator, region: Array) -> Array:
    """Fused glands: a sheet of epithelium with many small punched-out holes."""
    size = len(region)
    holes = cells_in(rng, region, rng.uniform(0.28, 0.36), 0.9)
    radii = rng.uniform(0.06, 0.13, (len(holes), 1)) * rng.uniform(0.85, 1.15, (len(holes), 2))
    cells = cells_in(rng, region, 0.1, 0.95)
    sheet = nuclei(rng, tinted(rng, size, EPITHELIUM, 0.05), cells, (0.02, 0.027), 1.3)
    turns = rng.uniform(0, np.pi, len(holes))
    sheet = canvas.blend(sheet, EPITHELIUM, canvas.blobs(size, holes, radii * 1.2, turns, 1.0))
    return canvas.blend(sheet, LUMEN, canvas.blobs(size, holes, radii, turns, 1.0))


def solid(rng: np.random.Generator, region: Array) -> Array:
    """A solid sheet of large crowded nuclei of unequal size: no glands left."""
    size = len(region)
    cells = cells_in(rng, region, rng.uniform(0.11, 0.14), 0.95)
    return nuclei(rng, tinted(rng, size, (0.76, 0.54, 0.74), 0.06), cells, (0.032, 0.062), 1.25)


def lymphocytes(rng: np.random.Generator, region: Array) -> Array:
    """A field of small, round, dark nuclei with hardly any cytoplasm."""
    size = len(region)
    cells = cells_in(rng, region, rng.uniform(0.088, 0.105), 0.94)
    ground = tinted(rng, size, (0.86, 0.68, 0.82), 0.05)
    return canvas.darken(nuclei(rng, ground, cells, (0.028, 0.040), 1.0), (0.85, 0.8, 0.95), np.ones_like(region))


def stroma(rng: np.random.Generator, region: Array) -> Array:
    """Wavy pink collagen in parallel bundles with thin spindle nuclei along them."""
    size = len(region)
    x, y = canvas.plane(size)
    turn = rng.uniform(0, np.pi)
    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
    across = cos * y - sin * x + 0.07 * canvas.clouds(rng, size, 4)
    fibres = np.sin(across * np.float32(rng.uniform(28, 40)) + canvas.clouds(rng, size, 5))
    image = tinted(rng, size, (0.92, 0.58, 0.74), 0.05) * (1 + 0.09 * fibres)
    places = cells_in(rng, region, 0.2, 0.7)
    radii = rng.uniform(0.012, 0.018, (len(places), 1)) * np.array([4.5, 1.0])
    angles = turn + rng.normal(0, 0.2, len(places))
    return canvas.blend(image, NUCLEUS, 0.9 * canvas.blobs(size, places, radii, angles, tones(rng, len(places))))


def necrosis(rng: np.random.Generator, region: Array) -> Array:
    """Smudged eosin without structure, with nuclear dust."""
    size = len(region)
    image = tinted(rng, size, (0.86, 0.56, 0.68), 0.13)
    count = int(rng.integers(120, 220))
    dust = canvas.spots(
        size, rng.uniform(-1, 1, (count, 2)), rng.uniform(0.006, 0.018, count), rng.uniform(0.3, 0.9, count)
    )
    return canvas.blend(image, (0.36, 0.22, 0.48), 0.85 * dust)


def adipose(rng: np.random.Generator, region: Array) -> Array:
    """Large empty fat cells with thin pink walls."""
    size = len(region)
    cells = canvas.scatter(rng, rng.uniform(0.36, 0.46), reach=1.3)
    x, y = canvas.plane(COARSE)
    warp = 0.03 * canvas.clouds(rng, COARSE, 5)
    across, down = cells.astype(np.float32).T[..., None, None]
    squared = (x + warp - across) ** 2 + (y - warp - down) ** 2
    nearest = np.sqrt(np.partition(squared, 1, axis=0)[:2])
    wall = canvas.smoothstep(canvas.resize(nearest[1] - nearest[0], size), 0.055, 0.015)
    return canvas.blend(canvas.flat(size, (0.96, 0.94, 0.95)), (0.86, 0.58, 0.72), wall)


def mucin(rng: np.random.Generator, region: Array) -> Array:
    """A pale blue-grey lake with strands and few floating cells."""
    size = len(region)
    image = tinted(rng, size, (0.83, 0.83, 0.92), 0.05)
    lines = [canvas.curve(rng, p, rng.uniform(0, np.pi), 0.9, 1.0) for p in rng.uniform(-1, 0.8, (16, 2))]
    strands = canvas.soft(canvas.strokes(size, lines, [0.02] * 16), 0.015)
    image = canvas.blend(image, (0.68, 0.66, 0.86), 0.6 * strands)
    return nuclei(rng, image, cells_in(rng, region, 0.3, 0.3), (0.02, 0.03), 1.2)


TISSUES: dict[str, Callable[[np.random.Generator, Array], Array]] = {
    "glands": glands,
    "cribriform glands": cribriform,
    "solid sheets": solid,
    "lymphocytes": lymphocytes,
    "stroma": stroma,
    "necrosis": necrosis,
    "adipose": adipose,
    "mucin": mucin,
}


def plain(rng: np.random.Generator, region: Array) -> Array:
    """Tissue that speaks for no class: pink ground with scattered nuclei."""
    size = len(region)
    places = cells_in(rng, region, rng.uniform(0.15, 0.26), 0.8)
    return nuclei(rng, tinted(rng, size, PINK, 0.06), places, (0.02, 0.035), 1.4)


def territory(field: Array, share: float) -> Array:
    """Mask of the highest parts of `field` that make up `share` of the tile."""
    if share >= 1:
        return np.ones_like(field)
    level = float(np.quantile(field[::4, ::4], 1 - share))
    return canvas.smoothstep(field, level - 0.06, level + 0.06)


def paint(rng: np.random.Generator, size: int, strength: NDArray[np.float64]) -> Array:
    """A tile `(3, size, size)` in which each tissue of `TISSUES` covers an area in proportion to its strength.

    What is left is plain tissue. Territories are nested contours of one smooth field, the largest innermost.
    """
    image = plain(rng, np.ones((size, size), np.float32))
    field = canvas.clouds(rng, size, 2) + 0.3 * canvas.clouds(rng, size, 6)
    shares = LARGEST_SHARE * strength / max(1.0, float(strength.sum()))
    reach = float(shares.sum())
    for share, tissue in sorted(zip(shares, TISSUES.values(), strict=True), key=lambda pair: pair[0]):
        if share > 0:
            region = territory(field, reach)
            image = canvas.blend(image, tissue(rng, region), region)
            reach -= share
    return restained(rng, image)


def restained(rng: np.random.Generator, image: Array) -> Array:
    """The slide as its own staining batch left it: optical density scaled per channel, as slides differ."""
    depth = np.exp(rng.normal(0, STAINING, 3) + rng.normal(0, STAINING))
    density = -np.log(np.clip(image, 0.05, 1)) * canvas.planes(depth)
    return np.exp(-density)


HISTOLOGY = Family("histology", tuple(TISSUES), paint)
