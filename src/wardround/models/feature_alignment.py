"""PAFP's feature alignment: a client-local layer before each fine-tuned block, whose outputs are aligned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.models.records import Records

if TYPE_CHECKING:
    from wardround.models.classifier import Classifier

Variant = Literal["exact", "delta", "gated", "conv_only"]
Statistic = Literal["output", "pre_activation"]


class FeatureAlignment(Records):
    """F(x) = SiLU(conv1x1(GN(x))) for x `(B, C, H, W)`, in one of four variants.

    GN starts with gamma = 1, beta = 0; the convolution starts as the identity with zero bias.

    * `exact`: F(x), as published. It is far from the identity when inserted: GN removes each image's mean and
      scale, SiLU bends the rest (see `insertion_change`).
    * `delta`: x + (F(x) - F0(x)), F0 being F at the start; the identity when inserted, gradients at once.
    * `gated`: x + a * (F(x) - x), a per channel and 0 at the start; exactly the identity when inserted, but
      only the gate receives a gradient in the first step.
    * `conv_only`: conv1x1(x); exactly the identity when inserted, and linear.

    What is recorded is the tensor whose distribution is aligned: the output (what the next block receives), or with
    `statistic="pre_activation"` the convolution's.
    """

    def __init__(
        self, channels: int, groups: int = 16, variant: Variant = "exact", statistic: Statistic = "output"
    ) -> None:
        super().__init__()
        self.variant, self.statistic = variant, statistic
        self.norm: nn.Module = nn.Identity() if variant == "conv_only" else _group_norm(groups, channels)
        self.conv = nn.Conv2d(channels, channels, kernel_size=1)
        nn.init.dirac_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        if variant == "gated":
            self.gate = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` to the same shape."""
        before_activation = self.conv(self.norm(x))
        output = self._combine(x, before_activation)
        self.keep(output if self.statistic == "output" else before_activation)
        return output

    def _combine(self, x: Tensor, before_activation: Tensor) -> Tensor:
        """The variant's output from its input and the convolution's output."""
        if self.variant == "conv_only":
            return before_activation
        transformed = functional.silu(before_activation)
        if self.variant == "gated":
            return x + self.gate.view(-1, 1, 1) * (transformed - x)
        if self.variant == "delta":
            return x + (transformed - self._initial(x))
        return transformed

    def _initial(self, x: Tensor) -> Tensor:
        """F0(x). Its convolution is the identity and its norm has no scale, so nothing needs storing."""
        assert isinstance(self.norm, nn.GroupNorm)
        return functional.silu(functional.group_norm(x, self.norm.num_groups, eps=self.norm.eps))

    @torch.no_grad()
    def insertion_change(self, x: Tensor) -> float:
        """How much the layer changes its input: ||FA(x) - x|| / ||x|| over the batch; 0 for the identity."""
        change = self._combine(x, self.conv(self.norm(x))) - x
        return float(change.norm() / x.norm().clamp(min=torch.finfo(x.dtype).tiny))


def insert_alignment(
    classifier: Classifier,
    image_size: int,
    *,
    groups: int = 16,
    variant: Variant = "exact",
    statistic: Statistic = "output",
) -> list[FeatureAlignment]:
    """Put a FeatureAlignment before each tuned block of `classifier` and return them, first site first.

    Raises InputError where a site carries tokens instead of a feature map, or where `groups` does not divide
    the channels of every site.
    """
    shapes = classifier.site_shapes(image_size)
    flat = [shape for shape in shapes if len(shape) != 3]
    if flat:
        raise InputError(
            f"feature alignment needs feature maps (channels, rows, columns); {classifier.name!r} passes "
            f"{flat[0]} between its blocks: choose a convolutional backbone"
        )
    if variant != "conv_only":
        check_groups(groups, [shape[0] for shape in shapes])
    layers = [FeatureAlignment(shape[0], groups, variant, statistic) for shape in shapes]
    classifier.before = nn.ModuleList(layers)
    return layers


def check_groups(groups: int, channels: Sequence[int]) -> None:
    """InputError unless `groups` divides each of `channels`; it lists the numbers that do."""
    common = math.gcd(*channels)
    if groups < 1 or common % groups:
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        widths = " and ".join(str(width) for width in channels)
        raise InputError(f"GroupNorm groups = {groups} does not divide {widths} channels (allowed: {allowed})")


def _group_norm(groups: int, channels: int) -> nn.GroupNorm:
    """A GroupNorm, after the check."""
    check_groups(groups, [channels])
    return nn.GroupNorm(groups, channels)
