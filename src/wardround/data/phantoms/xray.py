"""Chest X-ray: dark lungs between ribs, spine, heart and diaphragm. One density `(S, S)`, where white is 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.data.phantoms import canvas
from wardround.data.phantoms.canvas import Array
from wardround.data.phantoms.family import Family


@dataclass(frozen=True)
class Chest:
    """The patient's build. Lung 0 is at the left of the picture (negative x), lung 1 at its right.

    Attributes:
        width: distance of a lung's axis from the spine.
        top: y of the apices.
        bases: y of the two domes of the diaphragm.
        lungs: mask `(S, S)` of each lung.
    """

    width: float
    top: float
    bases: tuple[float, float]
    lungs: tuple[Array, Array]

    @property
    def lung(self) -> Array:
        """Mask of both lungs."""
        return np.maximum(*self.lungs)

    def place(self, rng: np.random.Generator) -> tuple[int, float, float]:
        """A lung (0 or 1) and a point x, y well inside it."""
        lung = int(rng.integers(2))
        x = (2 * lung - 1) * (self.width + rng.uniform(-0.12, 0.12))
        return lung, x, rng.uniform(self.top + 0.35, self.bases[lung] - 0.22)


def lung_field(size: int, side: int, width: float, top: float, base: float) -> Array:
    """Mask of one lung: a tall egg, cut below by the dome of the diaphragm and inside by the mediastinum."""
    x, y = canvas.plane(size)
    middle = (top + base + 0.45) / 2
    egg = canvas.ellipse(size, (side * width, middle), (0.37, middle - top), angle=-side * 0.08, edge=0.12)
    dome = base + 0.7 * (x - side * width * 0.85) ** 2
    return egg * canvas.smoothstep(y - dome, 0.04, -0.04) * canvas.smoothstep(side * x, 0.08, 0.2)


def chest(rng: np.random.Generator, size: int) -> Chest:
    """A patient of random build; the left of the picture has the higher diaphragm (over the liver)."""
    width, top, right = rng.uniform(0.41, 0.48), rng.uniform(-0.86, -0.72), rng.uniform(0.42, 0.62)
    bases = (right, right + rng.uniform(0.03, 0.1))
    first, second = (lung_field(size, side, width, top, base) for side, base in zip((-1, 1), bases, strict=True))
    return Chest(width, top, bases, (first, second))


def ribs(rng: np.random.Generator, size: int) -> Array:
    """Mask of the back ribs and the collar bones: paired arcs that fall outwards."""
    t = np.linspace(0, 1, 14)
    lines, widths = [], []
    spacing, fall = rng.uniform(0.17, 0.2), rng.uniform(0.2, 0.35)
    for level in np.arange(-0.85, 0.75, spacing):
        bow = 0.2 * np.sin(np.pi * t)
        lines += [np.stack([side * (0.06 + 0.85 * t), level - bow + fall * t**2], axis=1) for side in (-1, 1)]
        widths += [rng.uniform(0.05, 0.065)] * 2
    collar = rng.uniform(-0.85, -0.75)
    lines += [np.stack([side * (0.1 + 0.8 * t), collar - 0.14 * t + 0.06 * np.sin(6 * t)], axis=1) for side in (-1, 1)]
    return canvas.soft(canvas.strokes(size, lines, [*widths, 0.07, 0.07]), 0.012)


def markings(rng: np.random.Generator, size: int, build: Chest) -> Array:
    """Mask of the lung's own vessels: branches that leave the hila."""
    lines, widths = [], []
    for side in (-1, 1):
        for heading in rng.uniform(-1.3, 1.3, 9):
            angle = heading if side > 0 else np.pi - heading
            lines.append(canvas.curve(rng, (side * 0.16, rng.uniform(-0.15, 0.1)), angle, rng.uniform(0.3, 0.6), 0.6))
            widths.append(rng.uniform(0.012, 0.035))
    return canvas.soft(canvas.strokes(size, lines, widths), 0.015) * build.lung


def towards(density: Array, value: float, mask: Array) -> Array:
    """`density` moved towards `value` by `mask` `(S, S)`."""
    return density + (value - density) * mask


def heart(size: int, build: Chest, width: float) -> Array:
    """Mask of the heart and aorta; `width` is the half-breadth of the heart."""
    low = build.bases[1] + 0.02
    body = canvas.ellipse(size, (0.10 + 0.4 * (width - 0.3), low - 0.2), (width, 0.34), angle=0.45, edge=0.22)
    arch = canvas.ellipse(size, (0.05, -0.35), (0.13, 0.19), edge=0.5)
    waist = canvas.ellipse(size, (0.05, -0.1), (0.15, 0.35), edge=0.5)
    return np.maximum(body, np.maximum(arch, waist))


def film(rng: np.random.Generator, size: int, build: Chest) -> Array:
    """The density `(S, S)` of a healthy chest."""
    x, y = canvas.plane(size)
    body = canvas.ellipse(size, (0, 0.25), (rng.uniform(0.92, 1.05), 1.35), edge=0.1)
    density = 0.04 + body * (rng.uniform(0.5, 0.58) + 0.07 * y + 0.02 * canvas.clouds(rng, size, 6))
    density -= build.lung * rng.uniform(0.33, 0.4)
    density += 0.07 * ribs(rng, size) * body + 0.10 * markings(rng, size, build)
    spine = canvas.smoothstep(np.abs(x), 0.16, 0.06) * (0.85 + 0.15 * np.cos(y * rng.uniform(30, 36)))
    density += 0.09 * spine * body
    return towards(density, 0.58, 0.8 * heart(size, build, rng.uniform(0.29, 0.34)))


def clear(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """Nothing is added; a plainly clear lung is a little darker."""
    return density - 0.05 * strength * build.lung


def opacity(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """Fluffy consolidation with vague borders in one or two places of the lungs."""
    size = len(density)
    for _ in range(int(rng.integers(1, 3))):
        lung, x, y = build.place(rng)
        shape = canvas.ellipse(size, (x, y), rng.uniform(0.2, 0.32, 2), edge=1.3)
        fluff = 0.85 + 0.3 * canvas.clouds(rng, size, 8, octaves=2)
        cloud: Array = np.clip(shape * fluff, 0, 1)
        density = towards(density, 0.6, 0.75 * strength * cloud * build.lungs[lung])
    return density


def effusion(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """Fluid that blunts the base of one lung (at times both), with a meniscus that climbs the outer wall."""
    x, y = canvas.plane(len(density))
    sides = (0, 1) if rng.random() < 0.2 else (int(rng.integers(2)),)
    for side in sides:
        outward = (2 * side - 1) * x
        level = build.bases[side] - rng.uniform(0.1, 0.4) * (0.5 + 0.5 * strength) - 1.4 * (outward - 0.35) ** 2
        pool = canvas.smoothstep(y - level, -0.08, 0.12) * canvas.smoothstep(outward, 0.02, 0.12)
        inside = canvas.smoothstep(outward, 0.9, 0.76) * canvas.smoothstep(y - build.bases[side], 0.5, 0.2)
        density = towards(density, 0.62, 0.95 * strength * pool * inside)
    return density


def nodule(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """One to three round, well-defined shadows."""
    size = len(density)
    for _ in range(int(rng.integers(1, 4))):
        _, x, y = build.place(rng)
        radius = rng.uniform(0.065, 0.12)
        ball = canvas.ellipse(size, (x, y), (radius, radius * rng.uniform(0.85, 1.15)), edge=0.6)
        density = towards(density, 0.58, 0.8 * strength * ball)
    return density


def pneumothorax(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """Air beside one collapsed lung: a black rim without markings, bounded by a thin white line."""
    lung = int(rng.integers(2))
    side, depth = 2 * lung - 1, rng.uniform(0.12, 0.26)
    middle = (build.top + build.bases[lung] + 0.45) / 2
    radii = (0.37 - 0.6 * depth, middle - build.top - depth)
    centre = (side * (build.width - 0.5 * depth), middle)
    size = len(density)
    collapsed = canvas.ellipse(size, centre, radii, edge=0.03)
    line = canvas.ellipse(size, centre, (radii[0] + 0.012, radii[1] + 0.012), edge=0.03) - collapsed
    air = build.lungs[lung] * (1 - collapsed)
    density = towards(density, 0.06, 0.85 * strength * air)
    edge: Array = np.clip(line, 0, 1)
    return density + strength * build.lungs[lung] * (0.1 * collapsed + 0.25 * edge)


def cardiomegaly(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """A heart broader than half the chest."""
    shadow = heart(len(density), build, rng.uniform(0.48, 0.58))
    return towards(density, 0.62, 0.85 * strength * shadow)


def interstitial(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """A fine white mesh over both lungs, denser towards the bases."""
    size = len(density)
    lines = [canvas.curve(rng, p, rng.uniform(0, 2 * np.pi), 0.24, 2.5, 5) for p in rng.uniform(-0.9, 0.8, (100, 2))]
    mesh = canvas.strokes(size, lines, [0.012] * len(lines))
    _, y = canvas.plane(size)
    return density + 0.18 * strength * mesh * build.lung * (0.75 + 0.4 * y)


def cavity(rng: np.random.Generator, density: Array, build: Chest, strength: float) -> Array:
    """A ring shadow: a thick wall around air, in an upper lobe."""
    size, lung = len(density), int(rng.integers(2))
    centre = ((2 * lung - 1) * build.width * rng.uniform(0.85, 1.1), build.top + rng.uniform(0.3, 0.6))
    radius, wall = rng.uniform(0.13, 0.2), rng.uniform(0.6, 0.75)
    outer = canvas.ellipse(size, centre, (radius, radius), edge=0.2)
    inner = canvas.ellipse(size, centre, (radius * wall, radius * wall), edge=0.2)
    return towards(density, 0.6, 0.8 * strength * (outer - inner)) - 0.06 * strength * inner


STRUCTURES = {
    "clear": clear,
    "opacity": opacity,
    "effusion": effusion,
    "nodule": nodule,
    "pneumothorax": pneumothorax,
    "cardiomegaly": cardiomegaly,
    "interstitial": interstitial,
    "cavity": cavity,
}


def paint(rng: np.random.Generator, size: int, strength: NDArray[np.float64]) -> Array:
    """A chest film `(3, size, size)` that shows each structure of `STRUCTURES` at its strength."""
    build = chest(rng, size)
    density = film(rng, size, build)
    for structure, amount in sorted(zip(STRUCTURES.values(), strength, strict=True), key=lambda pair: pair[1]):
        if amount > 0:
            density = structure(rng, density, build, float(amount))
    bright = np.clip(density * np.float32(1.25), 0, 1).astype(np.float32)
    return np.repeat(bright[None], 3, axis=0)


XRAY = Family("xray", tuple(STRUCTURES), paint, grey=True, blank=True)
