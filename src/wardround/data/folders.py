"""Read images from folders: `site/class/image`, or `site/split/class/image`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wardround.data.federation import SPLITS
from wardround.data.images import IMAGE_SUFFIXES
from wardround.data.records import ImageRef, Listing, Record, some
from wardround.errors import InputError


def read_folders(path: Path) -> Listing:
    """The images below `path`, in sorted order.

    A site whose subfolders are all called train, val or test is read as `site/split/class/image`. Images may
    lie deeper below their class. Hidden files and files that are no images by their suffix are left out, with
    a note. Raises InputError where there is no folder or no image in it.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    records: list[Record] = []
    for site in _folders(path):
        for split, folder in _split_folders(site):
            records += _class_records(path, site.name, split, folder)
    if not records:
        raise InputError(f"{path}: no images found; expected site/class/image or site/split/class/image")
    return Listing(tuple(records), str(path), notes=_left_out(path, records))


def _folders(path: Path) -> list[Path]:
    return sorted(item for item in path.iterdir() if item.is_dir() and not item.name.startswith("."))


def _split_folders(site: Path) -> Iterator[tuple[str, Path]]:
    """Each split of a site with its folder; `("", site)` where the site has no splits."""
    folders = _folders(site)
    if folders and all(folder.name in SPLITS for folder in folders):
        yield from ((folder.name, folder) for folder in folders)
    else:
        yield "", site


def _class_records(root: Path, site: str, split: str, folder: Path) -> Iterator[Record]:
    for label in _folders(folder):
        for file in sorted(label.rglob("*")):
            if _is_image(file):
                name = file.relative_to(root).as_posix()
                yield Record(ImageRef(file), name, label.name, site=site, split=split)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()


def _left_out(root: Path, records: list[Record]) -> tuple[str, ...]:
    """A note on the files that are no images or lie outside a class folder."""
    taken = {record.image.path for record in records}
    others = [
        file.relative_to(root).as_posix()
        for file in sorted(root.rglob("*"))
        if file.is_file() and file not in taken and not file.name.startswith(".")
    ]
    return (f"{len(others)} files are not images of a class and were left out: {some(others)}",) if others else ()
