"""Deal images to clients where no hospital is recorded.

A partition is a list of index arrays, one a client, that are disjoint and together complete. The three random
kinds first draw a *plan* `(clients, classes)`, then deal images by it; one plan can deal several splits
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Plan = NDArray[np.float64]
Drawer = Callable[[Indices, int, float, np.random.Generator], Plan]
Dealer = Callable[[Indices, Plan, np.random.Generator], list[Indices]]


def by_value(values: Sequence[str]) -> dict[str, Indices]:
    """One client a distinct value, in sorted order of values."""
    column = np.asarray(values, dtype=object)
    return {value: np.flatnonzero(column == value) for value in sorted(set(values))}


def class_shares(counts: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Plan:
    """For every class, the share of each client, from a symmetric Dirichlet(alpha): columns sum to 1."""
    return rng.dirichlet(np.full(clients, alpha), size=len(counts)).T


def size_shares(counts: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Plan:
    """The share of each client from one Dirichlet(alpha), the same for every class: columns sum to 1."""
    return np.tile(rng.dirichlet(np.full(clients, alpha))[:, None], len(counts))


def class_mixtures(counts: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Plan:
    """For every client its class mixture q ~ Dirichlet(alpha p), p the class frequencies: rows sum to 1."""
    present = counts > 0
    plan = np.zeros((clients, len(counts)))
    plan[:, present] = rng.dirichlet(alpha * counts[present] / counts.sum(), size=clients)
    return plan


def deal_by_share(labels: Indices, plan: Plan, rng: np.random.Generator) -> list[Indices]:
    """Cut each class, shuffled, at the running sums of its column of `plan`."""
    parts: list[list[Indices]] = [[] for _ in plan]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.round(np.cumsum(plan[:, label])[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    return [_sorted(part) for part in parts]


def deal_by_mixture(labels: Indices, plan: Plan, rng: np.random.Generator) -> list[Indices]:
    """Let the clients in turn draw one image each, of a class from their mixture, until none is left.

    Sizes differ by at most one. A client whose classes have run out draws from what is left in proportion to
    it.
    """
    pools = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in range(plan.shape[1])]
    left = np.array([len(pool) for pool in pools])
    parts: list[list[int]] = [[] for _ in plan]
    for turn, chance in enumerate(rng.random(len(labels))):
        client = turn % len(plan)
        weights = plan[client] * (left > 0)
        steps = np.cumsum(weights if weights.sum() > 0 else left)
        label = int(np.searchsorted(steps, chance * steps[-1], side="right"))
        parts[client].append(pools[label].pop())
        left[label] -= 1
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def _sorted(pieces: list[Indices]) -> Indices:
    return np.sort(np.concatenate(pieces)) if pieces else np.empty(0, dtype=np.int64)


KINDS: dict[str, tuple[Drawer, Dealer]] = {
    "dirichlet": (class_shares, deal_by_share),
    "quantity": (size_shares, deal_by_share),
    "dirichlet-hsu": (class_mixtures, deal_by_mixture),
}


def _partition(kind: str, labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    draw, deal = KINDS[kind]
    return deal(labels, draw(np.bincount(labels), clients, alpha, rng), rng)


def dirichlet(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Every class is dealt to the clients in Dirichlet(alpha) shares (Yurochkin et al., ICML 2019).

    Label and size both differ between clients; small alpha gives a class to few clients.
    """
    return _partition("dirichlet", labels, clients, alpha, rng)


def dirichlet_hsu(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Each client draws a class mixture from Dirichlet(alpha p) (Hsu et al., arXiv:1909.06335); equal sizes.

    Towards the end a client may get classes outside its mixture, as all images are dealt.
    """
    return _partition("dirichlet-hsu", labels, clients, alpha, rng)


def quantity(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Sizes in Dirichlet(alpha) shares, class proportions alike (Li et al., ICDE 2022)."""
    return _partition("quantity", labels, clients, alpha, rng)
