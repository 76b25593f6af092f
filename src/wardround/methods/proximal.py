"""The pull towards where training began: what FedProx and Ditto add to a client's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def anchors(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Copies of `parameters` as they are now, for `pull`."""
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def pull(strength: float, parameters: Sequence[nn.Parameter], start: Sequence[Tensor]) -> None:
    """Add `strength * (w - w_0)` to the gradients: that of `strength/2 ||w - w_0||^2`, the norm squared.

    It is added after the task's gradient, by two passes over all parameters at once; as a term of the loss it would
    cost five small operations a parameter.

    Args:
        strength: mu in FedProx, lambda in Ditto.
        parameters: w.
        start: w_0, as `anchors` gives them.
    """
    if not strength or not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:  # the task does not reach it, the pull does
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_add_(gradients, torch._foreach_sub(list[Tensor](parameters), list(start)), alpha=strength)
