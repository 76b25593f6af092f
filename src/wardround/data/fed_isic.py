"""FedISIC: ISIC 2019 by acquisition centre, in FLamby's layout (Ogier du Terrail et al., NeurIPS 2022 D&B).

23,247 dermoscopic images of eight classes from six centres. FLamby's official fold is by image: in HAM10000
many lesions lie in train and test at once, so its test scores are optimistic there. The lesion-grouped split
avoids that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from wardround.data.options import ColumnNames
from wardround.data.records import ImageRef, Listing, Record
from wardround.data.tables import Sheet, listing, read_sheet, table_file
from wardround.errors import InputError

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")
CENTRE_COLUMN, FOLD_COLUMN = "flamby_center", "flamby_fold"
FOLD_FILES = ("train_test_split", "train_test_split.csv", "train_test_folds.csv")
IMAGE_FOLDERS = ("ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input", "images", ".")
LESION_FILES = {
    "ISIC_2019_Training_Metadata.csv": "image",
    "HAM10000_metadata": "image_id",
    "HAM10000_metadata.csv": "image_id",
}


def read_fed_isic(path: Path, official: bool = True, fold_file: Path | None = None) -> Listing:
    """FedISIC by centre, from FLamby's folder or from a table with the columns flamby_center and flamby_fold.

    FLamby's folder holds the images in one of `IMAGE_FOLDERS`, the fold in one of `FOLD_FILES` (or
    `fold_file`) and, for lesions, any of `LESION_FILES`, there or beside the fold file.

    Args:
        path: the folder, or a CSV file.
        official: use FLamby's fold as the split (train and test; there is no val); otherwise keep the table's
            own.
        fold_file: FLamby's `train_test_split` where it is not in `path`.
    """
    if fold_file is None and (path.is_file() or (path / "metadata.csv").is_file()):
        return _from_table(read_sheet(table_file(path)), official)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    folds = fold_file or _fold_file(path)
    return _with_leakage_note(_from_flamby(path, folds))


def _from_table(sheet: Sheet, official: bool) -> Listing:
    """A HAM10000-like table whose labels are those of HAM10000 or of ISIC 2019."""
    needed = ("image", "label", CENTRE_COLUMN, *((FOLD_COLUMN,) if official else ()))
    sheet.require(needed)
    plain = listing(sheet, ColumnNames(split=FOLD_COLUMN if official else None))
    records = tuple(
        replace(
            record,
            label=_class_of(record),
            site=_centre(record.cells[CENTRE_COLUMN], record.where, plain.origin),
        )
        for record in plain.records
    )
    merged = any(record.label.lower() == "akiec" for record in plain.records)
    note = "akiec of HAM10000 is read as AK; ISIC 2019 divides it into AK and SCC"
    notes = plain.notes + ((note,) if merged else ())
    read = replace(plain, records=records, classes=CLASSES, notes=notes, sites=CENTRES)
    return _with_leakage_note(read) if official else read


def _class_of(record: Record) -> str:
    """The ISIC 2019 class of a record; InputError naming its row where it is none."""
    name = "AK" if record.label.lower() == "akiec" else record.label.upper()
    if name and name not in CLASSES:
        raise InputError(f"{record.where}: {record.label!r} is no class of FedISIC (allowed: {', '.join(CLASSES)})")
    return name


def _centre(number: str, where: str, origin: str) -> str:
    """The centre's name for its number 0 to 5, which may be written `0.0`."""
    try:
        return dict(enumerate(CENTRES))[float(number)]  # type: ignore[index]  # 2.0 and 2 are the same key
    except (ValueError, KeyError):
        raise InputError(f"{origin}: {where}: {number!r} is no centre (allowed: 0 to {len(CENTRES) - 1})") from None


def _fold_file(path: Path) -> Path:
    """FLamby's fold file below `path`, or InputError that says where to get it."""
    for folder in (path, path / "dataset_creation_scripts"):
        for name in FOLD_FILES:
            if (folder / name).is_file():
                return folder / name
    raise InputError(
        f"{path}: no fold file ({', '.join(FOLD_FILES)}). It is part of FLamby: "
        "flamby/datasets/fed_isic2019/dataset_creation_scripts/train_test_split; copy it here or set"
        " data.fold_file"
    )


def _from_flamby(path: Path, folds: Path) -> Listing:
    sheet = read_sheet(folds)
    sheet.require(("image", "target", "center", "fold"))
    images, lesions = image_folder(path), _lesions((path, folds.parent, folds.parent.parent))
    records = tuple(_flamby_records(sheet, images, lesions))
    without = sum(not record.group for record in records)
    note = f"{without} of {len(records)} images have no known lesion; each is a group of its own"
    return Listing(records, str(folds), CLASSES, (note,) if without else (), CENTRES)


def _flamby_records(sheet: Sheet, images: Path, lesions: dict[str, str]) -> Iterator[Record]:
    for row, cells in sheet.rows:
        name, where = cells["image"], f"row {row} ({cells['image']})"
        target = cells["target"].partition(".")[0]
        if target not in map(str, range(len(CLASSES))):
            raise InputError(f"{sheet.file}: {where}: target {cells['target']!r} is no class number 0 to 7")
        site = _centre(cells["center"], where, str(sheet.file))
        ref, label = ImageRef(images / f"{name}.jpg"), CLASSES[int(target)]
        yield Record(ref, name, label, site, cells["fold"], lesions.get(name, ""), row=row, cells=cells)


def image_folder(path: Path) -> Path:
    """The first of `IMAGE_FOLDERS` that holds a JPEG; InputError where none does."""
    for name in IMAGE_FOLDERS:
        if any((path / name).glob("*.jpg")):
            return path / name
    raise InputError(f"{path}: no .jpg images here or in {', '.join(IMAGE_FOLDERS[:-1])}")


def _lesions(folders: tuple[Path, ...]) -> dict[str, str]:
    """The lesion of every image in the metadata files found in `folders`."""
    lesions: dict[str, str] = {}
    for folder in folders:
        for name, key in LESION_FILES.items():
            if (folder / name).is_file():
                sheet = read_sheet(folder / name)
                sheet.require((key, "lesion_id"))
                lesions |= {cells[key]: cells["lesion_id"] for _, cells in sheet.rows if cells["lesion_id"]}
    return lesions


def _with_leakage_note(read: Listing) -> Listing:
    """Add how many test images have their lesion in train, by centre."""
    trained = {record.group for record in read.records if record.split == "train" and record.group}
    leaks = Counter(record.site for record in read.records if record.split == "test" and record.group in trained)
    if not leaks:
        return read
    parts = ", ".join(f"{site} {leaks[site]}" for site in CENTRES if leaks[site])
    return replace(read, notes=(*read.notes, f"official fold: test images whose lesion is also in train: {parts}"))
