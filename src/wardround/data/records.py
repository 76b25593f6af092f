"""What a source lists before any image is decoded: one record an image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wardround.errors import InputError

_ITEM = re.compile(r"^(?P<file>.*\.(?:npz|nii|nii\.gz|dcm))#(?P<array>\w+)\[(?P<index>\d+)\]$", re.IGNORECASE)


@dataclass(frozen=True)
class ImageRef:
    """Where an image lies: a file, or item `index` of `array` in a file that holds several.

    `array` is the name of an array in an `.npz` file, the plane of a slice in a NIfTI volume (`axial`), or the window
    of a frame in a DICOM file (`brain`).
    """

    path: Path
    array: str = ""
    index: int = 0

    def __str__(self) -> str:
        return f"{self.path}#{self.array}[{self.index}]" if self.array else str(self.path)


def parse_ref(text: str, folder: Path) -> ImageRef:
    """The image that `text` names, relative to `folder`: `a/b.png`, `file.npz#train_images[3]`, `t1.nii.gz#axial[57]`.

    >>> str(parse_ref("x.npz#train_images[3]", Path("d")))
    'd/x.npz#train_images[3]'
    """
    item = _ITEM.match(text)
    if item is None:
        return ImageRef(folder / text)
    return ImageRef(folder / item["file"], item["array"], int(item["index"]))


@dataclass(frozen=True)
class Record:
    """One image as a source describes it; a text that the source does not give is empty.

    Attributes:
        image: where the image lies.
        name: what the source calls it; it leads a person back to the image.
        label: its class.
        site: the hospital that it came from.
        split: `train`, `val`, `test`, empty, or whatever else the source says (refused where it is used).
        group: the patient or lesion whose images belong together.
        modality: how it was taken.
        row: its line in the table, counted from 1; 0 where there is no table.
        cells: all columns of its row, for partitions by a column.
    """

    image: ImageRef
    name: str
    label: str
    site: str = ""
    split: str = ""
    group: str = ""
    modality: str = ""
    row: int = 0
    cells: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """How to find the record: `row 7 (images/a.png)`, or the name alone."""
        return f"row {self.row} ({self.name})" if self.row else self.name


@dataclass(frozen=True)
class Listing:
    """All records of a source.

    Attributes:
        records: the images in the source's order.
        origin: the file or folder to name in messages.
        classes: the label space in its order; empty where it is the sorted labels of the records.
        notes: sentences for the report.
        sites: the order of the sites; empty where it is the natural order of their names.
        modalities: the same for modalities.
    """

    records: tuple[Record, ...]
    origin: str
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()

    @property
    def label_space(self) -> tuple[str, ...]:
        """`classes`, or the labels of the records in natural order; the empty label is none."""
        return self.classes or natural_order({record.label for record in self.records} - {""})


def natural_order(words: Iterable[str]) -> tuple[str, ...]:
    """Distinct words sorted, whole numbers by value and before other words.

    >>> natural_order(["10", "2", "b", "2"])
    ('2', '10', 'b')
    """

    def _rank(word: str) -> tuple[bool, int, str]:
        number = word.isdecimal()
        return (not number, int(word) if number else 0, word)

    return tuple(sorted(set(words), key=_rank))


def some(items: Iterable[str], limit: int = 5) -> str:
    """The first `limit` items for a message, and how many more there are.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    every = list(items)
    more = len(every) - limit
    return ", ".join(every[:limit]) + (f" and {more} more" if more > 0 else "")


def require(field_name: str, records: Iterable[Record], origin: str, remedy: str) -> None:
    """Raise InputError naming the records whose `field_name` (an attribute of `Record`) is empty."""
    empty = [record.where for record in records if not getattr(record, field_name)]
    if empty:
        word = "image" if field_name == "name" else field_name
        raise InputError(f"{origin}: {len(empty)} rows have no {word}: {some(empty)}. {remedy}")
