"""A federation's captions, gathered before the first round: asked for, looked at, counted, and put into vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from wardround.captions.book import CaptionBook, write_book
from wardround.captions.caption import Provider
from wardround.captions.embedding import EmbeddedCaptions, embed
from wardround.captions.notes import notes
from wardround.captions.options import CaptionOptions
from wardround.captions.telling import ClientCaptions
from wardround.captions.text_encoders import TextEncoder
from wardround.data.federation import SPLITS, ClientData, Federation, SplitName
from wardround.data.options import DataOptions
from wardround.data.read import list_records


@dataclass(frozen=True)
class GatheredCaptions:
    """All captions of a federation.

    Attributes:
        training: by client; one whose training images have no caption is not in it.
        testing: of test images, by client; empty unless `captions.at_test` asks for it, and never with captions that
            may state the label.
        notes: sentences for the report.
        record: what a run's folder says of them.
    """

    training: Mapping[str, ClientCaptions] = field(default_factory=dict)
    testing: Mapping[str, EmbeddedCaptions] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


def gather(
    options: CaptionOptions,
    federation: Federation,
    provider: Provider,
    encoder: TextEncoder,
    seed: int,
    batch_size: int,
    folder: Path | None = None,
) -> GatheredCaptions:
    """The captions of every client, of training images, and with `at_test` of test images too.

    Args:
        options: the `[captions]` section.
        federation: whose images.
        provider: gives the captions.
        encoder: makes vectors of them.
        seed: the experiment's.
        batch_size: images in a batch, for the notes.
        folder: of caches; by default the user's.

    Raises:
        InputError, RunError: the provider failed, or the encoder cannot be had.
    """

    def written(split: SplitName) -> dict[str, CaptionBook]:
        clients = federation.clients
        return {client.name: write_book(provider, client, split, options, seed) for client in clients}

    def embedded(books: Mapping[str, CaptionBook]) -> dict[str, EmbeddedCaptions]:
        by_meaning = options.positives_by_meaning
        return {
            name: embed(book, encoder, options.tokens, by_meaning, folder)
            for name, book in books.items()
            if book.captioned
        }

    books = written("train")
    testing = written("test") if options.at_test else {}
    return GatheredCaptions(
        {name: ClientCaptions(texts, options) for name, texts in embedded(books).items()},
        embedded(testing),
        notes(tuple(books.values()), options, batch_size),
        _record(options, books),
    )


def _record(options: CaptionOptions, books: Mapping[str, CaptionBook]) -> dict[str, Any]:
    """`captions` in `federation.json`: where captions came from, and of each client how many, and a digest of them."""
    clients = {
        name: {"images": len(book), "captioned": book.captioned, "texts": len(book.texts), "digest": _digest(book)}
        for name, book in books.items()
    }
    return {**described(options), "clients": clients}


def described(options: CaptionOptions) -> dict[str, Any]:
    """What records and results say of the section."""
    return {
        "provider": options.provider,
        "text_encoder": options.text_encoder,
        "fusion": options.fusion,
        "at_test": options.at_test,
    }


def _digest(book: CaptionBook) -> str:
    """Of which image has which caption."""
    hashes = ("" if caption is None else f"{caption.hash}{caption.meaning}" for caption in book.captions)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:32]


class KnownNames(Collection[str]):
    """The names that captions of a file may speak of: of all images of the source, used in this experiment or not.

    The source is only listed when a name is not among the federation's own.

    Args:
        federation: as it was read.
        options: the `[data]` section.
    """

    def __init__(self, federation: Federation, options: DataOptions) -> None:
        self._federation, self._options = federation, options

    def __contains__(self, name: object) -> bool:
        return name in self._used or name in self._listed

    def __iter__(self) -> Iterator[str]:
        yield from self._used
        yield from (name for name in self._listed if name not in self._used)

    def __len__(self) -> int:
        return len(self._used | self._listed)

    @cached_property
    def _used(self) -> dict[str, None]:
        everyone: tuple[ClientData, ...] = (*self._federation.clients, *self._federation.held_out)
        return dict.fromkeys(name for client in everyone for split in SPLITS for name in client.split(split).names)

    @cached_property
    def _listed(self) -> dict[str, None]:
        if self._options.source == "phantoms":  # made, not listed: there are no others
            return {}
        return dict.fromkeys(record.name for record in list_records(self._options).records)
