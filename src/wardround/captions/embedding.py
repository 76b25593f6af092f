"""A client's captions as an encoder sees them: computed once, kept on disk, handed out batch by batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from wardround.captions.book import CaptionBook
from wardround.captions.caption import digest
from wardround.captions.text_encoders import TextEncoder, cache_name
from wardround.data.cache import atomically, default_folder
from wardround.errors import InputError
from wardround.models.caption_fusion import CaptionBatch

Tokens = Literal["all", "sentence"]


@dataclass(frozen=True)
class EmbeddedCaptions:
    """The captions of one split of one client.

    Attributes:
        vectors: of the tokens of each distinct text, float16 `(T, D)`.
        text: for every image the number of its text, int64 `(N,)`; -1 without a caption.
        says: for every image the number of what its caption counts as saying, int64 `(N,)`; -1 without a caption.
        dim: D.
    """

    vectors: tuple[Tensor, ...]
    text: Tensor
    says: Tensor
    dim: int

    def __len__(self) -> int:
        return len(self.text)

    def batch(self, rows: Tensor, device: torch.device | None = None) -> CaptionBatch:
        """The captions of the images `rows`, int64 `(B,)`, in float32 and padded to the longest of them."""
        numbers = self.text[rows].tolist()
        lengths = [0 if number < 0 else len(self.vectors[number]) for number in numbers]
        tokens = torch.zeros(len(numbers), max(lengths, default=0), self.dim)
        for place, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            if length:
                tokens[place, :length] = self.vectors[number]
        mask = torch.arange(tokens.shape[1]) < torch.tensor(lengths, dtype=torch.int64)[:, None]
        return CaptionBatch(tokens, mask, self.says[rows]).to(device)


def embed(
    book: CaptionBook,
    encoder: TextEncoder,
    tokens: Tokens = "all",
    by_meaning: bool = False,
    folder: Path | None = None,
) -> EmbeddedCaptions:
    """The captions of `book` in vectors: from the cache where it has them, else computed and kept there.

    Vectors are rounded to half precision, kept or not, and computed by one thread on the processor, so that they do not
    depend on what was kept, on what else is captioned, or on the machine's cores.

    Args:
        book: the captions.
        encoder: is only loaded where the cache lacks a text.
        tokens: `sentence` takes their mean, as if a text had one token.
        by_meaning: whether captions that make the same statement count as saying the same, or only those of one text.
        folder: of caches; by default the user's.

    Raises:
        InputError: the encoder cannot be had, or its vectors cannot be kept.
    """
    shelf = (folder or default_folder()) / "captions" / "embedded" / f"{cache_name(encoder)}-{tokens}"
    with _one_thread():
        vectors = tuple(_vectors(text, encoder, tokens, shelf) for text in book.texts)
    text, says = (torch.from_numpy(book.numbered(meaning)) for meaning in (False, by_meaning))
    return EmbeddedCaptions(vectors, text, says, encoder.dim)


def _vectors(text: str, encoder: TextEncoder, tokens: Tokens, shelf: Path) -> Tensor:
    """float16 `(T, D)`. InputError where the encoder's numbers are too large for it."""
    name = digest(text)
    file = shelf / name[:2] / f"{name}.safetensors"
    kept = _load(file, encoder.dim)
    if kept is not None:
        return kept
    vectors = encoder.encode(text)
    vectors = (vectors if tokens == "all" else vectors.mean(0, keepdim=True)).half()
    if not vectors.isfinite().all():
        raise InputError(f"captions.text_encoder = {encoder.name!r}: its vectors go beyond half precision at {text!r}")
    _save(file, vectors)
    return vectors


def _load(file: Path, dim: int) -> Tensor | None:
    """What is kept in `file`; None where there is none, or a damaged one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with contextlib.suppress(OSError, SafetensorError, KeyError):
        vectors = load_file(file)["tokens"]
        sound = vectors.dtype == torch.float16 and vectors.dim() == 2 and len(vectors) and vectors.shape[1] == dim
        return vectors if sound else None
    return None


def _save(file: Path, vectors: Tensor) -> None:
    """Keep `vectors`, whole or not at all. A folder that cannot be written to costs time, but no result."""
    from safetensors.torch import save

    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomically(file) as stream:
            stream.write(save({"tokens": vectors.contiguous()}))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread for a while."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
