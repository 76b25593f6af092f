"""From the `[data]` section of an experiment to a federation in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wardround.data.bladder_mri import read_bladder_mri
from wardround.data.brats import read_brats
from wardround.data.cache import Decoded, DecodedCache, decoded_cache
from wardround.data.caps import stratified_cap
from wardround.data.clients import assign_clients
from wardround.data.fed_isic import read_fed_isic
from wardround.data.federation import SPLITS, ClientData, Federation, Samples, SplitName, for_testing, samples
from wardround.data.folders import read_folders
from wardround.data.isic2019 import read_isic2019
from wardround.data.medmnist import read_medmnist
from wardround.data.mimh import capped_sets, in_label_space, read_mimh
from wardround.data.narrowing import narrowed
from wardround.data.options import DataOptions
from wardround.data.records import Listing, Record, natural_order, require, some
from wardround.data.redealing import redealt
from wardround.data.rsna_ich import read_rsna_ich
from wardround.data.setting_apart import set_apart
from wardround.data.split_records import assign_splits, settle_splits
from wardround.data.tables import read_table
from wardround.errors import InputError
from wardround.seeds import numpy_stream


@dataclass(frozen=True)
class Placement:
    """Where every record goes, before any image is decoded.

    Attributes:
        listing: the records that are used.
        clients: for every record its client.
        splits: for every record its split.
        rows: positions of the records to decode, by client and split, caps applied; clients in their order.
        notes: sentences for the report.
        held_out: those of `clients` that never train; all their images are in the test split.
    """

    listing: Listing
    clients: tuple[str, ...]
    splits: tuple[SplitName, ...]
    rows: dict[str, dict[SplitName, NDArray[np.int64]]]
    notes: tuple[str, ...]
    held_out: frozenset[str] = frozenset()


def read_federation(
    options: DataOptions, seed: int, base: Path = Path(), cache: DecodedCache | None = None, alone: bool = False
) -> Federation:
    """The federation that `options` describe.

    Images are decoded once and kept in `cache` (by default `decoded_cache()`); the arrays are then memory
    maps.

    Args:
        options: the `[data]` section.
        seed: of partitions, splits and caps.
        base: folder that relative paths start from.
        cache: where decoded images are kept.
        alone: these are one hospital's images, and others may train the classes that it only tests.

    Raises InputError for whatever is wrong with the source; the message names the file and the rows.
    """
    if options.source == "phantoms":
        return _phantoms(options, seed)
    placement = place_records(options, seed, base, alone)
    order = np.concatenate([rows for splits in placement.rows.values() for rows in splits.values()])
    refs = [placement.listing.records[row].image for row in order]
    decoded = (cache or decoded_cache()).decode(refs, options.decoding)
    notes = (*placement.notes, *decoded.notes, *_bad_images(placement, order, decoded, options, alone))
    everyone = _assemble(placement, order, decoded)
    return Federation(
        tuple(client for client in everyone if client.name not in placement.held_out),
        placement.listing.label_space,
        f"{options.source}: {_source_name(options, base)}",
        _modalities(placement.listing),
        notes,
        tuple(client for client in everyone if client.name in placement.held_out),
    )


def _source_name(options: DataOptions, base: Path) -> str:
    if options.path is None:
        return ", ".join(options.mimh.used) if options.source == "mimh" else options.flag or ""
    path = source_path(options.path, base)
    return (path.parent if path.name == "metadata.csv" else path).resolve().name


def source_path(path: str, base: Path) -> Path:
    """`path` as a person wrote it: `~` is the home folder, and a relative path starts from `base`."""
    return base / Path(path).expanduser()


def list_records(options: DataOptions, base: Path = Path()) -> Listing:
    """All records of the source, before sites are chosen; InputError where the source cannot be read."""
    path = None if options.path is None else source_path(options.path, base)
    if options.source == "medmnist":
        return read_medmnist(path, options.flag, options.size)
    if options.source == "mimh":
        return read_mimh(path, options.mimh, options.size)
    if path is None:
        raise InputError(f'data.source = "{options.source}" needs data.path')
    if options.source == "folders":
        return read_folders(path)
    if options.source == "fed-isic":
        folds = None if options.fold_file is None else source_path(options.fold_file, base)
        return read_fed_isic(path, options.split in (None, "official"), folds)
    if options.source == "isic2019":
        return read_isic2019(path, options.isic2019)
    if options.source == "brats":
        return read_brats(path, options.brats, options.slices)
    if options.source == "rsna-ich":
        return read_rsna_ich(path)
    if options.source == "bladder-mri":
        return read_bladder_mri(path, options.slices)
    return read_table(path, options.columns)


def place_records(options: DataOptions, seed: int, base: Path = Path(), alone: bool = False) -> Placement:
    """Client and split of every record, caps applied; nothing is decoded. `alone`: see `read_federation`."""
    listing = keep_sites(list_records(options, base), options.sites)
    if not listing.records:
        raise InputError(f"{listing.origin}: no images are listed")
    for field in ("name", "label"):
        require(field, listing.records, listing.origin, "Fill them in or remove the rows.")
    listing, apart = set_apart(capped_sets(narrowed(listing, options), options, seed), options, seed)
    listing = settle_splits(listing, options)
    clients = assign_clients(listing, options.partition, seed)
    splits, notes = assign_splits(listing, clients, options, seed)
    untrained = _untrained_notes(listing.records, clients, splits)
    listing = in_label_space(replace(listing, records=listing.records + apart.records), options)
    clients, splits = (*clients, *apart.sites), (*splits, *apart.splits)
    if not alone:
        check_trained(listing.records, splits, listing.origin)
    rows, caps = _cap_rows(listing, clients, splits, options, seed)
    places = (*listing.notes, *notes, *caps, *untrained)
    return Placement(listing, clients, splits, rows, places, frozenset(apart.sites))


def keep_sites(listing: Listing, sites: Sequence[str] | None) -> Listing:
    """Only the records of `sites`; InputError naming a site that does not occur and those that do."""
    if sites is None:
        return listing
    known = {record.site for record in listing.records} - {""}
    unknown = [site for site in sites if site not in known]
    if unknown:
        allowed = ", ".join(natural_order(known)) or "none, the source records no sites"
        raise InputError(f"data.sites: {', '.join(unknown)} not in {listing.origin} (allowed: {allowed})")
    kept = tuple(record for record in listing.records if record.site in sites)
    return replace(listing, records=kept, classes=listing.classes or listing.label_space)


def check_trained(records: Sequence[Record], splits: Sequence[SplitName], origin: str) -> None:
    """InputError naming labels and rows of classes that are tested or validated but trained at no client."""
    trained = {record.label for record, split in zip(records, splits, strict=True) if split == "train"}
    lost = [record for record in records if record.label not in trained]
    if lost:
        rows = some(f"{record.label!r} in {record.where}" for record in lost)
        raise InputError(f"{origin}: labels without any training image, seen only in val or test: {rows}")


def _untrained_notes(records: Sequence[Record], clients: Sequence[str], splits: Sequence[SplitName]) -> tuple[str, ...]:
    """A note on classes that a client is tested on but has no training images of."""
    seen = set(zip(clients, splits, (record.label for record in records), strict=True))
    holes = natural_order(
        f"{label} at {client}"
        for client, split, label in seen
        if split == "test" and (client, "train", label) not in seen
    )
    return (f"tested but not trained at the same client: {some(holes)}",) if holes else ()


def _cap_rows(
    listing: Listing, clients: Sequence[str], splits: Sequence[SplitName], options: DataOptions, seed: int
) -> tuple[dict[str, dict[SplitName, NDArray[np.int64]]], tuple[str, ...]]:
    """Positions by client and split after the caps, and notes on what they left out."""
    space = {label: number for number, label in enumerate(listing.label_space)}
    labels = np.array([space[record.label] for record in listing.records], dtype=np.int64)
    owner, part = np.array(clients, dtype=object), np.array(splits, dtype=object)
    rows: dict[str, dict[SplitName, NDArray[np.int64]]] = {}
    notes: list[str] = []
    for client in _client_order(listing, clients, options):
        rows[client] = {}
        for split in SPLITS:
            inside = np.flatnonzero((owner == client) & (part == split))
            kept = inside[_capped(labels[inside], split, client, options, seed)]
            rows[client][split] = kept
            if len(kept) < len(inside):
                notes.append(f"{client}: {split} capped at {len(kept)} of {len(inside)} images")
    return rows, tuple(notes)


def _capped(
    labels: NDArray[np.int64], split: SplitName, client: str, options: DataOptions, seed: int
) -> NDArray[np.int64]:
    limits = {"train": options.max_train_per_client, "val": None, "test": options.max_test_per_client}
    return stratified_cap(labels, limits[split], numpy_stream(seed, f"data/cap/{split}", client=client))


def _client_order(listing: Listing, clients: Iterable[str], options: DataOptions) -> tuple[str, ...]:
    """Sites in the order of the source, other clients in natural order."""
    names = set(clients)
    if options.partition.kind == "site" and listing.sites:
        return tuple(site for site in listing.sites if site in names)
    return natural_order(names)


def _bad_images(
    placement: Placement, order: NDArray[np.int64], decoded: Decoded, options: DataOptions, alone: bool
) -> tuple[str, ...]:
    """A note on what was skipped; InputError where nothing may be or a class loses its training images."""
    if not decoded.bad:
        return ()
    faults = f"{len(decoded.bad)} images cannot be read: {some(decoded.bad.values())}"
    if options.on_bad_image == "error":
        raise InputError(f'{faults}. Mend them, or set data.on_bad_image = "skip"')
    left = [row for position, row in enumerate(order.tolist()) if position not in decoded.bad]
    records = [placement.listing.records[row] for row in left]
    if not alone:
        check_trained(records, [placement.splits[row] for row in left], placement.listing.origin)
    lost = Counter(placement.clients[order[position]] for position in decoded.bad)
    where = ", ".join(f"{client} {count}" for client, count in sorted(lost.items()))
    return (f"skipped ({where}): {faults}",)


def _assemble(placement: Placement, order: NDArray[np.int64], decoded: Decoded) -> tuple[ClientData, ...]:
    """Cut the decoded array, which is in the order of clients and splits, into views."""
    good = np.ones(len(order), dtype=bool)
    good[list(decoded.bad)] = False
    space = {label: number for number, label in enumerate(placement.listing.label_space)}
    kinds = {name: number for number, name in enumerate(_modalities(placement.listing))}
    clients: list[ClientData] = []
    asked = given = 0
    for client, by_split in placement.rows.items():
        parts: dict[SplitName, Samples] = {}
        for split, rows in by_split.items():
            kept = [placement.listing.records[row] for row in rows[good[asked : asked + len(rows)]]]
            parts[split] = _samples(decoded.images[given : given + len(kept)], kept, space, kinds)
            asked, given = asked + len(rows), given + len(kept)
        clients.append(ClientData(client, parts["train"], parts["val"], parts["test"]))
    return tuple(clients)


def _samples(
    images: NDArray[np.uint8], records: Sequence[Record], space: dict[str, int], kinds: dict[str, int]
) -> Samples:
    return samples(
        images,
        [space[record.label] for record in records],
        [record.name for record in records],
        [kinds[record.modality or "image"] for record in records],
    )


def _modalities(listing: Listing) -> tuple[str, ...]:
    """Those that occur, in the order of the source or else in natural order."""
    found = {record.modality or "image" for record in listing.records}
    return tuple(name for name in listing.modalities if name in found) or natural_order(found)


def _phantoms(options: DataOptions, seed: int) -> Federation:
    """Phantoms with the sites and caps of `options`."""
    from wardround.data.phantoms import phantom_federation

    made = phantom_federation(options.phantoms, options.stored_size, seed, options.channels)
    _need_sites("sites", options.sites or (), made.names)
    wanted = [client for client in made.clients if options.sites is None or client.name in options.sites]
    _need_sites("held_out", options.held_out, [client.name for client in wanted])
    apart = [for_testing(client) for client in wanted if client.name in options.held_out]
    ours = [client for client in wanted if client.name not in options.held_out]
    ours, dealt = (ours, ()) if options.partition.kind == "site" else redealt(ours, made, options.partition, seed)
    whole = [*ours, *apart]
    capped = tuple(_cap_client(client, options, seed) for client in whole)
    notes = tuple(
        f"{old.name}: {split} capped at {len(new.split(split))} of {len(old.split(split))} images"
        for old, new in zip(whole, capped, strict=True)
        for split in SPLITS
        if len(new.split(split)) < len(old.split(split))
    )
    train, held_out = capped[: len(ours)], capped[len(ours) :]
    return replace(made, clients=train, notes=(*made.notes, *dealt, *notes), held_out=held_out)


def _need_sites(key: str, names: Iterable[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"data.{key}: no phantom site {some(unknown)} (allowed: {', '.join(known)})")


def _cap_client(client: ClientData, options: DataOptions, seed: int) -> ClientData:
    def _part(split: SplitName) -> Samples:
        whole = client.split(split)
        rows = _capped(whole.labels, split, client.name, options, seed)
        return whole if len(rows) == len(whole) else whole.take(rows)

    return replace(client, train=_part("train"), test=_part("test"))
