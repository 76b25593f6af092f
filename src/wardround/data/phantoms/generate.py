"""From options to a federation of phantoms: who has which pictures, and how each one is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.data.federation import ClientData, Federation, Samples, SplitName
from wardround.data.phantoms.blood import BLOOD
from wardround.data.phantoms.dermoscopy import DERMOSCOPY
from wardround.data.phantoms.family import Family
from wardround.data.phantoms.fundus import FUNDUS
from wardround.data.phantoms.histology import HISTOLOGY
from wardround.data.phantoms.mixture import strengths
from wardround.data.phantoms.notes import notes
from wardround.data.phantoms.options import PhantomOptions
from wardround.data.phantoms.scanner import expose, picture_traits, site_traits
from wardround.data.phantoms.skew import class_shares, exchange_levels, label_sequence, partner, site_sizes
from wardround.data.phantoms.xray import XRAY
from wardround.errors import InputError
from wardround.seeds import numpy_stream

FAMILIES = {family.name: family for family in (DERMOSCOPY, FUNDUS, XRAY, HISTOLOGY, BLOOD)}
SMALLEST_SIDE = 16


@dataclass(frozen=True)
class Site:
    """All that sets one site apart.

    `modality` is the family's place among the federation's; `shares` `(classes,)` and `exchange` `(pairs,)` are
    those of `skew`, `traits` those of `scanner`.
    """

    name: str
    family: Family
    modality: int
    shares: NDArray[np.float64]
    exchange: NDArray[np.float64]
    traits: NDArray[np.float64]
    sizes: dict[SplitName, int]


def families(options: PhantomOptions) -> tuple[Family, ...]:
    """The families that the federation's sites have, in order."""
    if options.family != "mixed":
        return (FAMILIES[options.family],)
    return tuple(FAMILIES.values())[: options.clients]


def class_names(options: PhantomOptions) -> tuple[str, ...]:
    """The label space: a family's classes, or the union of those of all families where they are mixed."""
    kinds = families(options)
    prefix = len(kinds) > 1
    return tuple(f"{k.name}: {c}" if prefix else c for k in kinds for c in k.classes[: options.classes])


def sites(options: PhantomOptions, seed: int) -> tuple[Site, ...]:
    """The sites in order, before any picture is made."""
    count, kinds = options.clients, families(options)
    train = site_sizes(options.train_per_client, count, options.quantity_skew, seed)
    val = site_sizes(options.val_per_client, count, options.quantity_skew, seed)
    levels = exchange_levels(count, options.classes, options.concept_skew)
    return tuple(
        Site(
            name=f"site-{k + 1:02d}",
            family=kinds[k % len(kinds)],
            modality=k % len(kinds),
            shares=class_shares(k, options.classes, options.label_skew, seed),
            exchange=levels[k],
            traits=site_traits(k, seed),
            sizes={"train": int(train[k]), "val": int(val[k]), "test": options.test_per_client},
        )
        for k in range(count)
    )


def shown_structure(site: Site, label: int, clarity: float) -> int:
    """The structure that a picture with `label` shows: its look-alike's where the site exchanges the two."""
    twin = partner(label, len(site.shares))
    return label if twin is None or clarity >= site.exchange[label // 2] else twin


def picture(site: Site, label: int, options: PhantomOptions, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One scan `(size, size, 3)`, or `(size, size, 1)` of a grey family, all of whose draws come from `rng`."""
    clarity = rng.random()
    structure = shown_structure(site, label, clarity)
    strength = strengths(rng, site.family, structure, options.classes, options.difficulty, clarity)
    scene = site.family.paint(rng, size, strength)
    return expose(rng, scene, picture_traits(rng, site.traits, options.feature_skew), site.family.grey)


def in_channels(scan: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """A scan `(S, S, 1 or 3)` with `channels` channels; grey is the usual luma."""
    if channels == 1 and scan.shape[-1] == 3:
        luma = scan @ np.array([0.299, 0.587, 0.114], np.float32)
        return (luma + 0.5).astype(np.uint8)[..., None]
    return np.broadcast_to(scan, (*scan.shape[:2], channels))


def split(site: Site, name: SplitName, options: PhantomOptions, size: int, seed: int, channels: int) -> Samples:
    """One split of a site. Picture i has its own stream, so it stays the same however many others there are."""
    count = site.sizes[name]
    labels = label_sequence(site.shares, count)
    images = np.empty((count, size, size, channels), np.uint8)
    for i, label in enumerate(labels.tolist()):
        rng = numpy_stream(seed, f"phantoms/{name}", i, site.name)
        images[i] = in_channels(picture(site, label, options, size, rng), channels)
    names = tuple(f"phantom/{site.family.name}/{site.name}/{name}/{i:05d}" for i in range(count))
    modality = np.full(count, site.modality, np.int64)
    return Samples(images, labels + site.modality * options.classes, names, modality)


def client_data(site: Site, options: PhantomOptions, size: int, seed: int, channels: int) -> ClientData:
    """All three splits of a site."""
    train, val, test = (split(site, name, options, size, seed, channels) for name in site.sizes)
    return ClientData(site.name, train, val, test)


def phantom_federation(options: PhantomOptions, image_size: int, seed: int, channels: int = 3) -> Federation:
    """A federation of images made on the spot, whose differences between sites are those that the dials ask for.

    Args:
        options: family, sizes, dials and difficulty.
        image_size: side S of the square images, in pixels, at least 16.
        seed: same options and seed, same bytes.
        channels: 3 (grey families repeat theirs) or 1.

    Raises:
        InputError: where `image_size` or `channels` is out of range.
    """
    if image_size < SMALLEST_SIDE:
        raise InputError(f"image_size = {image_size}: phantoms need at least {SMALLEST_SIDE} pixels a side")
    if channels not in (1, 3):
        raise InputError(f"channels = {channels}: phantoms have 1 or 3")
    plan = sites(options, seed)
    kinds = families(options)
    return Federation(
        clients=tuple(client_data(site, options, image_size, seed, channels) for site in plan),
        classes=class_names(options),
        source=f"phantoms ({options.family})",
        modalities=tuple(kind.name for kind in kinds),
        notes=notes(options),
    )
