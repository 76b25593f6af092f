"""Slices of NIfTI volumes as images.

A slice is named `FILE.nii.gz#axial[57]`. Volumes are turned to RAS+ first (first axis to the patient's right, second
to the front, third upwards), and slices are shown as radiologists do: axial ones nose up, and the patient's right on
the left.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import InputError, MissingExtra

VOLUME_SUFFIXES = (".nii", ".nii.gz")
PLANES = {"sagittal": 0, "coronal": 1, "axial": 2}  # the axis that a slice of the plane has one position on
WINDOW = (1.0, 99.0)  # percentiles of a volume's voxels that are not 0; they become black and white
Volume = NDArray[np.float32]


def is_volume(path: Path) -> bool:
    """Whether a file is a NIfTI volume by its name."""
    return path.name.lower().endswith(VOLUME_SUFFIXES)


def nibabel_package() -> Any:
    """The package nibabel; MissingExtra where it is not installed."""
    try:
        import nibabel
    except ImportError:
        raise MissingExtra("nibabel", "nifti", "A NIfTI volume") from None
    return nibabel


def read_volume(path: Path, like: Path | None = None) -> Volume:
    """The voxels of a volume `(X, Y, Z)`, turned to RAS+.

    Args:
        path: the file.
        like: a volume that this one lies on voxel by voxel, such as the image of a segmentation; it says how to
            turn. A segmentation's own header is often less careful.

    Raises:
        InputError: a file is missing, damaged, not three-dimensional, or not of the shape of `like`.
    """
    nibabel = nibabel_package()
    stored, model = _opened(path), _opened(like or path)
    if stored.shape != model.shape:
        raise InputError(f"{path}: its shape is {stored.shape}, that of {like} is {model.shape}; they must be the same")
    try:
        voxels = np.nan_to_num(np.asarray(stored.dataobj, dtype=np.float32))
        turned: Volume = nibabel.apply_orientation(voxels, nibabel.io_orientation(model.affine))
    except (OSError, EOFError, ValueError, zlib.error, nibabel.orientations.OrientationError) as error:
        raise InputError(f"{path}: not a readable NIfTI volume ({error})") from error
    return turned


def _opened(path: Path) -> Any:
    """A volume of which only the header is read; InputError where it is none or not three-dimensional."""
    nibabel = nibabel_package()
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        volume = nibabel.load(path)
    except (
        OSError, EOFError, ValueError, zlib.error,
        nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError,
    ) as error:  # fmt: skip
        raise InputError(f"{path}: not a readable NIfTI volume ({error})") from error
    if len(volume.shape) != 3:
        raise InputError(f"{path}: a volume of shape {volume.shape}; allowed: three dimensions")
    return volume


def windowed(volume: Volume) -> NDArray[np.uint8]:
    """A volume in 8 bits: linear between the percentiles `WINDOW` of its voxels that are not 0, clipped outside."""
    inside = volume[volume != 0]
    low, high = map(float, np.percentile(inside, WINDOW)) if inside.size else (0.0, 1.0)
    share = np.clip((volume - low) / ((high - low) or 1.0), 0.0, 1.0)
    grey: NDArray[np.uint8] = np.round(255 * share).astype(np.uint8)
    return grey


def slice_of(volume: NDArray[Any], plane: str, index: int) -> NDArray[Any]:
    """Slice `index` of a volume in RAS+ as an image: head or front up, and the patient's right or front on the left.

    InputError where there is no such plane or slice.
    """
    if plane not in PLANES:
        raise InputError(f"{plane!r} is no plane (allowed: {', '.join(PLANES)})")
    if index >= volume.shape[PLANES[plane]]:
        raise InputError(f"there is no {plane} slice {index}, the volume has {volume.shape[PLANES[plane]]}")
    return np.ascontiguousarray(np.take(volume, index, axis=PLANES[plane])[::-1, ::-1].T)


class VolumeShelf:
    """Volumes in 8 bits, the last few kept: the slices of a volume are mostly asked for one after the other."""

    def __init__(self, keep: int = 4) -> None:
        """Keep the `keep` volumes that were used last; a volume of BraTS takes 9 MB."""
        self.keep = keep
        self._volumes: OrderedDict[Path, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def slice(self, path: Path, plane: str, index: int) -> NDArray[np.uint8]:
        """One slice as an image `(H, W)`; InputError naming the file where that fails."""
        volume = self._volume(path)
        try:
            return slice_of(volume, plane, index)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def _volume(self, path: Path) -> NDArray[np.uint8]:
        with self._lock:
            if path not in self._volumes:
                self._volumes[path] = windowed(read_volume(path))
            self._volumes.move_to_end(path)
            while len(self._volumes) > self.keep:
                self._volumes.popitem(last=False)
            return self._volumes[path]
