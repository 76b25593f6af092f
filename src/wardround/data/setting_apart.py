"""Sites that never train: their images judge what the others learned together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wardround.data.clients import codes
from wardround.data.federation import SplitName
from wardround.data.options import DataOptions
from wardround.data.records import Listing, Record, natural_order, some
from wardround.data.splits import TEST, grouped_split
from wardround.errors import InputError
from wardround.seeds import numpy_stream

DRAWN = "held-out"  # what the site is called that is drawn from all images


@dataclass(frozen=True)
class Apart:
    """The records of held-out sites.

    Attributes:
        records: all of them.
        sites: for each the site that it belongs to.
    """

    records: tuple[Record, ...] = ()
    sites: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """For each record its split: all are for testing."""
        return tuple("test" for _ in self.records)


def set_apart(listing: Listing, options: DataOptions, seed: int) -> tuple[Listing, Apart]:
    """The records that take part in the federation, and those that are held out.

    Raises:
        InputError: a site of `data.held_out` does not occur, nothing is left to train on, or a patient is on both
            sides.
    """
    sites = _drawn(listing, options.held_out_share, seed) if options.held_out_share else _named(listing, options)
    apart = Apart(
        tuple(record for record, site in zip(listing.records, sites, strict=True) if site),
        tuple(site for site in sites if site),
    )
    rest = tuple(record for record, site in zip(listing.records, sites, strict=True) if not site)
    if not rest:
        raise InputError(f"{listing.origin}: data.held_out leaves no image to train on")
    _refuse_shared_groups(rest, apart, listing.origin)
    return replace(listing, records=rest, classes=listing.classes or listing.label_space), apart


def _named(listing: Listing, options: DataOptions) -> list[str]:
    """For every record the held-out site that it belongs to; empty for none."""
    owners = [_owner(record, options) for record in listing.records]
    unknown = [name for name in options.held_out if name not in owners]
    if unknown:
        allowed = some(natural_order(set(owners) - {""}), 20) or "none, the source records no sites"
        raise InputError(f"data.held_out: {', '.join(unknown)} not in {listing.origin} (allowed: {allowed})")
    return [owner if owner in options.held_out else "" for owner in owners]


def _owner(record: Record, options: DataOptions) -> str:
    """What `data.held_out` may call the client of a record: its site, or the value of the partition's column."""
    if options.partition.kind == "modality":
        return record.modality
    if options.partition.kind == "column":
        return record.cells.get(options.partition.column or "", "")
    return record.site


def _drawn(listing: Listing, share: float, seed: int) -> list[str]:
    """A share of every class, groups whole; the same whatever the clients are."""
    labels, _, groups = codes(listing)
    drawn = grouped_split(labels, groups, 0.0, share, numpy_stream(seed, f"data/held out/{share:g}"))
    return [DRAWN if code == TEST else "" for code in np.asarray(drawn)]


def _refuse_shared_groups(rest: tuple[Record, ...], apart: Apart, origin: str) -> None:
    ours = {record.group for record in rest} - {""}
    both = natural_order(ours & {record.group for record in apart.records})
    if both:
        raise InputError(
            f"{origin}: held-out images are of patients or lesions that train elsewhere: {some(both)}. Hold out "
            "another site, or remove those rows"
        )
