"""Rounds as local epochs, by which methods whose rounds are unlike can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wardround.errors import InputError
from wardround.methods.base import FedAvg, Method
from wardround.methods.registry import method_from
from wardround.training.options import TrainingOptions


@dataclass(frozen=True)
class LocalEpochs:
    """Local epochs of a client that takes part in every round, as its method passes over its images.

    Attributes:
        method: says how often it does, see `Method.passes`.
        training: with `local_epochs`.
    """

    method: Method
    training: TrainingOptions

    def until(self, round: int) -> int:
        """Those of all rounds up to `round`."""
        return sum(self.method.passes(self.training, one) for one in range(1, round + 1))

    def rounds_for(self, epochs: int) -> int | None:
        """How many rounds make at least `epochs`; None where rounds come that make none."""
        done = rounds = 0
        while done < epochs:
            rounds += 1
            made = self.method.passes(self.training, rounds)
            if not made:
                return None
            done += made
        return rounds


def recorded_epochs(config: Mapping[str, Any]) -> LocalEpochs:
    """Those of a run, from its configuration as the file has it, which need not be complete.

    Where the method is none of ours, or has keys of another version, a round counts `training.local_epochs`.
    """
    local = config.get("training", {}).get("local_epochs", 1)
    training = TrainingOptions(local_epochs=local if isinstance(local, int) else 1)
    try:
        return LocalEpochs(method_from(config.get("method", {})), training)
    except InputError:
        return LocalEpochs(FedAvg(), training)
