"""RSNA 2019 brain CT haemorrhage: slices with exactly one of five subtypes of bleeding.

Flanders et al., Radiology: Artificial Intelligence 2:e190211 (2020). An image has up to five subtypes; FedMedCLIP's
benchmark has one class an image, from the PNG export that FedMLP (MICCAI 2024) uses: of its 185,051 images, 67,969
have one subtype.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wardround.data.dicom import header_patient, is_dicom, pydicom_package
from wardround.data.images import IMAGE_SUFFIXES
from wardround.data.patients import patient_note, patient_of, read_patients
from wardround.data.records import ImageRef, Listing, Record, some
from wardround.data.remembering import remembered
from wardround.errors import InputError

LABEL_FILE = "stage_2_train.csv"
SUBTYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
ANY = "any"  # the sixth label of the file: whether there is any of them
IMAGE_FOLDERS = ("stage_2_train", "stage_2_train_images", "png185k_512", "images", ".")
WINDOW = "brain"
Labels = dict[str, dict[str, bool]]  # by image and subtype


def read_rsna_ich(path: Path) -> Listing:
    """The slices with one subtype, from `LABEL_FILE` and the images in one of `IMAGE_FOLDERS`.

    Images are PNG or JPEG exports or the original DICOM files, which are shown in the brain window. A patient is a
    group: from `patients.csv` (columns image, patient) where there is one, else from the DICOM headers. There are no
    sites. Images of the table without a file are left out; notes count everything that was.

    Raises:
        InputError: a file or a column is missing, a row is none of the layout, or no image has one subtype.
    """
    labels, files = _labels(path / LABEL_FILE), _files(path)
    shown = {image: tuple(name for name in SUBTYPES if subtypes[name]) for image, subtypes in labels.items()}
    single = [image for image, names in shown.items() if len(names) == 1 and image in files]
    if not single:
        raise InputError(f"{path}: none of the {len(files)} images has exactly one subtype in {LABEL_FILE}")
    groups = _groups(path, [files[image] for image in single])
    records = tuple(
        Record(_ref(files[image]), files[image].name, shown[image][0], group=group)
        for image, group in zip(single, groups, strict=True)
    )
    notes = (*_counts(shown, files), *patient_note(groups))
    return Listing(records, str(path), SUBTYPES, notes)


def _ref(file: Path) -> ImageRef:
    return ImageRef(file, WINDOW, 0) if is_dicom(file) else ImageRef(file)


def _labels(file: Path) -> Labels:
    """Which subtypes every image has; rows that repeat and agree are as good as one.

    The file has 4.5 million rows, so it is read as a stream.
    """
    labels: Labels = {}
    for row, image, subtype, value in _rows(file):
        known = labels.setdefault(image, {})
        if known.setdefault(subtype, value) != value:
            raise InputError(f"{file}: row {row}: {image}_{subtype} has another label than in an earlier row")
    short = [image for image, known in labels.items() if any(name not in known for name in SUBTYPES)]
    if short or not labels:
        what = f"images without a row for each of {', '.join(SUBTYPES)}: {some(short)}" if short else "no rows"
        raise InputError(f"{file}: {what}")
    return labels


def _rows(file: Path) -> Iterator[tuple[int, str, str, bool]]:
    """Line number, image, subtype and label of every row; InputError naming a row that is none of the layout."""
    if not file.is_file():
        raise InputError(f"{file}: no such file; the folder holds {LABEL_FILE} and {' or '.join(IMAGE_FOLDERS[:-1])}")
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        header = next(reader, [])
        if header != ["ID", "Label"]:
            raise InputError(f"{file}: the columns must be ID, Label; found: {', '.join(header)}")
        for cells in reader:
            image, _, subtype = cells[0].rpartition("_") if len(cells) == 2 else ("", "", "")
            if not image or subtype not in (*SUBTYPES, ANY) or cells[1] not in ("0", "1"):
                raise InputError(f"{file}: row {reader.line_num}: expected ID_..._SUBTYPE,0 or 1; found: {cells}")
            yield reader.line_num, image, subtype, cells[1] == "1"


def _files(path: Path) -> dict[str, Path]:
    """The images by name without suffix, from the first of `IMAGE_FOLDERS` that has any."""
    for folder in (path / name for name in IMAGE_FOLDERS):
        if folder.is_dir():
            found = {file.stem: file for file in sorted(folder.iterdir()) if _is_image(file)}
            if found:
                return found
    raise InputError(f"{path}: no images ID_*.png, .jpg or .dcm in {', '.join(IMAGE_FOLDERS[:-1])} or here")


def _is_image(file: Path) -> bool:
    return file.name.startswith("ID_") and (is_dicom(file) or file.suffix.lower() in IMAGE_SUFFIXES)


def _groups(path: Path, files: list[Path]) -> list[str]:
    """The patient of every image; empty where it is not known."""
    known = read_patients(path)
    if known or not any(map(is_dicom, files)):
        return [patient_of(file.relative_to(path).as_posix(), known) for file in files]
    pydicom_package()
    return remembered("patients", files, lambda: _header_patients(files))


def _header_patients(files: list[Path]) -> list[str]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda file: header_patient(file) if is_dicom(file) else "", files))


def _counts(shown: dict[str, tuple[str, ...]], files: dict[str, Path]) -> tuple[str, ...]:
    """What was used and left out, in numbers."""
    sizes = Counter(min(len(names), 2) for image, names in shown.items() if image in files)
    notes = [f"{sizes[1]} images with one subtype used; left out: {sizes[0]} with none, {sizes[2]} with several"]
    absent, strange = sum(image not in files for image in shown), [image for image in files if image not in shown]
    notes += [f"{absent} of {len(shown)} images of {LABEL_FILE} have no file"] if absent else []
    notes += [f"{len(strange)} files are not in {LABEL_FILE}: {some(strange)}"] if strange else []
    return tuple(notes)
