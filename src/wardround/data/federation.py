"""A federation's data in memory: for each client three splits of decoded images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
WITHHELD = -1  # the label of an image elsewhere, whose owner does not tell it


@dataclass(frozen=True)
class Samples:
    """Decoded images with their labels.

    Attributes:
        images: uint8 array `(N, H, W, C)`, C = 1 or 3; it may be a memory map.
        labels: int64 array `(N,)`, indices into `Federation.classes`; `WITHHELD` where they are not told.
        names: N names, unique within the federation, that lead a person back to the image (a path, a row).
        modality: int64 array `(N,)`, indices into `Federation.modalities`; all 0 where there is one modality.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    modality: NDArray[np.int64]

    def __post_init__(self) -> None:
        sizes = {len(self.images), len(self.labels), len(self.names), len(self.modality)}
        if len(sizes) != 1:
            raise ValueError(f"images, labels, names and modality differ in length: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64] | Sequence[int]) -> Samples:
        """The samples at `rows`, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Samples(self.images[rows], self.labels[rows], tuple(self.names[i] for i in rows), self.modality[rows])

    def counts(self, classes: int) -> NDArray[np.int64]:
        """Images per class, shape `(classes,)`, as far as they are told."""
        return np.bincount(self.labels[self.labels != WITHHELD], minlength=classes).astype(np.int64)

    def modality_counts(self, modalities: int) -> NDArray[np.int64]:
        """Images per modality, shape `(modalities,)`."""
        return np.bincount(self.modality, minlength=modalities).astype(np.int64)


def samples(
    images: NDArray[np.uint8],
    labels: Sequence[int] | NDArray[np.int64],
    names: Sequence[str],
    modality: Sequence[int] | NDArray[np.int64] | None = None,
) -> Samples:
    """Build `Samples` from plain sequences; one modality when none is given."""
    label_array = np.asarray(labels, dtype=np.int64)
    kinds = np.zeros(len(label_array), dtype=np.int64) if modality is None else np.asarray(modality, np.int64)
    return Samples(images, label_array, tuple(names), kinds)


def joined(parts: Sequence[Samples]) -> Samples:
    """All samples of `parts`, one after the other."""
    return Samples(
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(name for part in parts for name in part.names),
        np.concatenate([part.modality for part in parts]),
    )


@dataclass(frozen=True)
class ClientData:
    """One client's images. Any split may be empty."""

    name: str
    train: Samples
    val: Samples
    test: Samples

    def split(self, name: SplitName) -> Samples:
        """The split called `name`."""
        return {"train": self.train, "val": self.val, "test": self.test}[name]


def for_testing(client: ClientData) -> ClientData:
    """The client with all its images in the test split."""
    whole = joined([client.split(split) for split in SPLITS])
    nothing = whole.take([])
    return ClientData(client.name, nothing, nothing, whole)


@dataclass(frozen=True)
class Federation:
    """All clients, in their fixed order, with the label space that they share.

    `notes` are sentences for the report: what was skipped, capped, split or found odd while reading. `held_out` are
    sites that are no clients: all their images are for testing, and nothing else is done with them.
    """

    clients: tuple[ClientData, ...]
    classes: tuple[str, ...]
    source: str
    modalities: tuple[str, ...] = ("image",)
    notes: tuple[str, ...] = field(default=())
    held_out: tuple[ClientData, ...] = ()

    def __post_init__(self) -> None:
        names = [client.name for client in (*self.clients, *self.held_out)]
        if len(set(names)) != len(names):
            raise ValueError(f"client names repeat: {names}")

    @property
    def is_elsewhere(self) -> bool:
        """Whether only numbers of images are known, and no image."""
        return all(client.split(split).images.size == 0 for client in self.clients for split in SPLITS)

    @property
    def names(self) -> tuple[str, ...]:
        """Client names in order."""
        return tuple(client.name for client in self.clients)

    def client(self, name: str) -> ClientData:
        """The client called `name`; KeyError where there is none."""
        for client in self.clients:
            if client.name == name:
                return client
        raise KeyError(name)

    def counts(self, split: SplitName = "train") -> NDArray[np.int64]:
        """Images per client and class, shape `(clients, classes)`."""
        return np.stack([client.split(split).counts(len(self.classes)) for client in self.clients])
