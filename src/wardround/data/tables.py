"""Read a table of images: a CSV file with one row an image."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wardround.data.federation import SPLITS
from wardround.data.options import ColumnNames
from wardround.data.records import Listing, Record, parse_ref, some
from wardround.errors import InputError

TABLE_NAME = "metadata.csv"
GROUP_COLUMNS = ("group", "patient_id", "lesion_id")
OPTIONAL_ROLES = ("site", "split", "group", "modality")
_SPLIT_WORDS: dict[str, str] = {split: split for split in SPLITS} | {"valid": "val", "validation": "val"}


@dataclass(frozen=True)
class Sheet:
    """A CSV file as read.

    Attributes:
        file: where it lies.
        header: the names of its columns.
        rows: for each row its line number and its cells by column.
        ragged: rows that have more or fewer cells than the header, in words; they are not in `rows`.
    """

    file: Path
    header: tuple[str, ...]
    rows: tuple[tuple[int, Mapping[str, str]], ...]
    ragged: tuple[str, ...] = ()

    def require(self, needed: Iterable[str]) -> None:
        """InputError naming the columns of `needed` that are missing, or the ragged rows."""
        missing = [name for name in needed if name not in self.header]
        if missing:
            found = ", ".join(self.header)
            raise InputError(f"{self.file}: missing columns: {', '.join(missing)}; found: {found}")
        if self.ragged:
            raise InputError(f"{self.file}: the header has {len(self.header)} cells, but {some(self.ragged)}")


def read_table(path: Path, columns: ColumnNames | None = None) -> Listing:
    """The images of a table: `path` is a CSV file, or a folder with `metadata.csv`.

    Image paths are relative to the CSV file's folder; `file.npz#array[i]` names an item of an array. Raises
    InputError naming the file when it is missing, no table, or lacks a column.
    """
    names = columns or ColumnNames()
    sheet = read_sheet(table_file(path))
    sheet.require(needed_columns(names))
    return listing(sheet, names)


def table_file(path: Path) -> Path:
    """The CSV file that `path` stands for; InputError where there is none."""
    file = path / TABLE_NAME if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such file; a table is a CSV file or a folder that holds {TABLE_NAME}")
    return file


def read_sheet(file: Path) -> Sheet:
    """Header and rows of a CSV file separated by commas, semicolons or tabs (what the header has most of)."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{file}: not a readable text file in UTF-8 ({error})") from error
    first = text.partition("\n")[0]
    reader = csv.reader(text.splitlines(keepends=True), delimiter=max(",;\t", key=first.count))
    header = tuple(cell.strip() for cell in next(reader, []))
    repeated = sorted({name for name in header if header.count(name) > 1})
    if not any(header) or repeated:
        raise InputError(f"{file}: {'columns repeat: ' + ', '.join(repeated) if repeated else 'the table is empty'}")
    lines = [(reader.line_num, cells) for cells in reader if any(cells)]
    whole = ((line, cells) for line, cells in lines if len(cells) == len(header))
    ragged = tuple(f"row {line} has {len(cells)}" for line, cells in lines if len(cells) != len(header))
    return Sheet(file, header, tuple(_rows(whole, header)), ragged)


def _rows(lines: Iterable[tuple[int, list[str]]], header: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    for line, cells in lines:
        yield line, dict(zip(header, (cell.strip() for cell in cells), strict=True))


def needed_columns(names: ColumnNames) -> list[str]:
    """The columns that must be there: image, label, and each optional one that was named."""
    optional = (getattr(names, role) for role in OPTIONAL_ROLES)
    return [names.image, names.label, *(name for name in optional if name is not None)]


def resolve(header: tuple[str, ...], names: ColumnNames) -> dict[str, str]:
    """The column of each role; a role without a column is absent."""
    wanted: dict[str, tuple[str, ...]] = {
        role: (getattr(names, role) or role,) for role in ("image", "label", "site", "split", "modality")
    }
    wanted["group"] = (names.group,) if names.group else GROUP_COLUMNS
    found = {role: next((name for name in choices if name in header), "") for role, choices in wanted.items()}
    return {role: name for role, name in found.items() if name}


def listing(sheet: Sheet, names: ColumnNames) -> Listing:
    """One record a row; what a row does not say is empty. A name that repeats gets its row number."""
    column = resolve(sheet.header, names)
    seen: set[str] = set()
    records: list[Record] = []
    for row, cells in sheet.rows:
        value = {role: cells[name] for role, name in column.items()}
        image = value.pop("image", "")
        name = f"{image} (row {row})" if image and image in seen else image
        seen.add(image)
        value["split"] = _SPLIT_WORDS.get(value.get("split", "").lower(), value.get("split", ""))
        value.setdefault("label", "")
        ref = parse_ref(image, sheet.file.parent)
        records.append(Record(ref, name, **value, row=row, cells=cells))
    return Listing(tuple(records), str(sheet.file), notes=_notes(records, column))


def _notes(records: list[Record], column: dict[str, str]) -> tuple[str, ...]:
    repeats = [record.where for record in records if record.name.endswith(f"(row {record.row})")]
    notes = [f"{len(repeats)} rows repeat an image of an earlier row: {some(repeats)}"] if repeats else []
    group = column.get("group", "group")
    if group != "group":
        notes.append(f"images with the same {group} are one group: no split drawn here separates them")
    return tuple(notes)
