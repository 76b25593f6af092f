"""Which split each record belongs to: as the source says, or drawn afresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wardround.data.clients import codes
from wardround.data.federation import SPLITS, SplitName
from wardround.data.options import DataOptions
from wardround.data.records import Listing, some
from wardround.data.splits import TEST, VAL, grouped_split
from wardround.errors import InputError
from wardround.seeds import numpy_stream

_FRESH_VAL = 0.1


def settle_splits(listing: Listing, options: DataOptions) -> Listing:
    """The listing with every split valid, or with none where a fresh split is wanted or the source has none.

    InputError naming the rows whose split is none of train, val and test.
    """
    if options.split in ("group", "lesion") or not any(record.split for record in listing.records):
        _refuse_missing_column(listing, options)
        return replace(listing, records=tuple(replace(record, split="") for record in listing.records))
    strange = [f"{record.where} {record.split!r}" for record in listing.records if record.split not in SPLITS]
    if strange:
        raise InputError(
            f"{listing.origin}: {len(strange)} rows have a split that is none of {', '.join(SPLITS)}:"
            f" {some(strange)}."
            ' Correct them, or set data.split = "group" to draw a fresh split'
        )
    return listing


def _refuse_missing_column(listing: Listing, options: DataOptions) -> None:
    if options.split in ("column", "official"):
        raise InputError(f'{listing.origin}: data.split = "{options.split}", but no row says its split')


def assign_splits(
    listing: Listing, clients: Sequence[str], options: DataOptions, seed: int
) -> tuple[tuple[SplitName, ...], tuple[str, ...]]:
    """The split of every record of a settled listing, and notes on what was drawn.

    Draws are stratified by client and class and keep groups whole. Where the source has splits but no test or
    no val, that part is taken out of train (`test_fraction`, `val_fraction`).
    """
    if not any(record.split for record in listing.records):
        val = _FRESH_VAL if options.val_fraction is None else options.val_fraction
        drawn = _draw(listing, clients, np.arange(len(listing.records)), val, options.test_fraction, seed)
        shares = f"val {val:g}, test {options.test_fraction:g} of each client and class"
        return tuple(SPLITS[code] for code in drawn), (f"split drawn here, groups whole: {shares}",)
    splits = np.array([SPLITS.index(record.split) for record in listing.records])
    notes: list[str] = []
    for code, share in ((TEST, options.test_fraction), (VAL, options.val_fraction or 0.0)):
        if share > 0 and not np.any(splits == code):
            rows = np.flatnonzero(splits == 0)
            parts = (share, 0.0) if code == VAL else (0.0, share)
            splits[rows] = _draw(listing, clients, rows, *parts, seed)
            notes.append(f"the source has no {SPLITS[code]} split: {share:g} of train was taken for it, groups whole")
    return tuple(SPLITS[code] for code in splits), tuple(notes)


def _draw(
    listing: Listing, clients: Sequence[str], rows: NDArray[np.int64], val: float, test: float, seed: int
) -> NDArray[np.int64]:
    labels, _, groups = codes(listing)
    order = {client: number for number, client in enumerate(sorted(set(clients)))}
    strata = np.array([order[client] for client in clients], dtype=np.int64) * (labels.max(initial=0) + 1) + labels
    stream = numpy_stream(seed, f"data/split/{val:g}/{test:g}")
    return grouped_split(strata[rows], groups[rows], val, test, stream)
