"""How the clients of a federation differ, in one report: `skew.json` and its form for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.federation import Federation, Samples, SplitName
from wardround.errors import InputError
from wardround.seeds import numpy_stream
from wardround.skew.concept import disagreement_matrix
from wardround.skew.labels import (
    effective_number,
    imbalance,
    jensen_shannon_matrix,
    label_distribution,
    quantity_shares,
)
from wardround.skew.mmd import (
    VARIANTS,
    Bandwidth,
    Estimator,
    Features,
    Variant,
    global_gamma,
    mmd_matrices,
    permutation_p_value,
    triangle_violations,
)
from wardround.skew.same_labels import Labels, same_label_matrix

if TYPE_CHECKING:
    import rich.console
    import rich.table

FeaturesOf = Callable[[Samples], Features]

NOTES = (
    "The MMD compares all features of two clients, so a difference in labels shows in it too; the distance at "
    "equal labels leaves that out.",
    "The p-values take images as independent and are not corrected for the number of pairs.",
    "Concept disagreement is an indication; compare it with the diagonal, which is chance within one client.",
)
WIDEST = 12  # clients that a matrix on a terminal has room for


def analyse_skew(
    federation: Federation,
    features_of: FeaturesOf,
    *,
    seed: int,
    max_images: int = 500,
    permutations: int = 500,
    estimator: Estimator = "biased",
    squared: bool = False,
    bandwidth: Bandwidth = "global",
    split: SplitName = "train",
) -> dict[str, Any]:
    """The content of `skew.json`: quantity, label, feature and concept skew of one split.

    Args:
        federation: the clients.
        features_of: pooled features `(N, d)` of samples, from a network that no client has trained.
        seed: of the choice of images, the permutations and the halves.
        max_images: images that the features of a client are computed from, at most; chosen at random.
        permutations: of the two-sample test of each pair of clients.
        estimator: of the MMD, see `mmd.Variant`.
        squared: MMD^2 instead of its root.
        bandwidth: one for all pairs, or one for each.
        split: which images.

    Raises:
        InputError: `max_images` is below 2, or `permutations` below 1.
    """
    if max_images < 2 or permutations < 1:
        raise InputError(
            f"max_images must be at least 2 and permutations at least 1, found {max_images} and {permutations}"
        )
    chosen = {name: choose_images(federation, name, split, max_images, seed) for name in federation.names}
    features = _all_features(chosen, features_of)
    labels = {name: samples.labels for name, samples in chosen.items()}
    variant = Variant(estimator, squared, bandwidth)
    return {
        "source": federation.source,
        "split": split,
        "seed": seed,
        "classes": list(federation.classes),
        "clients": list(federation.names),
        "quantity": _quantity(federation, split),
        "label": _label(federation, split),
        "feature": _feature(features, labels, variant, permutations, seed),
        "concept": {"disagreement": plain(disagreement_matrix(features, labels, seed))},
        "notes": list(NOTES),
    }


def choose_images(federation: Federation, client: str, split: SplitName, most: int, seed: int) -> Samples:
    """At most `most` of a client's images, drawn at random, in their order."""
    whole = federation.client(client).split(split)
    if len(whole) <= most:
        return whole
    rng = numpy_stream(seed, "skew-images", client=client)
    return whole.take(np.sort(rng.choice(len(whole), size=most, replace=False)))


def _all_features(chosen: dict[str, Samples], features_of: FeaturesOf) -> dict[str, Features]:
    """Each client's features `(N, d)`; `(0, d)` for a client without images, without asking the network."""
    found = {name: np.asarray(features_of(samples)) for name, samples in chosen.items() if len(samples)}
    for name, rows in found.items():
        if rows.ndim != 2 or len(rows) != len(chosen[name]) or not np.isfinite(rows).all():
            raise ValueError(f"features of {name!r} must be finite and ({len(chosen[name])}, d): {rows.shape}")
    width = next((rows.shape[1] for rows in found.values()), 0)
    return {name: found.get(name, np.zeros((0, width))) for name in chosen}


def _quantity(federation: Federation, split: SplitName) -> dict[str, Any]:
    """How many images each client has, and the number of equal clients that would be as uneven."""
    counts = federation.counts(split)
    shares = quantity_shares(counts)
    return {
        "images": counts.sum(axis=1).tolist(),
        "shares": plain(shares),
        "effective_clients": plain(effective_number(shares)),
    }


def _label(federation: Federation, split: SplitName) -> dict[str, Any]:
    """How each client's images spread over the classes, and how far apart the clients are in that."""
    counts = federation.counts(split)
    shares = label_distribution(counts)
    return {
        "counts": counts.tolist(),
        "distribution": plain(shares),
        "effective_classes": plain(effective_number(shares)),
        "imbalance": plain(imbalance(counts)),
        "jensen_shannon": plain(jensen_shannon_matrix(shares)),
        "absent": [[federation.classes[c] for c in np.flatnonzero(row == 0)] for row in counts],
    }


def _feature(
    features: dict[str, Features], labels: dict[str, Labels], variant: Variant, permutations: int, seed: int
) -> dict[str, Any]:
    """The MMD matrix, at equal labels too, its p-values, and the triangle violations of every variant."""
    matrices = mmd_matrices(features)
    usable = [rows for rows in features.values() if len(rows)]
    return {
        "images": [len(rows) for rows in features.values()],
        "dimension": next((rows.shape[1] for rows in usable), 0),
        "estimator": variant.estimator,
        "squared": variant.squared,
        "bandwidth": variant.bandwidth,
        "gamma": global_gamma(usable) if usable else None,
        "mmd": plain(matrices[variant]),
        "same_labels": plain(same_label_matrix(features, labels)),
        "p_values": plain(_p_values(features, permutations, seed)),
        "permutations": permutations,
        "ordered_triples": len(usable) * (len(usable) - 1) * (len(usable) - 2),
        "triangle_violations": {other.label: triangle_violations(matrices[other]) for other in VARIANTS},
    }


def _p_values(features: dict[str, Features], permutations: int, seed: int) -> NDArray[np.float64]:
    """The p-value of each pair `(K, K)`; NaN on the diagonal and where a client has no images."""
    names = list(features)
    found = np.full((len(names), len(names)), np.nan)
    for i, one in enumerate(names):
        for j in range(i + 1, len(names)):
            x, y = features[one], features[names[j]]
            if len(x) and len(y):
                value = permutation_p_value(x, y, permutations, seed, client=f"{one}|{names[j]}")
                found[i, j] = found[j, i] = value
    return found


def plain(values: NDArray[np.float64]) -> Any:
    """Nested lists with `None` for NaN, as JSON wants them."""
    if values.ndim:
        return [plain(part) for part in values]
    return None if np.isnan(values) else float(values)


def skew_text(skew: dict[str, Any]) -> rich.console.Group:
    """`skew.json` for a terminal: one table of clients, then the matrices (or their extremes, if large)."""
    import rich.console

    names = skew["clients"]
    parts = [
        _client_table(skew),
        *matrix_parts("Label divergence (Jensen-Shannon, bits)", names, skew["label"]["jensen_shannon"]),
        *matrix_parts(f"Feature distance ({_mmd_label(skew)})", names, skew["feature"]["mmd"]),
        *matrix_parts("Feature distance at equal labels", names, skew["feature"]["same_labels"]),
        *matrix_parts("Two-sample p-value", names, skew["feature"]["p_values"]),
        *matrix_parts("Concept disagreement (indicative)", names, skew["concept"]["disagreement"]),
    ]
    return rich.console.Group(*parts, *skew["notes"], *_recommendation(skew))


def _recommendation(skew: dict[str, Any]) -> list[str]:
    """What the measurements suggest, a sentence a line, where they have been read that way."""
    from rich.markup import escape

    sentences = skew.get("recommendation", {}).get("text", [])
    return ["", "[bold]What to try first[/bold]", *map(escape, sentences)] if sentences else []


def _mmd_label(skew: dict[str, Any]) -> str:
    """What kind of MMD the matrix holds."""
    feature = skew["feature"]
    return "MMD, " + Variant(feature["estimator"], feature["squared"], feature["bandwidth"]).label


def _client_table(skew: dict[str, Any]) -> rich.table.Table:
    """One row a client: images, share, effective number of classes, imbalance, absent classes."""
    import rich.table
    from rich.markup import escape

    table = rich.table.Table(title=f"{escape(skew['source'])}, {skew['split']} images")
    for heading in ("client", "images", "share", "effective classes", "imbalance", "absent classes"):
        table.add_column(heading, justify="left" if heading in ("client", "absent classes") else "right")
    quantity, label = skew["quantity"], skew["label"]
    for i, name in enumerate(skew["clients"]):
        share = shown(quantity["shares"][i], ".1%")
        effective, uneven = shown(label["effective_classes"][i], ".2f"), shown(label["imbalance"][i], ".1f")
        absent = escape(", ".join(label["absent"][i]) or "none")
        table.add_row(escape(name), str(quantity["images"][i]), share, effective, uneven, absent)
    return table


def matrix_parts(title: str, names: Sequence[str], matrix: list[list[float | None]]) -> list[Any]:
    """A matrix as a table where it fits, else a line with its smallest, median and largest pair."""
    if len(names) > WIDEST:
        return [_extremes(title, names, matrix)]
    import rich.table
    from rich.markup import escape

    table = rich.table.Table()
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for name, row in zip(names, matrix, strict=True):
        table.add_row(escape(name), *(shown(value, ".3f") for value in row))
    return [f"[bold]{escape(title)}[/bold]", table]


def _extremes(title: str, names: Sequence[str], matrix: list[list[float | None]]) -> str:
    """`title: median 0.2, from 0.1 (a, b) to 0.4 (c, d)` over the pairs of different clients."""
    from rich.markup import escape

    pairs = [
        (value, f"{names[i]}, {names[j]}")
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
        if value is not None and i < j
    ]
    if not pairs:
        return f"{title}: no pair of clients can be compared"
    (low, nearest), (high, furthest) = min(pairs), max(pairs)
    median = np.median([value for value, _ in pairs])
    return escape(f"{title}: median {median:.3f}, from {low:.3f} ({nearest}) to {high:.3f} ({furthest})")


def shown(value: float | None, form: str) -> str:
    """A number in the given form, or a dash where it is undefined."""
    return "–" if value is None else format(value, form)
