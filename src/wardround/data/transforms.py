"""Augmentation of training batches, and the crop that evaluation uses.

All work on uint8 batches `(B, H, W, C)` and draw from a NumPy generator, so a batch depends on its stream
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Policy = Literal["none", "light", "fed-isic"]
Images = NDArray[np.uint8]
# FLamby stores images of 224 pixels and crops 200 of them; a fraction, as 1.12 has no exact float.
STORED_OVER_CROP = Fraction(224, 200)


@dataclass(frozen=True)
class AugmentationSettings:
    """How strongly a policy changes an image. Each step is applied to an image with probability `chance`.

    Attributes:
        scale: relative change of size, drawn from +-scale.
        rotation: angle in degrees, drawn from +-rotation.
        shear: angle in degrees, drawn from +-shear.
        brightness: change as a share of white, drawn from +-brightness.
        contrast: relative change, drawn from +-contrast.
        flips: whether left-right, up-down or both, each as likely, or left-right alone.
        holes: most black squares in an image; their number is drawn for each image from 1 to holes.
        hole_side: side of a hole as a share of the crop's side.
        chance: probability of each step.
    """

    scale: float
    rotation: float
    shear: float
    brightness: float
    contrast: float
    flips: Literal["horizontal", "all"]
    holes: int = 0
    hole_side: float = 0.0
    chance: float = 0.5


# "fed-isic" follows FLamby's list (albumentations' names: RandomScale, Rotate, RandomBrightnessContrast,
# Flip, Affine, RandomCrop, CoarseDropout), whose steps have probability 1/2. Two differences: FLamby draws
# the number of holes once for the whole data set, here each image has its own; and FLamby crops from a
# rectangle, here from the stored square. FLamby's shear of 0.1 is read in degrees, the unit of the library
# that it calls.
POLICIES: dict[Policy, AugmentationSettings] = {
    "light": AugmentationSettings(scale=0.05, rotation=10, shear=0, brightness=0.1, contrast=0.1, flips="horizontal"),
    "fed-isic": AugmentationSettings(
        scale=0.07,
        rotation=50,
        shear=0.1,
        brightness=0.15,
        contrast=0.1,
        flips="all",
        holes=8,
        hole_side=16 / 200,
    ),
}


def augment(images: Images, policy: Policy, size: int, rng: np.random.Generator) -> Images:
    """A batch for training: `(B, H, W, C)` to `(B, size, size, C)`; `none` crops the centre.

    The crop is at a random place where the images are larger than `size`. ValueError where they are smaller.
    """
    if policy == "none" or len(images) == 0:
        return centre_crop(images, size)
    _check_size(images, size)
    settings = POLICIES[policy]
    moved = warp(images, placements(images, settings, size, rng), size)
    toned = change_tone(moved, settings, rng)
    return punch_holes(flip(toned, settings, rng), settings, rng)


def centre_crop(images: Images, size: int) -> Images:
    """The centre of every image, a view: `(B, H, W, C)` to `(B, size, size, C)`."""
    _check_size(images, size)
    top, left = (images.shape[1] - size) // 2, (images.shape[2] - size) // 2
    return images[:, top : top + size, left : left + size]


def _check_size(images: Images, size: int) -> None:
    if min(images.shape[1:3]) < size:
        raise ValueError(f"images of {images.shape[1]}x{images.shape[2]} pixels are smaller than the crop of {size}")


def placements(
    images: Images, settings: AugmentationSettings, size: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """One random affine map an image, `(B, 2, 3)`: from points `(x, y, 1)` of the crop to the image's own.

    The image is scaled by s, rotated and sheared about its centre, and a window of `size` pixels is cut out
    of the scaled image at a random place. Going backwards:
    `p = centre + A^-1 (q + offset - s centre)`, `A = s R K`.
    """
    count, height, width = images.shape[:3]
    scale = 1 + _sometimes(settings.scale, settings.chance, count, rng)
    angle = np.deg2rad(_sometimes(settings.rotation, settings.chance, count, rng))
    shear = np.tan(np.deg2rad(_sometimes(settings.shear, settings.chance, count, rng)))
    inverse = np.linalg.inv(_linear(scale, angle, shear))
    extent = np.array([width, height], dtype=np.float64)
    room = np.maximum(scale[:, None] * extent - size, 0.0)
    offset = rng.random((count, 2)) * room + np.minimum(scale[:, None] * extent - size, 0.0) / 2
    shift = extent / 2 + np.einsum("bij,bj->bi", inverse, offset - scale[:, None] * extent / 2)
    return np.concatenate([inverse, shift[:, :, None]], axis=2)


def _linear(scale: NDArray[np.float64], angle: NDArray[np.float64], shear: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale x rotation x shear, `(B, 2, 2)`."""
    cos, sin = np.cos(angle), np.sin(angle)
    rows = [[cos, cos * shear - sin], [sin, sin * shear + cos]]
    return np.moveaxis(scale * np.array(rows), 2, 0)


def _sometimes(bound: float, chance: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """`(count,)` draws from +-bound, 0 with probability 1 - chance."""
    return rng.uniform(-bound, bound, count) * (rng.random(count) < chance)


def warp(images: Images, maps: NDArray[np.float64], size: int) -> Images:
    """Apply one affine map an image, bilinear; beyond the border the image is mirrored."""
    margin = _overshoot(images, maps, size)
    mirrored = np.pad(images, [(0, 0), (margin, margin), (margin, margin), (0, 0)], mode="reflect")
    out = np.empty((len(images), size, size, images.shape[3]), dtype=np.uint8)
    for i, (source, matrix) in enumerate(zip(mirrored, maps, strict=True)):
        (a, b, c), (d, e, f) = matrix.tolist()
        picture = Image.fromarray(source[..., 0] if source.shape[-1] == 1 else source)
        data = (a, b, c + margin, d, e, f + margin)
        moved = picture.transform((size, size), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
        out[i] = np.asarray(moved).reshape(out.shape[1:])
    return out


def _overshoot(images: Images, maps: NDArray[np.float64], size: int) -> int:
    """How far in pixels the corners of any crop lie outside its image, with one pixel for the interpolation."""
    corners = maps @ np.array([[0, size, 0, size], [0, 0, size, size], [1, 1, 1, 1]])
    sides = np.array([[images.shape[2]], [images.shape[1]]])
    beyond = max(float(-corners.min()), float((corners - sides).max()), 0.0)
    return math.ceil(beyond) + 1


def change_tone(images: Images, settings: AugmentationSettings, rng: np.random.Generator) -> Images:
    """`(1 + contrast) x + 255 brightness`, one draw an image."""
    count = len(images)
    apply = rng.random(count) < settings.chance
    gain = 1 + apply * rng.uniform(-settings.contrast, settings.contrast, count)
    lift = 255 * apply * rng.uniform(-settings.brightness, settings.brightness, count)
    values = images * gain.astype(np.float32)[:, None, None, None] + lift.astype(np.float32)[:, None, None, None]
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def flip(images: Images, settings: AugmentationSettings, rng: np.random.Generator) -> Images:
    """Mirror some images left-right, up-down, or both."""
    kinds = rng.integers(0, 3, len(images)) if settings.flips == "all" else np.zeros(len(images), dtype=np.int64)
    apply = rng.random(len(images)) < settings.chance
    out = images.copy()
    across, down = apply & (kinds != 1), apply & (kinds != 0)
    out[across] = out[across][:, :, ::-1]
    out[down] = out[down][:, ::-1]
    return out


def punch_holes(images: Images, settings: AugmentationSettings, rng: np.random.Generator) -> Images:
    """Black squares at random places of some images, 1 to `settings.holes` in each."""
    size = images.shape[1]
    side = max(1, round(size * settings.hole_side))
    if settings.holes == 0 or side >= size:
        return images
    counts = rng.integers(1, settings.holes + 1, len(images)) * (rng.random(len(images)) < settings.chance)
    corners = rng.integers(0, size - side + 1, (len(images), settings.holes, 2))
    out = images.copy()
    for image, count, places in zip(out, counts, corners, strict=True):
        for top, left in places[:count]:
            image[top : top + side, left : left + side] = 0
    return out
