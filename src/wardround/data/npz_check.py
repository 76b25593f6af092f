"""Is a MedMNIST file whole: all its arrays, of one length and the right size, and the published checksum."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from wardround.data.federation import SPLITS
from wardround.data.medmnist import medmnist_info
from wardround.data.remembering import remembered
from wardround.errors import InputError

Shape = tuple[int, ...]


def check_npz(file: Path, flag: str, size: int, checksum: bool = True) -> None:
    """Look at the arrays' headers and, with `checksum`, at every byte of the file.

    The checksum is remembered until the file changes.

    Args:
        file: an `.npz` file that exists.
        flag: the set that it should hold.
        size: side of the images that it should hold, in pixels.
        checksum: compare with the MD5 that the package `medmnist` lists.

    Raises:
        InputError: naming the file, what was found and what should be there.
    """
    shapes = array_shapes(file)
    missing = [f"{split}_{what}" for split in SPLITS for what in ("images", "labels")]
    missing = [name for name in missing if name not in shapes]
    if missing:
        raise InputError(f"{file}: no array {', no array '.join(missing)}; it holds {', '.join(shapes) or 'none'}")
    for split in SPLITS:
        _check_shape(file, split, shapes[f"{split}_images"], shapes[f"{split}_labels"], size)
    if checksum:
        _check_sum(file, flag, size)


def array_shapes(file: Path) -> dict[str, Shape]:
    """The shape of every array of an `.npz` file, from their headers: no array is unpacked."""
    try:
        with zipfile.ZipFile(file) as archive:
            return {name.removesuffix(".npy"): _shape(archive, name) for name in archive.namelist()}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: not a readable .npz file ({error})") from error


def _shape(archive: zipfile.ZipFile, name: str) -> Shape:
    with archive.open(name) as stream:
        first = np.lib.format.read_magic(stream) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape: Shape = read(stream)[0]
        return shape


def _check_shape(file: Path, split: str, images: Shape, labels: Shape, size: int) -> None:
    if images[1:3] != (size, size):
        raise InputError(f"{file}: {split}_images has the shape {images}; data.size = {size} asks for {size} pixels")
    if images[:1] != labels[:1]:
        raise InputError(f"{file}: {split}_images and {split}_labels differ in length: {images} and {labels}")


def _check_sum(file: Path, flag: str, size: int) -> None:
    published = medmnist_info()[flag]["MD5" if size == 28 else f"MD5_{size}"]
    found = remembered("md5", [file], lambda: md5(file))
    if found != published:
        raise InputError(
            f"{file}: its checksum (MD5) is {found}, that of {flag} at {size} pixels is {published}. Fetch the file"
            " again, or set data.mimh.check = false if it is meant to differ"
        )


def md5(file: Path) -> str:
    """The MD5 of a file, as hexadecimal digits: it tells damage, not malice."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
