"""ISIC 2019 by anatomic site: the training images of the challenge, as FedMedCLIP (2025) divides them.

25,331 dermoscopic images of eight classes. Six sites of the body are clients; the images whose site is not recorded
are a seventh, which the paper holds out. Oral/genital and lateral torso are not used.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from wardround.data.benchmark_options import Isic2019Options
from wardround.data.fed_isic import CLASSES, image_folder
from wardround.data.narrowing import common_labels
from wardround.data.records import ImageRef, Listing, Record, some
from wardround.data.remembering import remembered
from wardround.data.tables import Sheet, read_sheet
from wardround.errors import InputError

TRUTH_FILE, METADATA_FILE = "ISIC_2019_Training_GroundTruth.csv", "ISIC_2019_Training_Metadata.csv"
SITES = ("anterior torso", "head/neck", "lower extremity", "palms/soles", "posterior torso", "upper extremity")
UNUSED_SITES = ("lateral torso", "oral/genital")
UNKNOWN_SITE = "unknown"
PAPERS_CLASSES = 6  # their names are not published
Rule = Callable[[Sequence[Record]], tuple[set[str], str]]


def read_isic2019(path: Path, options: Isic2019Options) -> Listing:
    """The images in the challenge's layout: `TRUTH_FILE`, `METADATA_FILE` and `ISIC_2019_Training_Input/*.jpg`.

    A lesion is a group. Of images that are the same byte for byte the first is used, and images without a site whose
    lesion has images at a site are left out, so that no lesion is both at a site and at `unknown`. Notes count what
    was left out.

    Raises:
        InputError: a file or a column is missing, the two tables name different images, an image has not exactly one
            class, or its site is none.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    truth, metadata = _sheet(path, TRUTH_FILE, ("image", *CLASSES)), _sheet(path, METADATA_FILE, _METADATA_COLUMNS)
    records, notes = _read(truth, metadata, image_folder(path)), []
    rules: list[Rule] = [_unused, _again, _elsewhere]
    for rule in ([_lesionless] if options.without_lesion == "drop" else []) + rules:
        names, why = rule(records)
        records = [record for record in records if record.name not in names]
        notes += [f"{len(names)} images left out: {why}"] if names else []
    without = sum(not record.group for record in records)
    notes += [f"{without} of {len(records)} images have no known lesion; each is a group of its own"] if without else []
    return Listing(tuple(records), str(path), CLASSES, (*notes, _common_note(records)), (*SITES, UNKNOWN_SITE))


_METADATA_COLUMNS = ("image", "anatom_site_general", "lesion_id")


def _sheet(path: Path, name: str, columns: Sequence[str]) -> Sheet:
    if not (path / name).is_file():
        raise InputError(
            f"{path / name}: no such file; the folder of ISIC 2019 holds {TRUTH_FILE}, {METADATA_FILE} and"
            " ISIC_2019_Training_Input"
        )
    sheet = read_sheet(path / name)
    sheet.require(columns)
    return sheet


def _read(truth: Sheet, metadata: Sheet, images: Path) -> list[Record]:
    """One record a row of the ground truth."""
    facts = {cells["image"]: cells for _, cells in metadata.rows}
    _refuse_strangers(truth, metadata)
    return [
        Record(
            ImageRef(images / f"{cells['image']}.jpg"),
            cells["image"],
            _class_of(cells, row, truth.file),
            _site_of(facts[cells["image"]], metadata.file),
            group=facts[cells["image"]]["lesion_id"],
            row=row,
            cells=facts[cells["image"]],
        )
        for row, cells in truth.rows
    ]


def _refuse_strangers(truth: Sheet, metadata: Sheet) -> None:
    ours, theirs = ({cells["image"] for _, cells in sheet.rows} for sheet in (truth, metadata))
    if ours != theirs:
        raise InputError(
            f"{truth.file} and {metadata.file} must name the same images; in one alone: {some(sorted(ours ^ theirs))}"
        )


def _class_of(cells: Mapping[str, str], row: int, file: Path) -> str:
    """The class whose column is 1; InputError naming the row unless it is exactly one of `CLASSES`."""
    chosen = [name for name in CLASSES if cells[name] in ("1", "1.0")]
    if len(chosen) != 1:
        found = ", ".join(chosen) or "none"
        raise InputError(
            f"{file}: row {row} ({cells['image']}): exactly one of {', '.join(CLASSES)} is 1; found: {found}"
        )
    return chosen[0]


def _site_of(cells: Mapping[str, str], file: Path) -> str:
    site = cells["anatom_site_general"]
    if site and site not in SITES + UNUSED_SITES:
        allowed = ", ".join(SITES + UNUSED_SITES)
        raise InputError(f"{file}: {cells['image']}: {site!r} is no site (allowed: {allowed}, or empty)")
    return site or UNKNOWN_SITE


def _unused(records: Sequence[Record]) -> tuple[set[str], str]:
    """The names of images to leave out, and why; so do all rules."""
    names = {record.name for record in records if record.site in UNUSED_SITES}
    return names, f"their site is {' or '.join(UNUSED_SITES)}, which the paper does not use"


def _lesionless(records: Sequence[Record]) -> tuple[set[str], str]:
    return {record.name for record in records if not record.group}, "their lesion is not recorded"


def _again(records: Sequence[Record]) -> tuple[set[str], str]:
    files = [record.image.path for record in records]
    repeats = remembered("repeats", files, lambda: repeated_files(files))
    return {records[position].name for position in repeats}, "they are the same file as an earlier one"


def repeated_files(files: Sequence[Path]) -> list[int]:
    """Positions of files that are the same byte for byte as an earlier one. Missing files are no repeats."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for position, file in enumerate(files):
        if file.is_file():
            by_size[file.stat().st_size].append(position)
    repeats: list[int] = []
    for positions in by_size.values():
        seen: set[bytes] = set()
        for position in positions if len(positions) > 1 else ():
            digest = hashlib.blake2b(files[position].read_bytes(), digest_size=16).digest()
            repeats += [position] if digest in seen else []
            seen.add(digest)
    return sorted(repeats)


def _elsewhere(records: Sequence[Record]) -> tuple[set[str], str]:
    placed = {record.group for record in records if record.site != UNKNOWN_SITE} - {""}
    names = {record.name for record in records if record.site == UNKNOWN_SITE and record.group in placed}
    return names, "their site is not recorded, but other images of their lesion are at a site"


def _common_note(records: Sequence[Record]) -> str:
    """Which classes all sites have, and whether they are as many as in the paper."""
    sites, common = {record.site for record in records}, common_labels(records)
    named = ", ".join(label for label in CLASSES if label in common) or "none"
    differs = "" if len(common) == PAPERS_CLASSES else f"; the paper has {PAPERS_CLASSES}"
    return f"classes that all {len(sites)} sites have ({len(common)}{differs}): {named}"
