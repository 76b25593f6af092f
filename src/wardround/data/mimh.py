"""MIMH: several MedMNIST sets in one federation, each of another imaging modality, as FM² (2026) combines them.

Five sets with 37 classes in all: 275,508 training, 36,479 validation and 60,286 test images (Yang et al., MedMNIST
v2, Scientific Data 10:41, 2023). A set is a site; official splits are never merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wardround.data.benchmark_options import MIMH_SETS, MimhOptions, MimhSet
from wardround.data.caps import stratified_cap
from wardround.data.medmnist import default_root, download, file_name, medmnist_info, read_npz
from wardround.data.npz_check import check_npz
from wardround.data.options import DataOptions
from wardround.data.records import Listing, Record
from wardround.errors import InputError
from wardround.seeds import numpy_stream

MODALITIES: dict[MimhSet, str] = {
    "retinamnist": "fundus",
    "bloodmnist": "blood microscope",
    "tissuemnist": "kidney cortex microscope",
    "pathmnist": "colon pathology",
    "dermamnist": "dermatoscope",
    "pneumoniamnist": "chest X-ray",
    "octmnist": "retinal OCT",
    "organamnist": "axial abdominal CT",
    "organcmnist": "coronal abdominal CT",
    "organsmnist": "sagittal abdominal CT",
    "breastmnist": "breast ultrasound",
}


def read_mimh(path: Path | None, options: MimhOptions, size: int) -> Listing:
    """The images of all sets in use, in the union label space; classes are called `SET:CLASS`.

    Args:
        path: the folder of `SET_SIZE.npz` (`SET.npz` at 28 pixels); None: the package `medmnist` fetches them.
        options: which sets; caps and label space are applied later, as they need a seed or the clients.
        size: side of the stored images in pixels.

    Raises:
        MissingExtra: the package `medmnist`, which knows classes and checksums, is not installed.
        InputError: files are missing or not what they should be.
    """
    files = _files(path, options.used, size)
    records: list[Record] = []
    for flag, file in files.items():
        check_npz(file, flag, size, options.check)
        records += _records(file, flag)
    notes = [] if options.check else ["the files' checksums were not compared (data.mimh.check = false)"]
    kinds = tuple(MODALITIES[flag] for flag in files)
    return Listing(
        tuple(records), str(path or default_root()), union_classes(options.used), tuple(notes), tuple(files), kinds
    )


def union_classes(used: Sequence[MimhSet]) -> tuple[str, ...]:
    """The 37 classes of the benchmark's five sets, whichever are used, then those of other sets in their order.

    Offsets: retina 0, blood 5, tissue 13, path 21, derma 30.
    """
    return tuple(f"{flag}:{name}" for flag in _counted_sets(used) for name in _names(flag))


def shared_labels(used: Sequence[MimhSet]) -> dict[str, str]:
    """For every class of `union_classes` its number within its set: labels that collide."""
    return {f"{flag}:{name}": str(k) for flag in _counted_sets(used) for k, name in enumerate(_names(flag))}


def in_label_space(listing: Listing, options: DataOptions) -> Listing:
    """The listing of a source with labels as `data.mimh.label_space` has them; of any other source as it is.

    Clients and caps go by the union, so that both label spaces have the same images at the same clients.
    """
    if options.source != "mimh" or options.mimh.label_space == "union":
        return listing
    labels = shared_labels(options.mimh.used)
    records = tuple(replace(record, label=labels[record.label]) for record in listing.records)
    classes = tuple(str(k) for k in range(len(set(labels.values()))))
    return replace(listing, records=records, classes=classes)


def capped_sets(listing: Listing, options: DataOptions, seed: int) -> Listing:
    """The listing with the caps of `data.mimh` on each set and split, class proportions kept; a note counts."""
    caps = options.mimh
    limits = {"train": caps.cap_per_dataset, "val": caps.cap_test_per_dataset, "test": caps.cap_test_per_dataset}
    if options.source != "mimh" or not any(limits.values()):
        return listing
    places: dict[tuple[str, str], list[int]] = {}
    for position, record in enumerate(listing.records):
        places.setdefault((record.site, record.split), []).append(position)
    kept: list[int] = []
    for (flag, split), rows in places.items():
        stream = numpy_stream(seed, f"data/mimh/cap/{split}", client=flag)
        labels = _codes([listing.records[row].label for row in rows])
        kept += np.asarray(rows)[stratified_cap(labels, limits[split], stream)].tolist()
    records = tuple(listing.records[row] for row in sorted(kept))
    return replace(listing, records=records, notes=(*listing.notes, *_notes(listing.records, records)))


def _notes(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """What the caps left of each set."""
    all_of, left_of = (Counter((record.site, record.split) for record in some) for some in (before, after))
    return [
        f"{flag}: {split} capped at {left_of[flag, split]} of {count} images before images were dealt"
        for (flag, split), count in all_of.items()
        if left_of[flag, split] < count
    ]


def _codes(words: Sequence[str]) -> NDArray[np.int64]:
    return np.unique(np.asarray(words), return_inverse=True)[1].astype(np.int64)


def _counted_sets(used: Sequence[MimhSet]) -> list[MimhSet]:
    """The sets whose classes the label space has, in its order."""
    return [*MIMH_SETS, *(flag for flag in used if flag not in MIMH_SETS)]


def _names(flag: str) -> list[str]:
    """A set's classes in the order of their numbers."""
    known = medmnist_info()[flag]["label"]
    return [str(known[str(k)]) for k in range(len(known))]


def _files(path: Path | None, used: Sequence[MimhSet], size: int) -> dict[MimhSet, Path]:
    """The file of every set; fetched where `path` is None, else InputError naming all that are missing."""
    folder = path or default_root()
    files = {flag: folder / file_name(flag, size) for flag in used}
    missing = [flag for flag, file in files.items() if not file.is_file()]
    if path is None:
        for flag in missing:
            download(flag, size, files[flag])
    elif missing:
        key = "url" if size == 28 else f"url_{size}"
        wanted = "; ".join(f"{files[flag].name} from {medmnist_info()[flag].get(key)}" for flag in missing)
        raise InputError(f"{path}: {len(missing)} of {len(files)} files are missing; fetch {wanted}")
    return files


def _records(file: Path, flag: MimhSet) -> list[Record]:
    """The images of one set; InputError where a label is none of its classes."""
    listing, names = read_npz(file, flag), _names(flag)
    if listing.classes != tuple(names):
        found, known = len(listing.classes) - 1, len(names) - 1
        raise InputError(f"{file}: labels go up to {found}; {flag} has classes 0 to {known}")
    modality = MODALITIES[flag]
    return [replace(record, label=f"{flag}:{record.label}", site=flag, modality=modality) for record in listing.records]
