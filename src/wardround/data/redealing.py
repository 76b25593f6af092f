"""Deal images that are in memory anew: phantoms of several modalities to clients that have some of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wardround.data.clients import assign_clients
from wardround.data.federation import SPLITS, ClientData, Federation, Samples, joined
from wardround.data.options import PartitionOptions
from wardround.data.records import ImageRef, Listing, Record, natural_order
from wardround.errors import InputError


def redealt(
    clients: Sequence[ClientData], federation: Federation, options: PartitionOptions, seed: int
) -> tuple[list[ClientData], tuple[str, ...]]:
    """The images of `clients`, dealt to new ones as those of any source are, and a note that says so.

    Every split is dealt by the same plan, and no image changes its split. Images keep their names and what their old
    site did to them.

    Args:
        clients: whose images are dealt, of `federation`.
        federation: says what labels and modalities mean.
        options: any kind but `site` and `column`.
        seed: of the deal.

    Raises:
        InputError: there are no clients, or `min_size` or `min_test_size` cannot be met.
    """
    if not clients:
        raise InputError("data.held_out leaves no image to deal")
    pools = {split: joined([client.split(split) for client in clients]) for split in SPLITS}
    records = tuple(record for split, pool in pools.items() for record in _records(pool, split, federation))
    owners = np.array(assign_clients(Listing(records, federation.source, federation.classes), options, seed))
    ends = np.cumsum([len(pool) for pool in pools.values()])[:-1]
    parts = list(zip(pools.values(), np.split(owners, ends), strict=True))
    dealt = [
        ClientData(name, *(pool.take(np.flatnonzero(owner == name)) for pool, owner in parts))
        for name in natural_order(owners.tolist())
    ]
    sites = ", ".join(client.name for client in clients)
    return dealt, (f"the images of {sites} were dealt to {len(dealt)} clients ({options.kind})",)


def _records(pool: Samples, split: str, federation: Federation) -> list[Record]:
    """One record an image."""
    facts = zip(pool.names, pool.labels.tolist(), pool.modality.tolist(), strict=True)
    return [
        Record(ImageRef(Path(name)), name, federation.classes[label], split=split, modality=federation.modalities[kind])
        for name, label, kind in facts
    ]
