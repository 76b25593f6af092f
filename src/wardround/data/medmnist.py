"""MedMNIST and MedMNIST+ by flag and size, or any `.npz` file of the same form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.federation import SPLITS
from wardround.data.images import read_array
from wardround.data.records import ImageRef, Listing, Record
from wardround.errors import InputError, MissingExtra, suggestion

SIZES = (28, 64, 128, 224)


def file_name(flag: str, size: int) -> str:
    """The name that the MedMNIST authors give to a file: `FLAG.npz` at 28 pixels, else `FLAG_SIZE.npz`."""
    return f"{flag}.npz" if size == 28 else f"{flag}_{size}.npz"


def medmnist_info() -> dict[str, dict[str, Any]]:
    """What the package `medmnist` says about each flag; MissingExtra where it is not installed."""
    try:
        from medmnist import INFO
    except ImportError:
        raise MissingExtra("medmnist", "medmnist", "A MedMNIST set by its flag") from None
    info: dict[str, dict[str, Any]] = INFO
    return info


def read_medmnist(path: Path | None, flag: str | None, size: int) -> Listing:
    """The images of a MedMNIST set with their official splits; they have no sites.

    Args:
        path: an `.npz` file, the folder that holds it (or shall hold it), or None for the package's own
            folder.
        flag: which set; None takes it from the file's name.
        size: side of the stored images in pixels.

    Raises InputError for an unknown flag, a set that is multi-label or 3-D, or a failed download.
    """
    if path is not None and path.suffix == ".npz":
        return read_npz(path, flag or _flag_of(path))
    flag = _known(flag or "")
    file = (path or default_root()) / file_name(flag, size)
    if not file.is_file():
        download(flag, size, file)
    return read_npz(file, flag)


def read_npz(file: Path, flag: str | None = None) -> Listing:
    """The images of one `.npz` file with arrays `SPLIT_images` and `SPLIT_labels`; train at least.

    Classes have the names that `medmnist` knows for `flag`, otherwise their numbers.
    """
    labels = {split: _labels(file, split) for split in SPLITS if _has(file, f"{split}_labels")}
    if "train" not in labels:
        raise InputError(f"{file}: no arrays train_images and train_labels, so not a file of MedMNIST's form")
    names, notes = _class_names(flag, int(max(array.max(initial=0) for array in labels.values())) + 1)
    records = [
        Record(
            ImageRef(file, f"{split}_images", i),
            f"{file.name}#{split}_images[{i}]",
            names[label],
            split=split,
        )
        for split, array in labels.items()
        for i, label in enumerate(array.tolist())
    ]
    return Listing(tuple(records), str(file), names, notes)


def _flag_of(file: Path) -> str:
    """The flag in a file name: `bloodmnist_64.npz` is `bloodmnist`."""
    return re.sub(r"_\d+$", "", file.stem)


def _known(flag: str) -> str:
    """`flag` if it is a set that can be used here, else InputError."""
    info = medmnist_info()
    if flag not in info:
        raise InputError(f"data.flag: {flag!r} is no MedMNIST set{suggestion(flag, info)}")
    _refuse_unusable(flag, info[flag]["task"])
    return flag


def _refuse_unusable(flag: str, task: str) -> None:
    if task.startswith("multi-label"):
        raise InputError(f"{flag} has several labels an image; sets with one label an image can be used")
    if flag.endswith("3d"):
        raise InputError(f"{flag} holds volumes; sets of flat images can be used")


def _class_names(flag: str | None, classes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Class names in the order of their numbers, and a note where only the numbers are known."""
    try:
        info = medmnist_info()
    except MissingExtra:
        info = {}
    known = info.get(flag or "", {}).get("label", {})
    if len(known) >= classes:
        return tuple(str(known[str(i)]) for i in range(len(known))), ()
    note = f"the names of the classes are not known for {flag!r}; they are called by their numbers"
    return tuple(str(i) for i in range(classes)), (note,)


def _has(file: Path, array: str) -> bool:
    """Whether the `.npz` file has this array; InputError where the file is missing or damaged."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return array in arrays.files
    except Exception as error:  # a damaged zip raises many kinds
        raise InputError(f"{file}: not a readable .npz file ({error})") from error


def _labels(file: Path, split: str) -> NDArray[np.int64]:
    """Class numbers `(N,)` of one split; InputError where an image has several labels."""
    array = read_array(file, f"{split}_labels")
    if array.ndim == 2 and array.shape[1] > 1:
        raise InputError(f"{file}: {split}_labels has {array.shape[1]} labels an image; one can be used")
    return array.reshape(len(array)).astype(np.int64)


def default_root() -> Path:
    """The folder in which the package `medmnist` keeps its files."""
    return Path.home() / ".medmnist"


def download(flag: str, size: int, file: Path) -> None:
    """Let `medmnist` fetch one file into its folder; InputError with what to do where it cannot."""
    import medmnist

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        dataset = getattr(medmnist, medmnist_info()[flag]["python_class"])
        dataset(split="train", download=True, root=str(file.parent), size=size)
    except Exception as error:
        url = medmnist_info()[flag].get("url" if size == 28 else f"url_{size}", "the MedMNIST site")
        raise InputError(
            f"{file}: no such file, and it could not be downloaded. Fetch {file.name} from {url},"
            f" place it in a folder and set data.path to that folder"
        ) from error
