"""CT slices in DICOM files as images, named `FILE.dcm#brain[0]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import InputError, MissingExtra

WINDOWS = {"brain": (40.0, 80.0)}  # level and width in Hounsfield units


def pydicom_package() -> Any:
    """The package pydicom; MissingExtra where it is not installed."""
    try:
        import pydicom
    except ImportError:
        raise MissingExtra("pydicom", "dicom", "A DICOM file") from None
    return pydicom


def is_dicom(path: Path) -> bool:
    """Whether a file is a DICOM file by its name."""
    return path.suffix.lower() == ".dcm"


def read_dicom(path: Path, window: str, frame: int = 0) -> NDArray[np.uint8]:
    """A frame `(H, W)` in Hounsfield units, its window stretched to 0 to 255 and clipped outside.

    InputError naming the file where it is missing, damaged, in colour, or has no such frame or window.
    """
    pydicom = pydicom_package()
    if window not in WINDOWS:
        raise InputError(f"{path}: {window!r} is no window (allowed: {', '.join(WINDOWS)})")
    try:
        stored = pydicom.dcmread(path)
        pixels = np.asarray(stored.pixel_array, dtype=np.float64)
        units = pixels * float(stored.get("RescaleSlope", 1)) + float(stored.get("RescaleIntercept", 0))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # pydicom raises many kinds for damaged files
        raise InputError(f"{path}: not a readable DICOM file ({error})") from error
    frames = units if units.ndim == 3 and int(stored.get("NumberOfFrames", 1)) > 1 else units[None]
    if frames.ndim != 3 or frame >= len(frames):
        raise InputError(f"{path}: pixels of shape {units.shape}; needed: grey, and a frame {frame}")
    return _stretched(frames[frame], *WINDOWS[window])


def _stretched(units: NDArray[np.float64], level: float, width: float) -> NDArray[np.uint8]:
    share = np.clip((units - (level - width / 2)) / width, 0.0, 1.0)
    return np.round(255 * share).astype(np.uint8)


def header_patient(path: Path) -> str:
    """The PatientID in a DICOM file's header; empty where there is none or the file is damaged."""
    pydicom = pydicom_package()
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["PatientID"])
    except Exception:  # pydicom raises many kinds; the decoder will name the file
        return ""
    return str(header.get("PatientID", "")).strip()
