"""Dermoscopy: one pigmented lesion on skin, seen through a dermatoscope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.data.phantoms import canvas
from wardround.data.phantoms.canvas import Array
from wardround.data.phantoms.family import Family

CONTRAST = 0.75  # of a structure at strength 1


@dataclass(frozen=True)
class Lesion:
    """Where the lesion is: `depth` `(S, S)` is 1 at its centre, 0 on its border and negative outside."""

    depth: Array
    mask: Array
    centre: tuple[float, float]
    radius: float
    pigment: tuple[float, float, float]


def outline(rng: np.random.Generator, size: int) -> Array:
    """The border's ripple by angle and position: a few harmonics and some noise, so that no lesion is round."""
    x, y = canvas.plane(size)
    angle = np.arctan2(y, x)
    waves = rng.normal(0, 0.09, 4) / np.arange(1, 5)
    phases = rng.uniform(0, 2 * np.pi, 4)
    ripple = 0.05 * canvas.clouds(rng, size, 7)
    for k, (wave, phase) in enumerate(zip(waves, phases, strict=True), start=1):
        ripple += np.float32(wave) * np.cos(k * angle + np.float32(phase))
    return ripple


def lesion(rng: np.random.Generator, size: int) -> Lesion:
    """A lesion of random place, size, shape, border and brown."""
    x, y = canvas.plane(size)
    cx, cy = rng.uniform(-0.15, 0.15, 2)
    radius, turn, stretch = rng.uniform(0.52, 0.8), rng.uniform(0, np.pi), rng.uniform(0.8, 1.25)
    u = (np.cos(turn) * (x - cx) + np.sin(turn) * (y - cy)) * np.float32(stretch)
    v = (np.cos(turn) * (y - cy) - np.sin(turn) * (x - cx)) / np.float32(stretch)
    depth = (1 - np.hypot(u, v) / np.float32(radius) + outline(rng, size)).astype(np.float32)
    shade = rng.uniform(0.75, 1.2)
    red = 0.60 * shade
    pigment = (red, red * rng.uniform(0.60, 0.72), red * rng.uniform(0.36, 0.50))
    return Lesion(depth, canvas.smoothstep(depth, -0.05, rng.uniform(0.05, 0.3)), (cx, cy), radius, pigment)


def skin(rng: np.random.Generator, size: int) -> Array:
    """Skin of random tone with its fine relief."""
    light = rng.uniform(0.78, 0.95)
    tone = np.array([light, light * rng.uniform(0.74, 0.84), light * rng.uniform(0.62, 0.74)])
    relief = 0.02 * canvas.clouds(rng, size, 5) + 0.012 * canvas.clouds(rng, size, 40)
    return canvas.flat(size, tone) + relief


def pigmented(rng: np.random.Generator, image: Array, spot: Lesion) -> Array:
    """The lesion's ground: uneven brown."""
    mottle = np.clip(0.78 + 0.13 * canvas.clouds(rng, image.shape[-1], 6, octaves=3), 0.3, 1)
    return canvas.blend(image, spot.pigment, spot.mask * mottle)


def hairs(rng: np.random.Generator, image: Array) -> Array:
    """A few dark hairs over two lesions in five."""
    count = int(rng.integers(1, 7)) if rng.random() < 0.4 else 0
    starts, headings = rng.uniform(-1, 1, (count, 2)), rng.uniform(0, 2 * np.pi, count)
    lines = [canvas.curve(rng, s, h, 1.6, 0.4) for s, h in zip(starts, headings, strict=True)]
    mask = canvas.strokes(image.shape[-1], lines, rng.uniform(0.012, 0.025, count))
    return canvas.blend(image, (0.16, 0.11, 0.09), 0.75 * mask)


def inside(rng: np.random.Generator, spot: Lesion, count: int, reach: float) -> NDArray[np.float64]:
    """`count` points `(N, 2)` within `reach` times the lesion's radius, even over its area."""
    angle = rng.uniform(0, 2 * np.pi, count)
    distance = spot.radius * reach * np.sqrt(rng.uniform(0, 1, count))
    points: NDArray[np.float64] = canvas.unit(angle) * distance[:, None] + np.array(spot.centre)
    return points


def shaded(spot: Lesion, factor: float) -> tuple[float, ...]:
    """The lesion's brown made darker."""
    return tuple(factor * value for value in spot.pigment)


def network(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """A brown honeycomb: the sum of three plane waves, warped by noise."""
    size = image.shape[-1]
    x, y = canvas.plane(size)
    u = x + 0.035 * canvas.clouds(rng, size, 5)
    v = y + 0.035 * canvas.clouds(rng, size, 5)
    turn, pitch = rng.uniform(0, np.pi), rng.uniform(36, 50)
    directions = turn + np.arange(3) * (2 * np.pi / 3)
    lattice = sum(np.cos(np.float32(pitch) * (np.cos(d) * u + np.sin(d) * v)) for d in directions.astype(np.float32))
    mesh = canvas.smoothstep(np.asarray(lattice, np.float32), 0.3, -0.9)
    patches = canvas.smoothstep(canvas.clouds(rng, size, 3), -1.0, 0.2)
    return canvas.blend(image, shaded(spot, 0.45), strength * 0.85 * mesh * spot.mask * patches)


def globules(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """Round dark-brown clods of varying size, scattered or crowded to one side."""
    count = int(rng.integers(22, 50))
    places = inside(rng, spot, count, 0.95) + rng.normal(0, 0.12, 2)
    mask = canvas.spots(image.shape[-1], places, rng.uniform(0.03, 0.07, count), rng.uniform(0.6, 1, count))
    return canvas.blend(image, shaded(spot, 0.45), strength * 0.9 * canvas.soft(mask, 0.012) * (spot.depth > -0.1))


def streaks(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """Dark radial projections over an arc of the border."""
    count, arc = int(rng.integers(14, 30)), rng.uniform(0.5, 1.0) * 2 * np.pi
    angles = rng.uniform(0, 2 * np.pi) + np.linspace(0, arc, count) + rng.normal(0, 0.05, count)
    out = canvas.unit(angles)
    first = np.asarray(spot.centre) + out * spot.radius * rng.uniform(0.6, 0.75, count)[:, None]
    last = np.asarray(spot.centre) + out * spot.radius * rng.uniform(1.05, 1.35, count)[:, None]
    lines = np.stack([first, last + rng.normal(0, 0.03, (count, 2))], axis=1)
    mask = canvas.strokes(image.shape[-1], list(lines), rng.uniform(0.03, 0.06, count))
    return canvas.blend(image, shaded(spot, 0.45), strength * 0.85 * canvas.soft(mask, 0.018))


def veil(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """An irregular blue-white haze over part of the lesion."""
    size = image.shape[-1]
    x, y = canvas.plane(size)
    (px, py) = inside(rng, spot, 1, 0.45)[0]
    field = np.hypot(x - px, y - py) / (spot.radius * rng.uniform(0.6, 0.85)) + 0.2 * canvas.clouds(rng, size, 6)
    mask = canvas.smoothstep(field, 1.15, 0.5) * spot.mask
    blue = rng.uniform(0.62, 0.85) + 0.05 * canvas.clouds(rng, size, 6, octaves=2)
    haze = np.stack([0.76 * blue, 0.84 * blue, blue])
    return canvas.blend(image, haze, strength * 0.75 * mask)


def vessels(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """Sharp red branching vessels on a pink ground."""
    lines, widths = [], []
    for start in inside(rng, spot, int(rng.integers(3, 7)), 0.6):
        heading = rng.uniform(0, 2 * np.pi)
        trunk = canvas.curve(rng, start, heading, rng.uniform(0.4, 0.7), 1.0)
        branches = [canvas.curve(rng, trunk[i], heading + t, 0.25, 1.0) for i, t in ((4, 0.8), (7, -0.8), (9, 0.6))]
        lines += [trunk, *branches]
        widths += [0.035, 0.02, 0.02, 0.02]
    pink = canvas.blend(image, (0.84, 0.56, 0.52), strength * 0.5 * spot.mask)
    return canvas.blend(pink, (0.66, 0.10, 0.12), strength * 0.9 * canvas.strokes(image.shape[-1], lines, widths))


def milia(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """Bright round cysts among dark plugs of horn."""
    cysts, plugs = int(rng.integers(8, 20)), int(rng.integers(4, 10))
    size = image.shape[-1]
    dark = canvas.spots(size, inside(rng, spot, plugs, 0.9), rng.uniform(0.03, 0.06, plugs))
    bright = canvas.spots(size, inside(rng, spot, cysts, 0.9), rng.uniform(0.025, 0.05, cysts))
    return canvas.blend(
        canvas.blend(image, shaded(spot, 0.35), strength * 0.9 * dark),
        (0.97, 0.92, 0.76),
        strength * 0.9 * bright,
    )


def regression(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """A white scar peppered with fine grey-blue dots."""
    size, count = image.shape[-1], int(rng.integers(30, 70))
    patch = canvas.smoothstep(canvas.clouds(rng, size, 3), -0.7, 0.2) * spot.mask
    scar = canvas.blend(image, (0.90, 0.83, 0.79), strength * 0.85 * patch)
    pepper = canvas.spots(size, inside(rng, spot, count, 0.85), rng.uniform(0.012, 0.025, count))
    return canvas.blend(scar, (0.38, 0.40, 0.48), strength * 0.9 * pepper * patch)


def structureless(rng: np.random.Generator, image: Array, spot: Lesion, strength: float) -> Array:
    """Even tan without any pattern."""
    pale = rng.uniform(0.3, 0.6)
    tan = [(1 - pale) * own + pale * light for own, light in zip(spot.pigment, (0.80, 0.62, 0.45), strict=True)]
    return canvas.blend(image, tan, strength * 0.9 * spot.mask)


STRUCTURES = {
    "pigment network": network,
    "globules": globules,
    "streaks": streaks,
    "blue-white veil": veil,
    "vessels": vessels,
    "milia-like cysts": milia,
    "regression": regression,
    "structureless": structureless,
}


def paint(rng: np.random.Generator, size: int, strength: NDArray[np.float64]) -> Array:
    """A dermoscopic picture `(3, size, size)` that shows each structure of `STRUCTURES` at its strength."""
    spot = lesion(rng, size)
    image = pigmented(rng, skin(rng, size), spot)
    for structure, amount in sorted(zip(STRUCTURES.values(), strength, strict=True), key=lambda pair: pair[1]):
        if amount > 0:
            image = structure(rng, image, spot, CONTRAST * float(amount))
    return hairs(rng, image)


DERMOSCOPY = Family("dermoscopy", tuple(STRUCTURES), paint)
