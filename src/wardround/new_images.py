"""New images to classify: where they lie, and of which modality somebody says they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wardround.data.options import ColumnNames
from wardround.data.records import ImageRef, parse_ref
from wardround.data.tables import read_sheet
from wardround.errors import InputError

OPTION = "--modality"


@dataclass(frozen=True)
class NewImage:
    """An image that a model is asked about.

    Attributes:
        image: where it lies.
        modality: what it is said to be of; empty where nothing is said.
        said_by: who says so, for messages.
    """

    image: ImageRef
    modality: str = ""
    said_by: str = OPTION


def new_images(files: Iterable[Path], modality: str, columns: ColumnNames) -> list[NewImage]:
    """Image files, and the images of tables among them, in their order.

    Args:
        files: of images; one that ends in `.csv` is a table with a row an image, whose paths are relative to it.
        modality: of every image of which no table says more; empty where it is not known.
        columns: of tables: the image's is needed, the modality's may be absent. Others are not looked at.

    Raises:
        InputError: a table is missing, empty or no table, lacks the image's column, or a row names no image.
    """
    return [
        new
        for file in files
        for new in (
            _of_table(file, modality, columns)
            if file.suffix.lower() == ".csv"
            else [NewImage(ImageRef(file), modality)]
        )
    ]


def _of_table(file: Path, modality: str, columns: ColumnNames) -> Iterator[NewImage]:
    """The images of one table."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    sheet = read_sheet(file)
    sheet.require([columns.image])
    if not sheet.rows:
        raise InputError(f"{file}: names no image; it has a header alone")
    for row, cells in sheet.rows:
        if not cells[columns.image]:
            raise InputError(f"{file}: row {row} has no image; its column {columns.image!r} is empty")
        image, own = parse_ref(cells[columns.image], file.parent), cells.get(columns.modality or "modality", "")
        yield NewImage(image, own, f"{file}: row {row}, modality") if own else NewImage(image, modality)
