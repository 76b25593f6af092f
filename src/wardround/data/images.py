"""Image files to square uint8 arrays.

Everything that can be wrong with a file becomes an InputError that names it.
"""

from __future__ import annotations

import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from wardround.data.colour import shades_of_grey
from wardround.data.dicom import is_dicom, read_dicom
from wardround.data.records import ImageRef
from wardround.data.volumes import VolumeShelf, is_volume
from wardround.errors import InputError

Resize = Literal["crop", "squash", "pad"]
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".pgm", ".ppm"})
# What Pillow raises for files that are no image, damaged, cut short, or absurdly large.
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, MemoryError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Decoding:
    """How an image becomes an array `(size, size, channels)`.

    Attributes:
        size: side in pixels.
        channels: 3 or 1.
        resize: `crop` scales the shorter side to `size` and crops the centre; `squash` scales both sides;
            `pad` scales the longer side and fills up with black.
        colour_constancy: shades of grey, applied after scaling and before cropping, to colour images only.
    """

    size: int
    channels: int = 3
    resize: Resize = "crop"
    colour_constancy: bool = False


class ImageOpener:
    """Opens images by reference; an array or a volume is read once and kept for its other items."""

    def __init__(self) -> None:
        self._volumes = VolumeShelf()
        self._arrays: dict[tuple[Path, str], NDArray[Any]] = {}
        self._lock = threading.Lock()

    def open(self, ref: ImageRef, size: int | None = None) -> Image.Image:
        """The image at `ref`, wholly loaded and upright.

        A JPEG that is at least four times `size` is read at a reduced scale, which is several times faster.
        Raises InputError naming the file when it is missing, no image, or cut short.
        """
        return self._item(ref) if ref.array else open_file(ref.path, size)

    def _item(self, ref: ImageRef) -> Image.Image:
        if is_volume(ref.path):
            return Image.fromarray(self._volumes.slice(ref.path, ref.array, ref.index))
        if is_dicom(ref.path):
            return Image.fromarray(read_dicom(ref.path, ref.array, ref.index))
        array = self.array(ref.path, ref.array)
        if not 0 <= ref.index < len(array):
            raise InputError(f"{ref}: no such item, the array has {len(array)}")
        item = array[ref.index]
        item = item[..., 0] if item.ndim == 3 and item.shape[-1] == 1 else item
        if item.dtype != np.uint8 or item.ndim not in (2, 3) or (item.ndim == 3 and item.shape[-1] != 3):
            raise InputError(
                f"{ref}: {item.dtype} of shape {item.shape} is no image; allowed: uint8 HxW, HxWx1 or HxWx3"
            )
        return Image.fromarray(np.ascontiguousarray(item))

    def array(self, path: Path, name: str) -> NDArray[Any]:
        """The array `name` of the `.npz` file at `path`; InputError where there is none."""
        with self._lock:
            if (path, name) not in self._arrays:
                self._arrays[path, name] = read_array(path, name)
            return self._arrays[path, name]


def read_array(path: Path, name: str) -> NDArray[Any]:
    """The array `name` of an `.npz` file; InputError naming the file where that fails."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if name not in arrays.files:
                raise InputError(f"{path}: no array {name!r}; it holds {', '.join(arrays.files)}")
            array: NDArray[Any] = arrays[name]
            return array
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not a readable .npz file ({error})") from error


def open_file(path: Path, size: int | None = None) -> Image.Image:
    """The image in the file at `path`, wholly loaded and upright. See `ImageOpener.open`."""
    try:
        with Image.open(path) as image:
            if size is not None:
                image.draft(None, (2 * size, 2 * size))
            image.load()
            return ImageOps.exif_transpose(image)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except _UNREADABLE as error:
        raise InputError(f"{path}: not a readable image ({error})") from error


def decode(ref: ImageRef, how: Decoding, opener: ImageOpener | None = None) -> NDArray[np.uint8]:
    """The image at `ref` as uint8 `(size, size, channels)`; InputError naming the file where that fails."""
    image = (opener or ImageOpener()).open(ref, how.size)
    try:
        return to_array(image, how)
    except _UNREADABLE as error:
        raise InputError(f"{ref}: an image of mode {image.mode} that cannot be converted ({error})") from error


def to_array(image: Image.Image, how: Decoding) -> NDArray[np.uint8]:
    """Bring an opened image into the form `how`: uint8 `(size, size, channels)`."""
    plain = to_8_bit(image).convert("RGB" if how.channels == 3 else "L")
    scaled = plain.resize(scaled_size(plain.size, how), Image.Resampling.BILINEAR)
    if how.colour_constancy and how.channels == 3:
        scaled = Image.fromarray(shades_of_grey(np.asarray(scaled)))
    array = np.asarray(centred(scaled, how.size), dtype=np.uint8)
    return array.reshape(how.size, how.size, how.channels)


def to_8_bit(image: Image.Image) -> Image.Image:
    """An image of 8 bits a channel without transparency.

    Deep images (16 bits, floats) are stretched linearly from their own darkest to their own brightest value,
    as a 12-bit radiograph in a 16-bit file would be almost black otherwise. What is transparent becomes
    black.
    """
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, dtype=np.float64)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        stretched = np.nan_to_num((values - low) / ((high - low) or 1.0)) * 255
        return Image.fromarray(np.round(stretched).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        solid = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", solid.size, (0, 0, 0, 255)), solid)
    return image


def scaled_size(size: tuple[int, int], how: Decoding) -> tuple[int, int]:
    """Width and height before the centre is cropped or the border padded.

    >>> scaled_size((200, 150), Decoding(128)), scaled_size((200, 150), Decoding(128, resize="pad"))
    ((171, 128), (128, 96))
    """
    if how.resize == "squash":
        return how.size, how.size
    reference = min(size) if how.resize == "crop" else max(size)
    width, height = (max(1, round(side * how.size / reference)) for side in size)
    return width, height


def centred(image: Image.Image, size: int) -> Image.Image:
    """The centre `size` x `size` of an image; black where the image does not reach."""
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
