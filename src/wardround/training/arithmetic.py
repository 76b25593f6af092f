"""How the trained blocks compute, as the `[training]` section says once nothing in it is `auto`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

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


def compile_if_asked(model: nn.Module, options: TrainingOptions) -> None:
    """Compile `model` in place where `options.compile` is `on`; names of its state stay what they are."""
    if options.compile == "on":
        import torch._functorch.config

        # Methods may go through a graph twice, to compare the gradients of two losses.
        torch._functorch.config.donated_buffer = False
        model.compile()
