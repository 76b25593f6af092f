"""How the trained blocks compute, as the `[training]` section says once nothing in it is `auto`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from wardround.training.convolutions import FastConvolutions
from wardround.training.options import TrainingOptions


def arithmetic(options: TrainingOptions, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward passes. Gradients follow the forward pass, so it need not be active for them."""
    if options.precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    shifts, pointwise = options.depthwise == "shifts", options.precision == "pointwise-bfloat16"
    return FastConvolutions(shifts, pointwise) if shifts or pointwise else nullcontext()


def layout(options: TrainingOptions) -> torch.memory_format:
    """The memory format of weights and feature maps."""
    return torch.channels_last if options.memory_format == "channels_last" else torch.contiguous_format
