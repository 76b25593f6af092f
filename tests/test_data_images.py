"""Images to arrays: geometry, colour, depth, orientation, and files that are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.colour import shades_of_grey
from wardround.data.images import Decoding, decode
from wardround.data.records import ImageRef, parse_ref
from wardround.errors import InputError


def write(path: Path, array: np.ndarray, **options: object) -> ImageRef:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return ImageRef(path)


def ramp(height: int, width: int) -> np.ndarray:
    return np.tile(np.arange(width, dtype=np.uint8), (height, 1))


def test_an_image_of_the_right_size_is_unchanged(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    assert np.array_equal(decode(write(tmp_path / "a.png", array), Decoding(20)), array)


def test_crop_takes_the_centre(tmp_path):
    ref = write(tmp_path / "a.png", ramp(10, 30))
    assert decode(ref, Decoding(10, 1))[0, :, 0].tolist() == list(range(10, 20))


def test_squash_takes_all_of_the_image_and_pad_adds_black(tmp_path):
    ref = write(tmp_path / "a.png", np.full((10, 20), 200, np.uint8))
    assert np.all(decode(ref, Decoding(10, 1, "squash")) == 200)
    padded = decode(ref, Decoding(20, 1, "pad"))[..., 0]
    assert np.all(padded[5:15] == 200)
    assert np.all(padded[:5] == 0)
    assert np.all(padded[15:] == 0)


def test_grey_fills_three_channels_and_colour_becomes_luminance(tmp_path):
    grey = decode(write(tmp_path / "g.png", ramp(16, 16)), Decoding(16, 3))
    assert np.array_equal(grey[..., 0], grey[..., 2])
    red = np.zeros((8, 8, 3), np.uint8)
    red[..., 0] = 255
    assert decode(write(tmp_path / "r.png", red), Decoding(8, 1))[0, 0, 0] == 76  # 0.299 * 255


def test_sixteen_bits_are_stretched_to_their_own_range(tmp_path):
    deep = np.array([[100, 2100], [1100, 4100]], dtype=np.uint16)
    pixels = decode(write(tmp_path / "x.png", deep), Decoding(2, 1))[..., 0]
    assert pixels.tolist() == [[0, 128], [64, 255]]


def test_transparent_becomes_black(tmp_path):
    array = np.full((4, 4, 4), 255, np.uint8)
    array[:, 2:, 3] = 0
    pixels = decode(write(tmp_path / "t.png", array), Decoding(4))
    assert np.all(pixels[:, :2] == 255)
    assert np.all(pixels[:, 2:] == 0)


def test_exif_orientation_is_applied(tmp_path):
    array = np.zeros((8, 8), np.uint8)
    array[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    pixels = decode(write(tmp_path / "o.png", array, exif=exif), Decoding(8, 1))[..., 0]
    assert np.all(pixels[7] == 255)
    assert np.all(pixels[:7] == 0)


def test_large_jpeg_is_read_at_reduced_scale_with_the_same_result(tmp_path):
    smooth = np.linspace(0, 255, 1600).astype(np.uint8)
    ref = write(tmp_path / "l.jpg", np.tile(smooth, (1600, 1)))
    expected = np.asarray(Image.open(ref.path).resize((32, 32), Image.Resampling.BILINEAR), np.int64)
    assert np.abs(decode(ref, Decoding(32, 1))[..., 0] - expected).max() <= 2


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
def test_a_truncated_image_is_named(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    ref = write(tmp_path / f"cut (1) {suffix}.{suffix}", noise)
    ref.path.write_bytes(ref.path.read_bytes()[: ref.path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"cut \(1\)"):
        decode(ref, Decoding(16))


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff"])
def test_what_is_no_image_is_named(tmp_path, content):
    (tmp_path / "fake.png").write_bytes(content)
    with pytest.raises(InputError, match=r"fake\.png.*not a readable image"):
        decode(ImageRef(tmp_path / "fake.png"), Decoding(16))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.png: no such file"):
        decode(ImageRef(tmp_path / "gone.png"), Decoding(16))


def test_items_of_arrays(tmp_path):
    images = np.stack([np.full((5, 5), value, np.uint8) for value in (3, 9)])
    np.savez(tmp_path / "a.npz", some=images, wrong=images.astype(float))
    assert np.all(decode(parse_ref("a.npz#some[1]", tmp_path), Decoding(5, 1)) == 9)
    for text, message in {
        "a.npz#some[2]": "the array has 2",
        "a.npz#other[0]": "no array 'other'; it holds some, wrong",
        "a.npz#wrong[0]": "float64",
        "b.npz#some[0]": "no such file",
    }.items():
        with pytest.raises(InputError, match=message):
            decode(parse_ref(text, tmp_path), Decoding(5, 1))


def test_shades_of_grey_by_hand():
    # A uniform image has light (a, b, c); each channel becomes |(a, b, c)| / sqrt(3).
    image = np.tile(np.array([60, 80, 120], np.uint8), (4, 4, 1))
    level = int(np.sqrt(60**2 + 80**2 + 120**2) / np.sqrt(3))
    assert np.all(np.abs(shades_of_grey(image).astype(int) - level) <= 1)


def test_shades_of_grey_leaves_grey_alone_and_does_not_wrap():
    grey = np.random.default_rng(0).integers(1, 255, (6, 6, 1), dtype=np.uint8).repeat(3, axis=2)
    assert np.abs(shades_of_grey(grey).astype(int) - grey).max() <= 1
    cast = np.tile(np.array([255, 40, 40], np.uint8), (4, 4, 1))
    cast[0, 0] = 255
    assert shades_of_grey(cast)[0, 0].tolist()[1:] == [255, 255]
    assert np.all(shades_of_grey(np.zeros((2, 2, 3), np.uint8)) == 0)
