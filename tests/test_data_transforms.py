"""Augmentation: shapes, determinism, and each step against what it must do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from wardround.data.transforms import (
    POLICIES,
    AugmentationSettings,
    augment,
    centre_crop,
    change_tone,
    flip,
    placements,
    punch_holes,
    warp,
)

STILL = AugmentationSettings(scale=0, rotation=0, shear=0, brightness=0, contrast=0, flips="all", holes=0, chance=1)


def batch(count: int = 8, size: int = 28, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, size, size, channels), dtype=np.uint8)


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("policy", ["none", "light", "fed-isic"])
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes_and_seeds(policy, channels):
    images = batch(channels=channels)
    before = images.copy()
    out = augment(images, policy, 25, draw())
    assert out.shape == (8, 25, 25, channels)
    assert out.dtype == np.uint8
    assert np.array_equal(out, augment(images, policy, 25, draw()))
    assert np.array_equal(images, before)


def test_none_is_the_centre_crop():
    images = batch()
    assert np.array_equal(augment(images, "none", 20, draw()), images[:, 4:24, 4:24])
    assert np.shares_memory(centre_crop(images, 20), images)


@pytest.mark.parametrize("policy", ["none", "light"])
def test_a_crop_larger_than_the_image_is_an_error(policy):
    with pytest.raises(ValueError, match="smaller than the crop"):
        augment(batch(), policy, 29, draw())


def test_without_motion_the_window_is_the_image():
    images = batch()
    maps = placements(images, STILL, 28, draw())
    assert np.allclose(maps, [[1, 0, 0], [0, 1, 0]])
    assert np.array_equal(warp(images, maps, 28), images)


def test_a_quarter_turn_is_numpys():
    images = batch()
    maps = placements(images, STILL, 28, draw())
    c, s = math.cos(math.pi / 2), math.sin(math.pi / 2)
    turn = np.array([[c, -s], [s, c]])
    maps[:, :, :2], maps[:, :, 2] = turn, np.array([14, 14]) - turn @ np.array([14, 14])
    difference = warp(images, maps, 28).astype(int) - np.rot90(images, axes=(1, 2))
    assert np.abs(difference).max() <= 1  # rounding of the interpolation


def test_the_centre_stays_and_the_scale_is_right():
    images = batch(200)
    maps = placements(images, replace(STILL, scale=0.07, rotation=50), 28, draw())
    scales = 1 / np.sqrt(np.abs(np.linalg.det(maps[:, :, :2])))
    assert 0.93 <= scales.min() < 0.94
    assert 1.06 < scales.max() <= 1.07
    small = scales < 1  # no room to move the window: the centre of the image is the centre of the crop
    centres = maps[small] @ np.array([14, 14, 1])
    assert np.allclose(centres, 14)


def test_the_crop_is_at_a_random_place_within_the_image():
    maps = placements(batch(300), STILL, 25, draw())
    offsets = maps[:, :, 2]
    assert offsets.min() >= 0
    assert offsets.max() <= 3
    assert offsets.std() == pytest.approx(3 / math.sqrt(12), rel=0.1)


def test_beyond_the_border_the_image_is_mirrored():
    image = np.arange(8, dtype=np.uint8)[None, None, :, None].repeat(8, axis=1)
    moved = warp(image, np.array([[[1.0, 0, -2], [0, 1, 0]]]), 8)
    assert moved[0, 0, :, 0].tolist() == [2, 1, 0, 1, 2, 3, 4, 5]


def test_tone_within_its_bounds():
    images = np.full((500, 4, 4, 1), 100, np.uint8)
    toned = change_tone(images, replace(STILL, brightness=0.15, contrast=0.1), draw()).astype(float)
    assert toned.min() >= 90 - 38.25 - 0.5
    assert toned.max() <= 110 + 38.25 + 0.5
    assert np.ptp(toned, axis=(1, 2, 3)).max() == 0


def test_flips_in_three_ways_equally_often():
    images = batch(600, 6)
    flipped = flip(images, STILL, draw())
    ways = [images[:, :, ::-1], images[:, ::-1], images[:, ::-1, ::-1]]
    counts = [int(np.sum(np.all(flipped == way, axis=(1, 2, 3)))) for way in ways]
    assert sum(counts) == 600
    assert min(counts) > 160


def test_light_never_turns_an_image_upside_down():
    images = batch(100, 6)
    flipped = flip(images, replace(POLICIES["light"], chance=1), draw())
    assert np.array_equal(flipped, images[:, :, ::-1])


def test_each_image_has_its_own_number_of_holes():
    images = np.full((400, 200, 200, 1), 255, np.uint8)
    settings = POLICIES["fed-isic"]
    black = (punch_holes(images, settings, draw()) == 0).sum(axis=(1, 2, 3))
    assert np.mean(black == 0) == pytest.approx(0.5, abs=0.08)
    assert black.max() <= 8 * 16 * 16
    alone = black[black % 256 == 0] // 256
    assert set(range(1, 7)) <= set(alone.tolist())
