"""Brushes for phantoms: float32 pictures `(3, S, S)` in 0..1, painted in coordinates from -1 to 1.

Coordinates have x to the right and y downwards, so a scene has the same layout at every image size. A mask is a
float32 array `(S, S)` in 0..1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Array = NDArray[np.float32]
Numbers = Sequence[float] | NDArray[np.floating]
Colour = Numbers  # red, green and blue in 0..1, or a whole picture
Point = Numbers  # x and y
Tones = float | NDArray[np.floating]  # how strongly each of N shapes covers, in 0..1

SUPERSAMPLE = 2
CORNERS = 8  # of the polygon that stands for an ellipse
THIN = 4  # pen pixels up to which a curve needs no rounded joints


@lru_cache(maxsize=8)
def plane(size: int) -> tuple[Array, Array]:
    """The x and y of each pixel's centre, each `(S, S)`; read-only, as they are shared between calls."""
    axis = ((np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1).astype(np.float32)
    x, y = np.meshgrid(axis, axis)
    x.flags.writeable = y.flags.writeable = False
    return x, y


def resize(values: Array, size: int) -> Array:
    """A square array brought to `(size, size)` with bicubic interpolation."""
    image = Image.fromarray(np.ascontiguousarray(values, dtype=np.float32))
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


def clouds(rng: np.random.Generator, size: int, cells: int, octaves: int = 1) -> Array:
    """Smooth noise `(S, S)` of mean about 0 and deviation about 1, with `cells` bumps across the picture.

    Each further octave doubles the bumps and halves their height. The draws do not depend on `size`.
    """
    total = np.zeros((size, size), np.float32)
    for octave in range(octaves):
        grid = rng.standard_normal((cells << octave, cells << octave), dtype=np.float32)
        total += resize(grid, size) * np.float32(1.4 * 0.5**octave)
    return total


def smoothstep(values: Array, low: float, high: float) -> Array:
    """0 below `low`, 1 above `high`, and a smooth ramp between (falling where `high` < `low`)."""
    ramp: Array = np.clip((values - low) / (high - low), 0, 1)
    return ramp * ramp * (3 - 2 * ramp)


def ellipse(size: int, centre: Point, radii: Point, angle: float = 0.0, edge: float = 0.1) -> Array:
    """Mask of one ellipse; its border is a ramp `edge` wide, as a share of the radius."""
    x, y = plane(size)
    cos, sin = math.cos(angle), math.sin(angle)
    u = (cos * (x - centre[0]) + sin * (y - centre[1])) / radii[0]
    v = (cos * (y - centre[1]) - sin * (x - centre[0])) / radii[1]
    return smoothstep(np.sqrt(u * u + v * v), 1 + edge / 2, 1 - edge / 2)


def planes(colour: Colour) -> Array:
    """A colour as `(3, 1, 1)`, so that it spreads over a picture; a picture as it is."""
    values = np.asarray(colour, dtype=np.float32)
    return values[:, None, None] if values.ndim == 1 else values


def blend(image: Array, colour: Colour, mask: Array) -> Array:
    """`image` moved towards `colour` (one RGB colour or a whole picture) by `mask`."""
    return image + mask.astype(np.float32) * (planes(colour) - image)


def darken(image: Array, colour: Colour, mask: Array) -> Array:
    """`image` seen through a dye: full `mask` multiplies it by `colour`, as stain on a slide does."""
    return image * (1 - mask.astype(np.float32) * (1 - planes(colour)))


def flat(size: int, colour: Colour) -> Array:
    """A picture `(3, S, S)` of one colour."""
    return np.broadcast_to(planes(colour), (3, size, size)).copy()


def soft(mask: Array, radius: float) -> Array:
    """A mask blurred by `radius` (in coordinates)."""
    image = Image.fromarray((np.clip(mask, 0, 1) * 255).astype(np.uint8))
    blurred = image.filter(ImageFilter.GaussianBlur(radius * len(mask) / 2))
    return np.asarray(blurred, dtype=np.float32) / np.float32(255)


def drawn(size: int, draw: Callable[[ImageDraw.ImageDraw, float], None]) -> Array:
    """Mask of what `draw(pen, scale)` draws; a coordinate c lies at pen position `(c + 1) * scale`."""
    side = size * SUPERSAMPLE
    sheet = Image.new("L", (side, side))
    draw(ImageDraw.Draw(sheet), side / 2)
    small = np.asarray(sheet.reduce(SUPERSAMPLE), dtype=np.float32)
    return small / np.float32(255)


def spots(size: int, centres: NDArray[np.floating], radii: NDArray[np.floating], tones: Tones = 1.0) -> Array:
    """Mask of many discs: `centres` `(N, 2)`, `radii` `(N,)`, `tones` one value or N values in 0..1."""
    fills = (np.broadcast_to(np.asarray(tones, float), (len(radii),)) * 255).astype(int).tolist()

    def draw(pen: ImageDraw.ImageDraw, scale: float) -> None:
        corners = np.concatenate([centres - radii[:, None], centres + radii[:, None]], axis=1)
        for box, fill in zip(((corners + 1) * scale).tolist(), fills, strict=True):
            pen.ellipse(box, fill=fill)

    return drawn(size, draw)


def blobs(
    size: int,
    centres: NDArray[np.floating],
    radii: NDArray[np.floating],
    angles: NDArray[np.floating],
    tones: Tones,
) -> Array:
    """Mask of many filled ellipses: `centres` and `radii` `(N, 2)`, `angles` `(N,)` in radians."""
    turn = np.linspace(0, 2 * np.pi, CORNERS, endpoint=False)
    ring = unit(turn) * radii[:, None, :]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    xs = cos * ring[..., 0] - sin * ring[..., 1] + centres[:, :1]
    ys = sin * ring[..., 0] + cos * ring[..., 1] + centres[:, 1:]
    return polygons(size, np.stack([xs, ys], axis=-1), tones)


def unit(angles: NDArray[np.floating]) -> NDArray[np.float64]:
    """Points `(N, 2)` on the unit circle at `angles` `(N,)`, in radians."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float64)


def polygons(size: int, outlines: NDArray[np.floating], tones: Tones = 1.0) -> Array:
    """Mask of many filled polygons, `outlines` `(N, corners, 2)`; later ones lie above earlier ones."""
    fills = (np.broadcast_to(np.asarray(tones, float), (len(outlines),)) * 255).astype(int).tolist()

    def draw(pen: ImageDraw.ImageDraw, scale: float) -> None:
        corners = ((outlines + 1) * scale).reshape(len(outlines), -1).tolist()
        for outline, fill in zip(corners, fills, strict=True):
            pen.polygon(outline, fill=fill)

    return drawn(size, draw)


def strokes(size: int, lines: Iterable[NDArray[np.floating]], widths: Iterable[float]) -> Array:
    """Mask of curves, each `(points, 2)` with its own width (in coordinates, never under half a pixel)."""

    def draw(pen: ImageDraw.ImageDraw, scale: float) -> None:
        for line, width in zip(lines, widths, strict=True):
            pixels = max(1, round(width * scale))
            joint = "curve" if pixels > THIN else None
            pen.line(((line + 1) * scale).ravel().tolist(), fill=255, width=pixels, joint=joint)

    return drawn(size, draw)


def curve(
    rng: np.random.Generator, start: Point, heading: float, length: float, bend: float, points: int = 12
) -> NDArray[np.float64]:
    """A wandering curve `(points, 2)` from `start`; `bend` is how many radians its heading strays in all."""
    turns = np.cumsum(rng.normal(0, bend / np.sqrt(points), points - 1)) + heading
    steps = unit(turns) * (length / (points - 1))
    path: NDArray[np.float64] = np.concatenate([[[0.0, 0.0]], np.cumsum(steps, axis=0)])
    path += np.asarray(start, float)
    return path


def scatter(rng: np.random.Generator, gap: float, keep: float = 1.0, reach: float = 1.1) -> NDArray[np.float64]:
    """Points `(N, 2)` about `gap` apart over the square of half-side `reach`: a jittered triangular lattice.

    `keep` is the share of its points that stay, drawn at random.
    """
    rows, columns = int(2 * reach / (0.866 * gap)) + 2, int(2 * reach / gap) + 2
    column, row = np.meshgrid(np.arange(columns), np.arange(rows))
    points = np.stack([(column + 0.5 * (row % 2)) * gap, row * 0.866 * gap], axis=-1).reshape(-1, 2)
    points += rng.uniform(-gap, 0, 2) - reach + rng.normal(0, 0.16 * gap, points.shape)
    return points[rng.random(len(points)) < keep]
