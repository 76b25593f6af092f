"""How far apart the clients' features are before training and after it, of one method or of several.

How before and after are comparable: the two matrices are of the same images, with the same kernel and the same rule
for its width, gamma_0 = 1 / median squared distance over all clients' features. Each is so measured against the
typical distance between two images *in its own feature space*. A network that multiplies all its features by a
constant, turns or shifts them leaves its matrix as it is; only how much of the spread lies between clients counts.
Both are between 0 and the square root of 2, and as the images are as many, chance lifts both nearly alike above 0.
What training does to the spread within a client does count: classes that move apart make the same distance between
clients smaller in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from wardround.skew.analyse import WIDEST, plain, shown
from wardround.skew.mmd import Features, Floats, Variant, mmd_matrices
from wardround.skew.same_labels import Labels, same_label_matrix

if TYPE_CHECKING:
    import rich.console
    import rich.table

NOTES = (
    "Each matrix is in units of its own features' typical distance: to shrink all features alike gains nothing.",
    "Training changes distances whatever the method: compare methods with each other, not only before with after.",
    "Each client's features come from its own network: clients that share little differ in networks, not only images.",
)
ALONE = "isolated"  # the label of training without any sharing
LEAST_CHANGE = 0.005  # what two decimals cannot show is no change


@dataclass(frozen=True)
class Distances:
    """Feature distances between every two clients `(K, K)`.

    Attributes:
        plain: MMD of all features, as the variant asks.
        same_labels: at equal labels, see `skew.same_labels`.
    """

    plain: Floats
    same_labels: Floats


def distances(features: Mapping[str, Features], labels: Mapping[str, Labels], variant: Variant) -> Distances:
    """Both matrices, from each client's features `(N_k, d)` and labels `(N_k,)`."""
    return Distances(mmd_matrices(features, (variant,))[variant], same_label_matrix(features, labels))


@dataclass
class Course:
    """One method before and after training, over its runs.

    Attributes:
        label: what tables call it.
        before, after: of each run.
    """

    label: str
    before: list[Distances] = field(default_factory=list)
    after: list[Distances] = field(default_factory=list)


def describe(course: Course) -> dict[str, Any]:
    """One entry of `systems` in `trained.json`: mean matrices over the runs, and what the change comes to."""
    matrices = {
        when: {kind: np.mean([getattr(one, kind) for one in found], axis=0) for kind in ("plain", "same_labels")}
        for when, found in (("before", course.before), ("after", course.after))
    }
    return {
        "label": course.label,
        "runs": len(course.after),
        "before": plain(matrices["before"]["plain"]),
        "after": plain(matrices["after"]["plain"]),
        "same_labels_before": plain(matrices["before"]["same_labels"]),
        "same_labels_after": plain(matrices["after"]["same_labels"]),
        "change": _change(matrices["before"]["plain"], matrices["after"]["plain"]),
        "same_labels_change": _change(matrices["before"]["same_labels"], matrices["after"]["same_labels"]),
    }


def _change(before: Floats, after: Floats) -> dict[str, Any]:
    """Mean distance before and after over the pairs that are known in both, and how many came nearer or moved apart."""
    upper = np.triu_indices(len(before), 1)
    was, now = before[upper], after[upper]
    known = np.isfinite(was) & np.isfinite(now)
    was, now = was[known], now[known]
    return {
        "before": float(was.mean()) if len(was) else None,
        "after": float(now.mean()) if len(now) else None,
        "pairs": len(was),
        "nearer": int((now < was - LEAST_CHANGE).sum()),
        "further": int((now > was + LEAST_CHANGE).sum()),
    }


def trained_text(found: Mapping[str, Any]) -> rich.console.Group:
    """`trained.json` for a terminal: the pairs of each method, then one table of means, and what to beware of."""
    import rich.console

    fit = len(found["clients"]) <= WIDEST
    tables = [_pair_table(found, system) for system in found["systems"]] if fit else []
    sentences = [sentence(system) for system in found["systems"]]
    return rich.console.Group(*tables, _mean_table(found), *sentences, *found["notes"])


def sentence(system: Mapping[str, Any]) -> str:
    """What training did to one method's distances, in words."""
    change = system["change"]
    if change["before"] is None or change["after"] is None:
        return f"{system['label']}: no pair of clients can be compared."
    gap = change["after"] - change["before"]
    word = "stayed" if abs(gap) <= LEAST_CHANGE else "shrank" if gap < 0 else "grew"
    return (
        f"{system['label']}: the mean distance {word}, {change['before']:.3f} before and {change['after']:.3f} after "
        f"training; {change['nearer']} of {change['pairs']} pairs came nearer, {change['further']} moved apart."
    )


def beyond_training(systems: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sharing or alignment adds to training alone, in a sentence, where isolated training is among the systems."""
    after = {system["label"]: system["change"]["after"] for system in systems}
    alone = after.pop(ALONE, None)
    others = [
        f"{label} {value - alone:+.3f}" for label, value in after.items() if alone is not None and value is not None
    ]
    if not others:
        return []
    return [
        f"Training alone, without sharing or alignment, ends at a mean distance of {alone:.3f}. Compared with that: "
        f"{', '.join(others)}."
    ]


def _pair_table(found: Mapping[str, Any], system: Mapping[str, Any]) -> rich.table.Table:
    """One row a pair of clients: distance before, after, and the same at equal labels."""
    import rich.table
    from rich.markup import escape

    headings = ("pair", "before", "after", "equal labels, before", "equal labels, after")
    table = rich.table.Table(title=f"{escape(system['label'])}, {found['split']} images", title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "pair" else "right")
    for (i, one), (j, other) in combinations(enumerate(found["clients"]), 2):
        values = (system[key][i][j] for key in ("before", "after", "same_labels_before", "same_labels_after"))
        table.add_row(escape(f"{one}, {other}"), *(shown(value, ".3f") for value in values))
    return table


def _mean_table(found: Mapping[str, Any]) -> rich.table.Table:
    """One row a method: the means over pairs."""
    import rich.table
    from rich.markup import escape

    table = rich.table.Table(title="Mean distance between clients", title_justify="left")
    for heading in ("method", "before", "after", "nearer", "equal labels, before", "equal labels, after", "nearer"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for system in found["systems"]:
        parts = [system["change"], system["same_labels_change"]]
        table.add_row(escape(system["label"]), *(cell for part in parts for cell in _mean_cells(part)))
    return table


def _mean_cells(change: Mapping[str, Any]) -> Sequence[str]:
    return (shown(change["before"], ".3f"), shown(change["after"], ".3f"), f"{change['nearer']} of {change['pairs']}")
