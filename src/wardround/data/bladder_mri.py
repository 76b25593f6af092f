"""Four-centre bladder MRI: does the tumour invade the muscle? One site a centre.

FedBCa: 275 T2-weighted volumes from four centres with the tumour's contour (Cao et al., Scientific Data 11:1147,
2024).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wardround.data.benchmark_options import SliceOptions
from wardround.data.folders import read_folders
from wardround.data.patients import patient_note, patient_of, read_patients
from wardround.data.records import ImageRef, Listing, Record, some
from wardround.data.slice_choice import PLANE, choose_slices
from wardround.data.tables import read_sheet
from wardround.errors import InputError

CENTRES = ("Center_1", "Center_2", "Center_3", "Center_4")
CLASSES = {"0": "NMIBC", "1": "MIBC"}  # non-muscle-invasive and muscle-invasive bladder cancer, by the files' labels
IMAGES, MASKS = "T2WI", "Annotation"
LABEL_COLUMNS = ("label", "image_name", "mask_name")
_CENTRE = re.compile(r"Center_?([1-4])")


@dataclass(frozen=True)
class Scan:
    """One volume with its contour; a patient with several tumours has several."""

    centre: str
    volume: Path
    mask: Path
    label: str
    row: int


def read_bladder_mri(path: Path, slices: SliceOptions) -> Listing:
    """The images of up to four centres, in one of two layouts.

    As published: `Center1/T2WI/*.nii.gz`, `Center1/Annotation/*.nii.gz` and `Center1/Center1_label.csv` (the published
    `.xlsx` saved as CSV), of which slices are taken. As flat images: `Center_1/CLASS/*.png`, or
    `Center_1/{train,val,test}/CLASS/*.png`, with patients from `patients.csv` where there is one. A folder may be
    called `Center1` or `Center_1`; the site is `Center_1`.

    Raises:
        InputError: there is no centre, a file or column is missing, or there are not two classes.
    """
    folders = _centre_folders(path)
    volumes = [name for name, folder in folders.items() if (folder / IMAGES).is_dir()]
    if volumes and len(volumes) < len(folders):
        others = [name for name in folders if name not in volumes]
        raise InputError(f"{path}: {', '.join(volumes)} hold volumes ({IMAGES}), {', '.join(others)} do not")
    found = _from_volumes(path, folders, slices) if volumes else _from_images(path, folders)
    absent = [name for name in CENTRES if name not in folders]
    notes = (f"centres that are not there: {', '.join(absent)}",) if absent else ()
    return replace(found, sites=CENTRES, notes=found.notes + notes)


def _centre_folders(path: Path) -> dict[str, Path]:
    """The folder of every centre, by its site's name."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    matches = ((_CENTRE.fullmatch(item.name), item) for item in sorted(path.iterdir()) if item.is_dir())
    found = [(f"Center_{match[1]}", item) for match, item in matches if match]
    if not found or len(found) > len(dict(found)):
        names = some(item.name for _, item in found) or "none"
        raise InputError(f"{path}: expected one folder a centre, Center_1 to Center_4; found: {names}")
    return dict(found)


def _from_images(path: Path, folders: Mapping[str, Path]) -> Listing:
    """Flat images in folders of two classes."""
    plain, names = read_folders(path), {folder.name: name for name, folder in folders.items()}
    patients = read_patients(path)
    records = tuple(
        replace(record, site=names[record.site], group=_patient(names[record.site], record.name, patients))
        for record in plain.records
        if record.site in names
    )
    others = sorted({record.site for record in plain.records} - set(names))
    labels = sorted({record.label for record in records})
    if len(labels) != len(CLASSES):
        raise InputError(
            f"{path}: the centres must have two class folders in all; found: {', '.join(labels) or 'none'}"
        )
    note = (f"folders that are no centre left out: {some(others)}",) if others else ()
    return replace(plain, records=records, notes=(*plain.notes, *note, *patient_note([r.group for r in records])))


def _patient(centre: str, image: str, patients: Mapping[str, str]) -> str:
    """The patient of a flat image; numbers of different centres are different patients."""
    found = patient_of(image, patients)
    return f"{centre}/{found}" if found else ""


def _from_volumes(path: Path, folders: Mapping[str, Path], slices: SliceOptions) -> Listing:
    """Slices of the published volumes."""
    scans = [scan for name, folder in folders.items() for scan in _scans(name, folder)]
    missing = [str(file) for scan in scans for file in (scan.volume, scan.mask) if not file.is_file()]
    if missing:
        raise InputError(f"{path}: {len(missing)} volumes are missing: {some(missing)}")
    shown = [(scan.mask if slices.inside == "tumour" else scan.volume, scan.volume) for scan in scans]
    chosen = choose_slices(shown, slices)
    every = [record for scan, rows in zip(scans, chosen, strict=True) for record in _records(scan, rows)]
    labels: dict[str, set[str]] = defaultdict(set)
    for record in every:  # two contours of one volume may show the same slice
        labels[record.name].add(record.label)
    records = {record.name: record for record in every if len(labels[record.name]) == 1}
    if not records:
        raise InputError(f"{path}: no slice of any volume shows any {slices.inside}")
    patients, torn = len({record.group for record in every}), len(labels) - len(records)
    notes = [f"{patients} patients, {len(records)} slices of their {slices.inside}"]
    notes += [f"{torn} slices left out: they show tumours of both classes"] if torn else []
    return Listing(tuple(records.values()), str(path), tuple(CLASSES.values()), tuple(notes))


def _scans(centre: str, folder: Path) -> Iterator[Scan]:
    """Every row of a centre's label file; InputError naming a row whose label is neither 0 nor 1."""
    file = folder / f"{folder.name}_label.csv"
    if not file.is_file():
        file = folder / f"{folder.name.replace('_', '')}_label.csv"
    if not file.is_file():
        raise InputError(f"{file}: no such file; save {file.with_suffix('.xlsx').name} of the data set as CSV")
    sheet = read_sheet(file)
    sheet.require(LABEL_COLUMNS)
    for row, cells in sheet.rows:
        if cells["label"] not in CLASSES:
            raise InputError(f"{file}: row {row}: label {cells['label']!r} is neither 0 nor 1")
        volume, mask = folder / IMAGES / cells["image_name"], folder / MASKS / cells["mask_name"]
        yield Scan(centre, volume, mask, CLASSES[cells["label"]], row)


def _records(scan: Scan, rows: Sequence[int]) -> Iterator[Record]:
    for row in rows:
        name = f"{scan.centre}/{IMAGES}/{scan.volume.name}#{PLANE}[{row}]"
        patient = f"{scan.centre}/{scan.volume.name.partition('.')[0]}"
        yield Record(ImageRef(scan.volume, PLANE, row), name, scan.label, scan.centre, group=patient, row=scan.row)
