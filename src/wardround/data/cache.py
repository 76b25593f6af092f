"""Decode many images at once, and keep the result on disk for the next start.

A cache entry is a plain `.npy` file beside a small JSON file. It is opened as a memory map, so that processes
on one machine share its pages. Its key is a digest of everything that its content depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from wardround.data.images import Decoding, ImageOpener, decode
from wardround.data.records import ImageRef
from wardround.errors import InputError, MissingExtra

FORMAT = 1
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Decoded:
    """Decoded images in the order of their references, without the bad ones.

    Attributes:
        images: uint8 `(N - bad, size, size, channels)`.
        bad: for each position that could not be decoded, what is wrong with it.
        notes: sentences for the report.
    """

    images: Images
    bad: dict[int, str]
    notes: tuple[str, ...] = ()


def decode_images(refs: Sequence[ImageRef], how: Decoding) -> Decoded:
    """Decode images in threads (Pillow releases the interpreter lock)."""
    images = np.empty((len(refs), how.size, how.size, how.channels), dtype=np.uint8)
    opener = ImageOpener()

    def _fill(position: int) -> str | None:
        try:
            images[position] = decode(refs[position], how, opener)
        except MissingExtra:
            raise  # no fault of the image, and nothing to be kept
        except InputError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        faults = list(pool.map(_fill, range(len(refs))))
    bad = {position: fault for position, fault in enumerate(faults) if fault is not None}
    return Decoded(np.delete(images, list(bad), axis=0) if bad else images, bad)


def cache_key(refs: Sequence[ImageRef], how: Decoding) -> str:
    """A digest of the files' names, sizes and times, the items in them, their order, and the decoding."""
    digest = hashlib.sha256(json.dumps([FORMAT, asdict(how)], sort_keys=True).encode())
    stamps: dict[Path, str] = {}
    for ref in refs:
        stamp = stamps.get(ref.path) or stamps.setdefault(ref.path, file_stamp(ref.path))
        digest.update(f"{stamp}|{ref.array}|{ref.index}\n".encode())
    return digest.hexdigest()[:32]


def file_stamp(path: Path) -> str:
    """A file's name, size and time of change in one word; it changes when the file does."""
    try:
        status = os.stat(path)
    except OSError:
        return f"{path.absolute()}|missing"
    return f"{path.absolute()}|{status.st_size}|{status.st_mtime_ns}"


def default_folder() -> Path:
    """`$WARDROUND_CACHE`, or `~/.cache/wardround`."""
    given = os.environ.get("WARDROUND_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "wardround"


def decoded_cache(folder: Path | None = None) -> DecodedCache:
    """The cache of decoded images in `folder`, by default `default_folder()`."""
    return DecodedCache((folder or default_folder()) / "decoded")


class DecodedCache:
    """Decoded images on disk; never an error: damaged entries are made anew, unwritable folders ignored."""

    def __init__(self, folder: Path, limit_bytes: int = 50_000_000_000) -> None:
        """Use `folder`; a write removes the entries unused for longest until `limit_bytes` suffice."""
        self.folder = folder
        self.limit_bytes = limit_bytes

    def decode(self, refs: Sequence[ImageRef], how: Decoding) -> Decoded:
        """Decode images, or take them from the cache when nothing that they depend on has changed."""
        key = cache_key(refs, how)
        entry, damage = self._load(key)
        if entry is not None:
            return entry
        fresh = decode_images(refs, how)
        notes: tuple[str, ...] = (damage,) if damage else ()
        try:
            self._store(key, fresh)
        except OSError as error:
            notes += (f"the decoded images could not be kept in {self.folder} ({error.strerror or error})",)
            return Decoded(fresh.images, fresh.bad, notes)
        stored, _ = self._load(key, verify=False)
        return Decoded(stored.images if stored else fresh.images, fresh.bad, notes)

    def _files(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.npy", self.folder / f"{key}.json"

    def _load(self, key: str, verify: bool = True) -> tuple[Decoded | None, str]:
        """The entry, or None and, where there is a damaged one, a note."""
        data, card = self._files(key)
        try:
            facts = json.loads(card.read_text())
            images = np.load(data, mmap_mode="c", allow_pickle=False) if facts["rows"] else np.load(data)
            if verify and (len(images) != facts["rows"] or _checksum(images) != facts["crc32"]):
                raise ValueError("checksum")
            os.utime(card)
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None, f"a damaged entry of the cache {self.folder} was replaced"
        return Decoded(np.asarray(images), {int(i): fault for i, fault in facts["bad"].items()}), ""

    def _store(self, key: str, decoded: Decoded) -> None:
        """Write an entry, the JSON file last; each file appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data, card = self._files(key)
        with atomically(data) as file:
            np.save(file, decoded.images)
        facts = {"rows": len(decoded.images), "crc32": _checksum(decoded.images), "bad": decoded.bad}
        with atomically(card) as file:
            file.write(json.dumps(facts).encode())
        self._prune(keep=key)

    def _prune(self, keep: str) -> None:
        cards = sorted(self.folder.glob("*.json"), key=lambda card: card.stat().st_mtime)
        used = sum(file.stat().st_size for file in self.folder.glob("*.npy"))
        for card in cards:
            if used <= self.limit_bytes:
                return
            if card.stem != keep:
                used -= card.with_suffix(".npy").stat().st_size
                card.unlink()
                card.with_suffix(".npy").unlink()


def _checksum(images: Images, step: int = 1 << 26) -> int:
    """CRC-32 of the bytes of a contiguous array, read in pieces."""
    flat = images.reshape(-1)
    total = 0
    for start in range(0, flat.size, step):
        total = zlib.crc32(flat[start : start + step].data, total)
    return total


@contextlib.contextmanager
def atomically(target: Path) -> Iterator[IO[bytes]]:
    """A file that replaces `target` when the block ends well, and vanishes otherwise."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
