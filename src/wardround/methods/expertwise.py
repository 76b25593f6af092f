"""An average of clients in which each expert of a mixture counts clients in its own way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from torch import Tensor

from wardround.federation.averaging import WeightedMean
from wardround.federation.server import Reply

ExpertOf = Callable[[str], int | None]
Weigh = Callable[[Reply, int | None], float]


def expertwise_mean(replies: Iterable[Reply], expert_of: ExpertOf, weigh: Weigh) -> dict[str, Tensor]:
    """`sum_k w_ke phi_ke / sum_k w_ke` for every expert e, and the same for what is no expert's.

    Args:
        replies: with the clients' shared state; they are taken one at a time.
        expert_of: the expert that a state entry is part of, None for none.
        weigh: w_ke of a reply and an expert, or None; 0 leaves the client out.

    Returns:
        The means by entry. An expert for which no client counts is not among them.
    """
    means: dict[int | None, WeightedMean] = defaultdict(WeightedMean)
    for reply in replies:
        parts: dict[int | None, dict[str, Tensor]] = defaultdict(dict)
        for entry, tensor in reply.message.under("state").items():
            parts[expert_of(entry)][entry] = tensor
        for expert, entries in parts.items():
            means[expert].add(entries, weigh(reply, expert))
    return {entry: tensor for mean in means.values() for entry, tensor in mean.result().items()}
