"""The squared distance to where training began: what FedProx and Ditto add to a client's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def anchors(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Copies of `parameters` as they are now, for `squared_distance`."""
    return [parameter.detach().clone() for parameter in parameters]


def squared_distance(parameters: Sequence[nn.Parameter], start: Sequence[Tensor]) -> Tensor:
    """`sum ||w - w_0||^2`, a scalar: the square, not the root, whose gradient does not shrink near the start.

    Args:
        parameters: w.
        start: w_0, as `anchors` gives them.
    """
    if not parameters:
        return torch.zeros(())
    distance: Tensor = _SquaredDistance.apply(start, *parameters)
    return distance


class _SquaredDistance(torch.autograd.Function):
    """One pass over all parameters at once, each way, instead of five small operations a parameter."""

    @staticmethod
    def forward(ctx: Any, start: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        """Keep w - w_0."""
        ctx.differences = torch._foreach_sub(parameters, list(start))
        return torch.stack(torch._foreach_norm(ctx.differences)).square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """2 (w - w_0)."""
        return (None, *torch._foreach_mul(ctx.differences, 2 * gradients[0]))
