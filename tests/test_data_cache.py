"""The cache of decoded images: same content, new key on any change, never an error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.cache import DecodedCache, cache_key, decode_images, decoded_cache
from wardround.data.images import Decoding
from wardround.data.records import ImageRef

HOW = Decoding(8, 1)


@pytest.fixture
def refs(tmp_path: Path) -> list[ImageRef]:
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    return [ImageRef(tmp_path / f"{i}.png") for i in range(5)]


@pytest.fixture
def cache(tmp_path: Path) -> DecodedCache:
    return decoded_cache(tmp_path / "cache")


def is_mapped(array: np.ndarray) -> bool:
    return array is not None and (isinstance(array, np.memmap) or is_mapped(getattr(array, "base", None)))


def entry(cache: DecodedCache, suffix: str) -> Path:
    (file,) = cache.folder.glob(f"*{suffix}")
    return file


def test_a_second_start_reads_the_map(refs, cache, monkeypatch):
    first = cache.decode(refs, HOW)
    monkeypatch.setattr("wardround.data.cache.decode_images", lambda *_: pytest.fail("decoded again"))
    second = cache.decode(refs, HOW)
    assert is_mapped(second.images)
    assert np.array_equal(first.images, second.images)
    assert np.array_equal(second.images, decode_images(refs, HOW).images)
    assert second.notes == ()


def test_writing_to_the_arrays_does_not_change_the_cache(refs, cache):
    before = cache.decode(refs, HOW).images
    original = before.copy()
    before[:] = 7
    assert np.array_equal(cache.decode(refs, HOW).images, original)


def test_the_key_depends_on_all_that_the_content_depends_on(refs):
    key = cache_key(refs, HOW)
    assert key == cache_key(list(refs), Decoding(8, 1))
    others = [
        cache_key(refs[::-1], HOW),
        cache_key(refs[:-1], HOW),
        cache_key(refs, Decoding(9, 1)),
        cache_key(refs, Decoding(8, 3)),
        cache_key(refs, Decoding(8, 1, "pad")),
        cache_key(refs, Decoding(8, 1, colour_constancy=True)),
        cache_key([ImageRef(ref.path, "train_images", 1) for ref in refs], HOW),
    ]
    os.utime(refs[0].path, ns=(1, 1))
    others.append(cache_key(refs, HOW))
    refs[0].path.unlink()
    others.append(cache_key(refs, HOW))
    assert len({key, *others}) == len(others) + 1


@pytest.mark.parametrize("damage", ["cut", "flip", "card", "no card"])
def test_a_damaged_entry_is_made_anew(refs, cache, damage):
    good = cache.decode(refs, HOW).images.copy()
    data, card = entry(cache, ".npy"), entry(cache, ".json")
    content = bytearray(data.read_bytes())
    if damage == "cut":
        data.write_bytes(content[:-10])
    elif damage == "flip":
        content[-1] ^= 1
        data.write_bytes(content)
    elif damage == "card":
        card.write_text("{")
    else:
        card.unlink()
    mended = cache.decode(refs, HOW)
    assert np.array_equal(mended.images, good)
    assert bool(mended.notes) == (damage != "no card")
    assert cache.decode(refs, HOW).notes == ()


def test_a_folder_that_cannot_be_made_is_noted(refs, tmp_path):
    (tmp_path / "file").write_text("")
    decoded = decoded_cache(tmp_path / "file").decode(refs, HOW)
    assert len(decoded.images) == 5
    assert "could not be kept" in decoded.notes[0]


def test_a_full_disk_leaves_no_trace(refs, cache, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wardround.data.cache.np.save", full)
    decoded = cache.decode(refs, HOW)
    assert len(decoded.images) == 5
    assert "No space left" in decoded.notes[0]
    assert list(cache.folder.iterdir()) == []


def test_bad_images_are_remembered(refs, cache):
    refs[2].path.write_bytes(b"no image")
    for _ in range(2):
        decoded = cache.decode(refs, HOW)
        assert len(decoded.images) == 4
        assert list(decoded.bad) == [2]
        assert "2.png" in decoded.bad[2]


def test_no_images_at_all(cache):
    for _ in range(2):
        assert cache.decode([], HOW).images.shape == (0, 8, 8, 1)


def test_the_oldest_entries_go_first(refs, tmp_path):
    cache = DecodedCache(tmp_path / "small", limit_bytes=1000)
    cache.decode(refs, HOW)  # 128 bytes of header and 320 of pixels
    first = entry(cache, ".json")
    cache.decode(refs[:4], HOW)
    os.utime(first, ns=(1, 1))
    cache.decode(refs[:3], HOW)
    assert not first.exists()
    assert len(list(cache.folder.glob("*.npy"))) == 2


def test_the_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WARDROUND_CACHE", str(tmp_path / "there"))
    assert decoded_cache().folder == tmp_path / "there" / "decoded"
