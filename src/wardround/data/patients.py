"""The patient of every image, from a table beside images that do not say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from wardround.data.tables import read_sheet

PATIENTS_FILE = "patients.csv"


def read_patients(folder: Path) -> dict[str, str]:
    """The patient of every image that `patients.csv` (columns image, patient) in `folder` names; empty without it.

    Images are named by their path below `folder`, or by their file name where that is enough; a suffix is cut off.
    """
    if not (folder / PATIENTS_FILE).is_file():
        return {}
    sheet = read_sheet(folder / PATIENTS_FILE)
    sheet.require(("image", "patient"))
    return {_key(cells["image"]): cells["patient"] for _, cells in sheet.rows if cells["patient"]}


def patient_of(image: str, known: Mapping[str, str]) -> str:
    """The patient of the image at the path `image`, as `read_patients` has it; empty where it is not known."""
    key = _key(image)
    return known.get(key) or known.get(key.rpartition("/")[2], "")


def _key(name: str) -> str:
    """An image's path without its suffix."""
    return str(PurePosixPath(name).with_suffix("")) if name else ""


def patient_note(groups: list[str]) -> tuple[str, ...]:
    """A note on the images whose patient (group) is empty: one patient may be in train and in test."""
    unknown = sum(not group for group in groups)
    if not unknown:
        return ()
    return (
        f"leakage is possible: {unknown} of {len(groups)} images have no known patient, so images of one patient may"
        f" be in several splits; {PATIENTS_FILE} (columns image, patient) beside the images mends it",
    )
