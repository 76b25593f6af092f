"""Which client each record belongs to: its site, the value of a column, or a random deal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wardround.data.options import PartitionOptions
from wardround.data.partitioners import KINDS, Plan
from wardround.data.records import Listing, require, some
from wardround.data.splits import commonest, group_codes
from wardround.errors import InputError, suggestion
from wardround.seeds import numpy_stream

_REMEDY = (
    'Fill it in, or make clients from the images, for example partition = {kind = "dirichlet", clients = 4,'
    " alpha = 0.5} (kinds: column, modality, dirichlet, dirichlet-hsu, quantity)."
)
_ATTEMPTS = 1000


def assign_clients(listing: Listing, options: PartitionOptions, seed: int) -> tuple[str, ...]:
    """The client of every record, as a name.

    A group is never divided between clients by a random deal. Where records have splits, each split is dealt
    by the same plan, so that a client's test images are like its training images. InputError where a site or
    a column is empty or unknown, or where `min_size` or `min_test_size` cannot be met.
    """
    records = listing.records
    if options.kind == "site":
        require("site", records, listing.origin, _REMEDY)
        return tuple(record.site for record in records)
    if options.kind == "modality":
        require("modality", records, listing.origin, 'partition.kind = "modality" needs one in every row.')
        return tuple(record.modality for record in records)
    if options.kind == "column":
        return _by_column(listing, options.column or "")
    width = len(str(options.clients - 1))
    return tuple(f"client-{number:0{width}d}" for number in _deal(listing, options, seed))


def _by_column(listing: Listing, column: str) -> tuple[str, ...]:
    present = listing.records[0].cells if listing.records else {}
    if column not in present:
        raise InputError(f"{listing.origin}: partition.column {column!r} is no column{suggestion(column, present)}")
    empty = [record.where for record in listing.records if not record.cells[column]]
    if empty:
        raise InputError(f"{listing.origin}: {len(empty)} rows have no {column}: {some(empty)}")
    return tuple(record.cells[column] for record in listing.records)


def _deal(listing: Listing, options: PartitionOptions, seed: int) -> NDArray[np.int64]:
    """The number of every record's client; redrawn until each has `min_size` images to train, `min_test_size` to test.

    A split that the source does not give is drawn later, from what is to train here.
    """
    labels, splits, groups = codes(listing)
    kept = {"train": options.min_size, "test": options.min_test_size}
    inside = {name: np.array([(record.split or "train") == name for record in listing.records]) for name in kept}
    if options.min_test_size and not inside["test"].any():
        raise InputError(f"{listing.origin}: partition.min_test_size needs images that are said to be for testing")
    rng = numpy_stream(seed, "data/partition")
    draw, _ = KINDS[options.kind]
    counts = np.bincount(labels, minlength=len(listing.label_space))
    best = dict.fromkeys(kept, -1)
    for _ in range(_ATTEMPTS):
        plan = draw(counts, options.clients, options.alpha, rng)
        clients = _deal_groups(options.kind, plan, labels, splits, groups, rng)
        least = {name: _smallest(clients[rows], options.clients) for name, rows in inside.items()}
        best = {name: max(best[name], least[name]) for name in kept}
        if all(least[name] >= kept[name] for name in kept):
            return clients
    raise InputError(
        f"partition: in {_ATTEMPTS} draws the smallest client had at most {best['train']} training and {best['test']}"
        f" test images, min_size asks for {options.min_size} and min_test_size for {options.min_test_size}; lower them"
        " or clients, or raise alpha"
    )


def _smallest(clients: NDArray[np.int64], number: int) -> int:
    """How many records the client with the fewest has."""
    return int(np.bincount(clients, minlength=number).min())


def _deal_groups(
    kind: str,
    plan: Plan,
    labels: NDArray[np.int64],
    splits: NDArray[np.int64],
    groups: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Deal the groups of each split by one plan; the client of every record `(N,)`."""
    _, deal = KINDS[kind]
    clients = np.empty(len(labels), dtype=np.int64)
    for split in np.unique(splits):
        rows = np.flatnonzero(splits == split)
        _, member_of = np.unique(groups[rows], return_inverse=True)
        unit_labels = commonest(labels[rows], member_of, int(member_of.max()) + 1)
        owner = np.empty(len(unit_labels), dtype=np.int64)
        for client, units in enumerate(deal(unit_labels, plan, rng)):
            owner[units] = client
        clients[rows] = owner[member_of]
    return clients


def codes(listing: Listing) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Label, split and group of every record as integers `(N,)`."""
    space = {label: number for number, label in enumerate(listing.label_space)}
    labels = np.array([space[record.label] for record in listing.records], dtype=np.int64)
    return (
        labels,
        _numbers([r.split for r in listing.records]),
        group_codes([r.group for r in listing.records]),
    )


def _numbers(words: list[str]) -> NDArray[np.int64]:
    order = {word: number for number, word in enumerate(sorted(set(words)))}
    return np.array([order[word] for word in words], dtype=np.int64)
