"""A modality that a federation never sees: its images out of the federation, and a few of them for later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wardround.data import ClientData, Federation, Samples, SplitName
from wardround.data.caps import stratified_cap
from wardround.data.federation import SPLITS, joined
from wardround.errors import InputError
from wardround.seeds import numpy_stream

SITE = "unseen"  # the client that has the left-out modality's images


@dataclass(frozen=True)
class FewImages:
    """What is learned of a modality that came later.

    Attributes:
        federation: one client, `SITE`, with the chosen training images and all test images of the modality, in a label
            space of its own; the modality comes last among the federation's.
        pool: training images of each class that there were to choose from, `(C,)`.
    """

    federation: Federation
    pool: NDArray[np.int64]

    @property
    def client(self) -> ClientData:
        """The only client."""
        return self.federation.clients[0]


def chosen_modalities(federation: Federation, names: Sequence[str]) -> tuple[str, ...]:
    """The modalities to leave out, each once: those that are named, or every one.

    Raises:
        InputError: a name is no modality's, the federation has only one, or one has no training or test image.
    """
    known = federation.modalities
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"--leave-out {unknown[0]}: {federation.source} has no such modality (it has {_words(known)})")
    if len(known) < 2:
        raise InputError(f"{federation.source}: all images are of one modality ({_words(known)}); none can be left out")
    chosen = tuple(dict.fromkeys(names or known))
    for name in chosen:
        _check_images(federation, name)
    return chosen


def _words(names: Sequence[str]) -> str:
    return ", ".join(names)


def _check_images(federation: Federation, name: str) -> None:
    """InputError unless there is something to learn from and to test on, here and in the federation without it."""
    number = federation.modalities.index(name)
    for split in ("train", "test"):
        kinds = np.concatenate([client.split(split).modality for client in federation.clients])
        if not (kinds == number).any():
            raise InputError(f"--leave-out {name}: no client of {federation.source} has a {split} image of it")
        if split == "train" and (kinds == number).all():
            raise InputError(f"--leave-out {name}: no client of {federation.source} has a training image of another")


def without_modality(federation: Federation, name: str) -> Federation:
    """The federation as if there were no image of the modality `name`.

    Clients and held-out sites that are left without an image drop out, and so do classes that no other image shows;
    classes that no image showed before stay.
    """
    number = federation.modalities.index(name)
    kept = _classes_left(federation, number)
    clients, held_out = (
        tuple(_narrowed(client, number, kept) for client in sites if not _is_all(client, number))
        for sites in (federation.clients, federation.held_out)
    )
    return Federation(
        clients, tuple(federation.classes[row] for row in kept), federation.source,
        tuple(kind for kind in federation.modalities if kind != name),
        (*federation.notes, f"without the images of one modality: {name}"), held_out,
    )  # fmt: skip


def _is_all(client: ClientData, number: int) -> bool:
    """Whether all of a client's images are of this modality; not so of a client that never had one."""
    kinds = np.concatenate([client.split(split).modality for split in SPLITS])
    return len(kinds) > 0 and bool((kinds == number).all())


def _classes_left(federation: Federation, number: int) -> NDArray[np.int64]:
    """The classes, ascending, but for those that images of this modality alone show."""
    inside, outside = _shown(federation, number, True), _shown(federation, number, False)
    return np.flatnonzero(outside | ~inside)


def _shown(federation: Federation, number: int, inside: bool) -> NDArray[np.bool_]:
    """Which classes the images of this modality show, or those of all others, bool `(C,)`."""
    found = np.zeros(len(federation.classes), dtype=bool)
    for site in (*federation.clients, *federation.held_out):
        for split in SPLITS:
            part = site.split(split)
            found[part.labels[(part.modality == number) == inside]] = True
    return found


def _narrowed(client: ClientData, number: int, classes: NDArray[np.int64]) -> ClientData:
    """The client without this modality, labels and later modalities counted anew."""
    parts = []
    for split in SPLITS:
        part = _rows(client.split(split), client.split(split).modality != number)
        kinds = part.modality - (part.modality > number)
        parts.append(replace(part, labels=np.searchsorted(classes, part.labels), modality=kinds))
    return ClientData(client.name, *parts)


def _rows(part: Samples, chosen: NDArray[np.bool_]) -> Samples:
    """The chosen samples, without a copy where they are all."""
    return part if chosen.all() else part.take(np.flatnonzero(chosen))


def few_images(federation: Federation, name: str, fraction: float, seed: int) -> FewImages:
    """A share of the clients' training images of the modality `name`, and all their test images of it.

    Every class that is trained keeps its proportion and at least one image. A class that is only tested stays in the
    label space: nothing can know it.

    Args:
        federation: the whole one.
        name: of the modality.
        fraction: of the training images, in (0, 1].
        seed: the choice depends on it and the modality alone.
    """
    number = federation.modalities.index(name)
    train, test = _pooled(federation, number, "train"), _pooled(federation, number, "test")
    classes = np.union1d(train.labels, test.labels)
    last = len(federation.modalities) - 1
    train, test = (
        replace(part, labels=np.searchsorted(classes, part.labels), modality=np.full(len(part), last))
        for part in (train, test)
    )
    limit = max(round(fraction * len(train)), len(np.unique(train.labels)))
    few = train.take(stratified_cap(train.labels, limit, numpy_stream(seed, "unseen/few", client=name)))
    site = ClientData(SITE, few, train.take([]), test)
    kinds = (*(kind for kind in federation.modalities if kind != name), name)
    labels = tuple(federation.classes[row] for row in classes)
    return FewImages(Federation((site,), labels, federation.source, kinds), train.counts(len(classes)))


def _pooled(federation: Federation, number: int, split: SplitName) -> Samples:
    """All clients' images of this modality in one split."""
    parts = [client.split(split) for client in federation.clients]
    return joined([part.take(np.flatnonzero(part.modality == number)) for part in parts])
