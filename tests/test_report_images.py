"""Contact sheets of sample images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from report_fixtures import World, tiny_federation
from wardround.data.federation import ClientData, Federation, samples
from wardround.report.images import EMPTY, MOST_COLUMNS, ROWS, TILE, columns, contact_sheet, file_name, save_samples


def pixel(sheet: bytes, column: int, row: int) -> tuple[int, ...]:
    """The colour in the middle of one tile."""
    place = (column * TILE + TILE // 2, row * TILE + TILE // 2)
    found = Image.open(io.BytesIO(sheet)).convert("RGB").getpixel(place)
    assert isinstance(found, tuple)
    return found


def client(labels: list[int], channels: int = 3) -> ClientData:
    """A client whose images have the grey level 20 + 50 * label."""
    levels = (20 + 50 * np.array(labels, dtype=np.int64))[:, None, None, None]
    images = np.broadcast_to(levels, (len(labels), 8, 8, channels)).astype(np.uint8)
    data = samples(images, labels, [str(i) for i in range(len(labels))])
    return ClientData("c", data, data.take([]), data.take([]))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_column_a_class_and_grey_where_there_is_nothing(channels: int) -> None:
    sheet = contact_sheet(client([0, 0, 0, 2], channels), [0, 1, 2])
    assert Image.open(io.BytesIO(sheet)).size == (3 * TILE, ROWS * TILE)
    expected = {(0, 0): 20, (0, 1): 20, (1, 0): EMPTY[0], (1, 1): EMPTY[0], (2, 0): 120, (2, 1): EMPTY[0]}
    for (column, row), level in expected.items():
        assert pixel(sheet, column, row) == pytest.approx((level,) * 3, abs=3)


def test_the_most_frequent_classes_are_shown_in_their_order() -> None:
    counts = np.array([[5, 0, 7, *range(20, 31)], [0, 1, 1, *range(20, 31)]])
    assert columns(counts) == list(range(4, 14))
    assert len(columns(counts)) == MOST_COLUMNS
    assert columns(counts[:, :3]) == [0, 1, 2]


def test_one_file_for_each_client_with_images(tmp_path: Path) -> None:
    world = World(clients=("St. Mary's / A", "b"), sizes=(200, 100))
    whole = tiny_federation(world, channels=1)
    bare = whole.clients[1].train.take([])
    federation = Federation(
        (whole.clients[0], ClientData("b", bare, bare, bare)), whole.classes, whole.source, whole.modalities
    )
    written = save_samples(federation, tmp_path)
    assert [path.name for path in written] == [file_name("St. Mary's / A")]
    assert sorted((tmp_path / "samples").iterdir()) == written


def test_the_choice_is_the_same_every_time(tmp_path: Path) -> None:
    federation = tiny_federation()
    first = [path.read_bytes() for path in save_samples(federation, tmp_path / "one")]
    assert [path.read_bytes() for path in save_samples(federation, tmp_path / "two")] == first
