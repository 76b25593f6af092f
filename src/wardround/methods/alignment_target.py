"""The server's half of PAFP: a target distribution that follows the clients' moments.

Moments travel under the names `l/mean` and `l/var` for site l. In the server's memory a target is `l/mean` with
`l/var`, or, for the `total` variance, with the second moment `l/second`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

Variance = Literal["within", "total"]


def with_squares(statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's moments and, as `l/square`, its squared means: their average tells how far clients lie apart."""
    return {**statistics, **{f"{site}/square": statistics[f"{site}/mean"] ** 2 for site in sites_of(statistics)}}


def move_target(memory: dict[str, Tensor], average: Mapping[str, Tensor], rate: float, variance: Variance) -> None:
    """`g <- (1 - rate) g + rate * average` in place, assigned where there is no g yet.

    Args:
        memory: the server's.
        average: `sum_k p_k` of the clients' `with_squares`.
        rate: weight of the new round, `m_srv`.
        variance: `within` averages `v_k`; `total` averages the second moments `v_k + mu_k^2`.
    """
    for site in sites_of(average):
        mean, var = average[f"{site}/mean"], average[f"{site}/var"]
        spread = {"var": var} if variance == "within" else {"second": var + average[f"{site}/square"]}
        for part, new in {"mean": mean, **spread}.items():
            old = memory.get(f"{site}/{part}", new)
            memory[f"{site}/{part}"] = torch.lerp(old, new, rate)


def target_of(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target as it travels, `l/mean` and `l/var`; empty before the first round.

    Rounding can put a second moment below the squared mean: a variance is at least 0.
    """
    found = {}
    for name, tensor in memory.items():
        site, part = name.split("/")
        if part == "second":
            found[f"{site}/var"] = (tensor - memory[f"{site}/mean"] ** 2).clamp(min=0)
        else:
            found[name] = tensor
    return found


def distances(average: Mapping[str, Tensor]) -> dict[str, float]:
    """By site: the clients' spread about their mean, as a multiple of the spread within a client."""
    found = {}
    for site in sites_of(average):
        mean, var, square = (average[f"{site}/{part}"] for part in ("mean", "var", "square"))
        between = (square - mean**2).clamp(min=0).mean().sqrt()
        found[site] = float(between / var.mean().sqrt().clamp(min=1e-12))
    return found


def sites_of(names: Iterable[str]) -> list[str]:
    """The sites in a set of names."""
    return sorted({name.split("/")[0] for name in names}, key=int)
