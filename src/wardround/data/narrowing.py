"""Keep the sites that are large enough, and the classes that every site has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from wardround.data.options import DataOptions, Source
from wardround.data.records import Listing, Record, natural_order, require
from wardround.errors import InputError

COMMON_BY_DEFAULT: frozenset[Source] = frozenset({"isic2019"})


def narrowed(listing: Listing, options: DataOptions) -> Listing:
    """The listing without sites below `min_site_images`, then without classes that a site lacks (`common_classes`).

    A note names what was left out. Raises InputError where records have no site, or nothing is left.
    """
    if options.min_site_images is not None:
        listing = _large_sites(listing, options.min_site_images, options.held_out)
    wanted = options.common_classes
    if wanted or (wanted is None and options.source in COMMON_BY_DEFAULT):
        listing = _common_classes(listing, options)
    return listing


def _large_sites(listing: Listing, least: int, held_out: Sequence[str]) -> Listing:
    """Sites that train must be large enough; those that only judge may be small."""
    require("site", listing.records, listing.origin, "data.min_site_images counts the images of every site.")
    sizes = Counter(record.site for record in listing.records)
    small = [site for site in natural_order(sizes) if sizes[site] < least and site not in held_out]
    if len(small) == len(sizes):
        raise InputError(
            f"{listing.origin}: no site has {least} images (data.min_site_images): {_counted(small, sizes)}"
        )
    kept = tuple(record for record in listing.records if record.site not in small)
    note = f"sites with fewer than {least} images left out: {_counted(small, sizes)}"
    notes = listing.notes + ((note,) if small else ())
    return replace(listing, records=kept, classes=listing.label_space, notes=notes)


def _common_classes(listing: Listing, options: DataOptions) -> Listing:
    require("site", listing.records, listing.origin, "data.common_classes compares the classes of the sites.")
    common = common_labels(_trained(listing.records, options))
    if not common:
        raise InputError(f"{listing.origin}: no class has training images at every site (data.common_classes)")
    sizes = Counter(record.label for record in listing.records)
    lost = [label for label in listing.label_space if label not in common]
    kept = tuple(record for record in listing.records if record.label in common or not record.label)
    note = f"classes that some site has no training image of left out: {_counted(lost, sizes)}"
    classes = tuple(label for label in listing.label_space if label in common)
    return replace(listing, records=kept, classes=classes, notes=listing.notes + ((note,) if lost else ()))


def common_labels(records: Iterable[Record]) -> set[str]:
    """The labels that every site among the records has."""
    by_site: dict[str, set[str]] = {}
    for record in records:
        by_site.setdefault(record.site, set()).add(record.label)
    return set.intersection(*by_site.values()) - {""} if by_site else set()


def _trained(records: Sequence[Record], options: DataOptions) -> list[Record]:
    """The records that show which classes a site has: those that train or may yet, and those of held-out sites.

    Where a split is drawn, a class's first group at a client always trains (`grouped_split`).
    """
    drawn = options.split in ("group", "lesion") or not any(record.split for record in records)
    return [record for record in records if drawn or record.split == "train" or record.site in options.held_out]


def _counted(words: Iterable[str], sizes: Counter[str]) -> str:
    return ", ".join(f"{word} ({sizes[word]})" for word in words)
