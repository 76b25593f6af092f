"""Averages over clients, one reply at a time, so that memory does not grow with the number of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class WeightedMean:
    """The weighted mean of dictionaries of tensors, accumulated in float64 in the order in which they are added.

    Integer entries (batch-norm counters) cannot be averaged; the largest is kept.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._sums: dict[str, Tensor] = {}
        self._like: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Count `tensors` with `weight`; 0 adds nothing.

        Raises:
            ValueError: the weight is negative or not finite, or the names differ from those of the first dictionary.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a weight must be finite and not negative, found {weight}")
        if weight == 0:
            return
        if self.total == 0:
            self._begin(tensors)
        if tensors.keys() != self._sums.keys():
            raise ValueError(f"these tensors differ in name: {sorted(tensors.keys() ^ self._sums.keys())}")
        self.total += weight
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self._sums[name].add_(tensor, alpha=weight)
            else:
                torch.maximum(self._sums[name], tensor, out=self._sums[name])

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._like[name] = tensor.dtype
            floating = tensor.is_floating_point()
            self._sums[name] = torch.zeros_like(tensor, dtype=torch.float64) if floating else tensor.clone()

    def result(self) -> dict[str, Tensor]:
        """The mean, in the types of the first dictionary; empty when nothing was added."""
        return {
            name: (value / self.total).to(self._like[name]) if value.is_floating_point() else value.clone()
            for name, value in self._sums.items()
        }
