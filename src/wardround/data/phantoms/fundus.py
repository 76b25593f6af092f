"""Fundus photography: the retina with its disc, vessels and macula inside a round field of view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.data.phantoms import canvas
from wardround.data.phantoms.canvas import Array
from wardround.data.phantoms.family import Family

Points = NDArray[np.float64]

DISC_RADIUS = 0.17
FIELD_RADIUS = 0.94
TEMPORAL = 0.85  # distance from the disc to the macula


@dataclass(frozen=True)
class Eye:
    """Where the landmarks are. `side` is -1 where the disc is on the left and 1 where it is on the right."""

    disc: tuple[float, float]
    macula: tuple[float, float]
    side: int
    field: Array


def eye(rng: np.random.Generator, size: int) -> Eye:
    """A left or a right eye, a little off centre."""
    side = 1 if rng.random() < 0.5 else -1
    x, y = side * rng.uniform(0.42, 0.55), rng.uniform(-0.12, 0.12)
    macula = (x - side * TEMPORAL * rng.uniform(0.65, 0.75), y + rng.uniform(0.02, 0.1))
    field = canvas.ellipse(size, (0, 0), (FIELD_RADIUS, FIELD_RADIUS), edge=0.05)
    return Eye((x, y), macula, side, field)


def ground(rng: np.random.Generator, size: int, view: Eye) -> Array:
    """The orange ground, brighter around the disc, darker at the macula and the rim."""
    red = rng.uniform(0.72, 0.92)
    tone = np.array([red, red * rng.uniform(0.40, 0.54), red * rng.uniform(0.14, 0.26)])
    x, y = canvas.plane(size)
    texture = 1 + 0.05 * canvas.clouds(rng, size, 4, octaves=4)
    rim = 1 - 0.35 * (x * x + y * y)
    light: Array = rim + 0.15 * bump(size, view.disc, 0.5) - 0.38 * bump(size, view.macula, 0.19)
    return canvas.flat(size, tone) * (texture * light)


def bump(size: int, centre: tuple[float, float], radius: float) -> Array:
    """A soft light `exp(-(distance / radius)^2)`, `(S, S)`."""
    x, y = canvas.plane(size)
    light: Array = np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / radius**2)
    return light


def arcade(rng: np.random.Generator, view: Eye, up: int) -> tuple[list[Points], list[float]]:
    """One vascular arcade that leaves the disc and bends around the macula, with its twigs, and their widths."""
    t = np.linspace(0, 1, 16)
    spread, reach = rng.uniform(0.55, 0.75), rng.uniform(1.3, 1.6)
    xs = view.disc[0] - view.side * (reach * t**1.4 - 0.12 * np.sin(np.pi * t))
    ys = view.disc[1] + up * spread * np.sin(np.pi * t * 0.66) ** 0.8 + np.cumsum(rng.normal(0, 0.012, 16))
    trunk = np.stack([xs, ys], axis=1)
    lines, widths = [trunk], [rng.uniform(0.035, 0.05)]
    for start in rng.integers(3, 15, 5):
        inward = rng.random() < 0.5
        heading = (np.pi if view.side > 0 else 0.0) + (1 if inward else -1) * -up * view.side * rng.uniform(0.5, 1.1)
        lines.append(canvas.curve(rng, trunk[start], heading, rng.uniform(0.3, 0.6), 0.7))
        widths.append(rng.uniform(0.014, 0.025))
    return lines, widths


def nasal(rng: np.random.Generator, view: Eye, up: int) -> tuple[list[Points], list[float]]:
    """A thinner vessel from the disc away from the macula."""
    heading = (0.0 if view.side > 0 else np.pi) + up * view.side * rng.uniform(0.5, 1.1)
    return [canvas.curve(rng, view.disc, heading, rng.uniform(0.6, 0.9), 0.5)], [rng.uniform(0.02, 0.03)]


def vessels(rng: np.random.Generator, image: Array, view: Eye) -> Array:
    """Dark veins and somewhat lighter, thinner arteries."""
    for colour, factor in (((0.45, 0.09, 0.07), 1.0), ((0.62, 0.17, 0.10), 0.65)):
        lines: list[Points] = []
        widths: list[float] = []
        for part in (arcade, nasal):
            for up in (-1, 1):
                more, thick = part(rng, view, up)
                lines += more
                widths += [factor * w for w in thick]
        image = canvas.blend(image, colour, 0.75 * canvas.strokes(image.shape[-1], lines, widths))
    return image


def disc(rng: np.random.Generator, image: Array, view: Eye, cup: float) -> Array:
    """The pale optic disc whose cup has `cup` times its radius."""
    size, radius = image.shape[-1], DISC_RADIUS * rng.uniform(0.9, 1.15)
    tall = (radius * 0.92, radius * 1.05)
    rim = canvas.ellipse(size, view.disc, tall, edge=0.25)
    image = canvas.blend(image, (0.95, 0.66, 0.36), 0.9 * rim)
    hollow = canvas.ellipse(size, view.disc, (tall[0] * cup, tall[1] * cup), edge=0.3)
    return canvas.blend(image, (1.0, 0.93, 0.72), 0.9 * hollow)


def around(rng: np.random.Generator, centre: tuple[float, float], count: int, spread: float) -> Points:
    """`count` points `(N, 2)`, normal around `centre`."""
    return rng.normal(centre, spread, (count, 2))


def healthy(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """Nothing is added; a plainly healthy eye has a bright reflex in its macula."""
    return canvas.blend(
        image,
        (0.95, 0.62, 0.38),
        strength * 0.5 * canvas.ellipse(image.shape[-1], view.macula, (0.035, 0.035), edge=0.9),
    )


def drusen(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """Soft round yellow spots around the macula."""
    count = int(rng.integers(25, 60))
    mask = canvas.spots(image.shape[-1], around(rng, view.macula, count, 0.19), rng.uniform(0.018, 0.05, count))
    return canvas.blend(image, (0.96, 0.78, 0.42), strength * 0.8 * canvas.soft(mask, 0.015))


def haemorrhages(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """Dark red blots and dots over the whole field."""
    count = int(rng.integers(10, 26))
    radii = np.exp(rng.normal(np.log(0.04), 0.45, (count, 1))) * rng.uniform(0.6, 1.4, (count, 2))
    places = rng.uniform(-0.75, 0.75, (count, 2))
    mask = canvas.blobs(image.shape[-1], places, radii, rng.uniform(0, np.pi, count), 1.0)
    return canvas.blend(image, (0.36, 0.04, 0.05), strength * 0.85 * canvas.soft(mask, 0.012))


def exudates(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """Sharp bright yellow flecks in clusters and partial rings."""
    places = []
    for centre in rng.uniform(-0.55, 0.55, (int(rng.integers(2, 5)), 2)):
        count = int(rng.integers(10, 26))
        angle = rng.uniform(0, 2 * np.pi) + rng.uniform(0, 4.5, count)
        ring = rng.uniform(0.1, 0.22) * canvas.unit(angle)
        places.append(centre + ring + rng.normal(0, 0.025, (count, 2)))
    points = np.concatenate(places)
    mask = canvas.spots(image.shape[-1], points, rng.uniform(0.008, 0.028, len(points)))
    return canvas.blend(image, (1.0, 0.95, 0.62), strength * 0.95 * mask)


def cupping(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """A large pale cup: the rim of the disc is nearly gone (drawn over the healthy disc)."""
    return disc(rng, image, view, 0.35 + 0.5 * strength)


def atrophy(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """A sharp pale patch at the macula through which choroidal vessels show."""
    size = image.shape[-1]
    x, y = canvas.plane(size)
    distance = np.hypot(x - view.macula[0], y - view.macula[1]) / rng.uniform(0.26, 0.42)
    patch = canvas.smoothstep(distance + 0.13 * canvas.clouds(rng, size, 6), 1.05, 0.9)
    pale = canvas.blend(image, (0.96, 0.74, 0.50), strength * 0.8 * patch)
    lines = [canvas.curve(rng, p, rng.uniform(0, np.pi), 0.7, 0.6) for p in around(rng, view.macula, 5, 0.25)]
    deep = canvas.soft(canvas.strokes(size, lines, [0.04] * 5), 0.01)
    return canvas.blend(pale, (0.82, 0.42, 0.25), strength * 0.6 * deep * patch)


def laser_scars(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """A regular raster of round pale burns with dark pigment, in the periphery."""
    gap = rng.uniform(0.15, 0.2)
    rows = np.arange(-1, 1, gap)
    grid = np.stack(np.meshgrid(rows, rows), axis=-1).reshape(-1, 2) + rng.normal(0, 0.022, (len(rows) ** 2, 2))
    distance = np.hypot(*(grid - np.asarray(view.macula)).T)
    away = grid[(distance > rng.uniform(0.5, 0.65)) & (np.hypot(*(grid - np.asarray(view.disc)).T) > 0.3)]
    radii = rng.uniform(0.035, 0.055, len(away))
    burn = canvas.blend(image, (0.90, 0.76, 0.55), strength * 0.75 * canvas.spots(image.shape[-1], away, radii))
    return canvas.blend(burn, (0.25, 0.12, 0.08), strength * 0.7 * canvas.spots(image.shape[-1], away, radii * 0.4))


def cotton_wool(rng: np.random.Generator, image: Array, view: Eye, strength: float) -> Array:
    """A few large fluffy white patches along the arcades."""
    count = int(rng.integers(3, 8))
    angle = rng.uniform(0, 2 * np.pi, count)
    places = 0.5 * canvas.unit(angle) + rng.normal(0, 0.08, (count, 2))
    radii = rng.uniform(0.06, 0.11, (count, 2))
    mask = canvas.soft(canvas.blobs(image.shape[-1], places, radii, rng.uniform(0, np.pi, count), 1.0), 0.04)
    return canvas.blend(image, (0.96, 0.90, 0.76), strength * 0.9 * mask)


STRUCTURES = {
    "healthy": healthy,
    "drusen": drusen,
    "haemorrhages": haemorrhages,
    "exudates": exudates,
    "cupped disc": cupping,
    "geographic atrophy": atrophy,
    "laser scars": laser_scars,
    "cotton-wool spots": cotton_wool,
}


def paint(rng: np.random.Generator, size: int, strength: NDArray[np.float64]) -> Array:
    """A fundus picture `(3, size, size)` that shows each structure of `STRUCTURES` at its strength."""
    view = eye(rng, size)
    image = disc(rng, ground(rng, size, view), view, rng.uniform(0.3, 0.5))
    for structure, amount in sorted(zip(STRUCTURES.values(), strength, strict=True), key=lambda pair: pair[1]):
        if amount > 0:
            image = structure(rng, image, view, float(amount))
    image = vessels(rng, image, view)
    return image * view.field


FUNDUS = Family("fundus", tuple(STRUCTURES), paint, blank=True)
