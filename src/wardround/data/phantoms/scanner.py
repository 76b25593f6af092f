"""What the feature dial does: each site has its own scanner, through which all of its pictures pass.

A scanner is a vector of traits around 0, the neutral scanner. A picture's traits are the site's, times the dial,
plus a little variation of its own that is the same at every site.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from wardround.seeds import numpy_stream

TRAITS = ("red", "blue", "saturation", "gamma", "contrast", "sharpness", "resolution", "noise", "vignette")
VARIATION = 0.12  # deviation of a picture's traits around its scanner's


def site_traits(site: int, seed: int) -> NDArray[np.float64]:
    """The traits `(9,)` of a site's scanner, each in -1..1 and away from 0.

    Sites lie on an additive recurrence (steps of irrational length from a start drawn by the seed), which spreads
    any number of them evenly, so a site keeps its scanner when others join.
    """
    start = numpy_stream(seed, "phantoms/scanner").uniform(0, 1, len(TRAITS))
    ratio = 1.0
    for _ in range(30):  # the root of x^(d+1) = x + 1, the golden ratio of d dimensions
        ratio = (1 + ratio) ** (1 / (len(TRAITS) + 1))
    position = 2 * ((start + site * ratio ** -np.arange(1.0, len(TRAITS) + 1)) % 1) - 1
    return np.sign(position) * np.sqrt(np.abs(position))


def picture_traits(rng: np.random.Generator, traits: NDArray[np.float64], dial: float) -> dict[str, float]:
    """One picture's traits by name."""
    values = dial * traits + VARIATION * rng.standard_normal(len(TRAITS))
    return dict(zip(TRAITS, values.tolist(), strict=True))


def expose(
    rng: np.random.Generator, picture: NDArray[np.float32], traits: dict[str, float], grey: bool
) -> NDArray[np.uint8]:
    """The scan, uint8 `(S, S, 3)` or `(S, S, 1)` where `grey`, of a float `picture` `(3, S, S)` in 0..1."""
    raw = (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)
    optical = optics(Image.fromarray(raw[0] if grey else np.ascontiguousarray(raw.transpose(1, 2, 0))), traits)
    return sensor(rng, tone(optical, traits), traits)


def optics(image: Image.Image, traits: dict[str, float]) -> Image.Image:
    """Resolution (down to 0.4 of the pixels a side), then blur (radius up to 1.2 % of the side) or sharpening."""
    side = image.width
    if traits["resolution"] > 0:
        coarse = max(8, round(side * (1 - 0.6 * min(traits["resolution"], 1))))
        image = image.resize((coarse, coarse), Image.Resampling.BOX).resize((side, side), Image.Resampling.BILINEAR)
    blur = traits["sharpness"]
    if blur > 0:
        return image.filter(ImageFilter.GaussianBlur(0.012 * side * blur))
    return image.filter(ImageFilter.UnsharpMask(0.015 * side, round(-180 * blur), 0))


def tone(image: Image.Image, traits: dict[str, float]) -> Image.Image:
    """Saturation, then per channel: gamma, contrast about the middle, and white balance."""
    colour = image.mode == "RGB"
    if colour:
        image = Image.blend(image.convert("L").convert("RGB"), image, float(np.exp(0.5 * traits["saturation"])))
    curve = np.linspace(0, 1, 256) ** np.exp(0.45 * traits["gamma"])
    curve = 0.5 + (curve - 0.5) * np.exp(0.3 * traits["contrast"])
    gains = np.exp([0.2 * traits["red"], 0.0, 0.3 * traits["blue"]]) if colour else np.ones(1)
    table = np.clip(curve * gains[:, None] * 255 + 0.5, 0, 255).astype(np.uint8)
    return image.point(table.ravel().tolist())


def sensor(rng: np.random.Generator, image: Image.Image, traits: dict[str, float]) -> NDArray[np.uint8]:
    """Vignette, then noise of deviation 0.01 (up to 0.06) that is independent per pixel and channel."""
    values = np.asarray(image, dtype=np.float32).reshape(image.height, image.width, -1)
    axis = np.linspace(-1, 1, image.width, dtype=np.float32)
    fall = 0.35 * max(traits["vignette"], 0.0) * (axis[:, None] ** 2 + axis[None] ** 2)
    noise = rng.standard_normal(values.shape, dtype=np.float32) * (255 * (0.01 + 0.05 * max(traits["noise"], 0.0)))
    scan: NDArray[np.float32] = values * (1 - fall)[..., None] + noise
    return np.clip(scan, 0, 255).astype(np.uint8)
