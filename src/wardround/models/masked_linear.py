"""A linear layer that learns which of its outputs to keep."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Surrogate = Literal["dst", "reference"]
LARGEST = 5.0  # thresholds stay within plus and minus this
FEWEST = 0.01  # a mask that keeps no more than this share of the outputs has collapsed
REFERENCE_MARGIN = 0.01


class _Step(torch.autograd.Function):
    """1 where x is at least 0, with a slope for training: that of Dynamic Sparse Training (Liu et al., ICLR 2020).

    The slope is `2 - 4|x|` up to |x| = 0.4, then 0.4 up to 1, then 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The step."""
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The slope, times what comes from above."""
        (x,) = ctx.saved_tensors
        far = x.abs()
        slope = torch.where(far <= 0.4, 2 - 4 * far, torch.where(far <= 1, 0.4, 0.0))
        return gradients[0] * slope


class _ReferenceStep(torch.autograd.Function):
    """As the published code of FedMedCLIP has it: a margin, and a gradient only where |x| > 1, which x never is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The step."""
        ctx.save_for_backward(x)
        kept: Tensor = (x > REFERENCE_MARGIN).to(x.dtype)
        return kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The slope, times what comes from above."""
        (x,) = ctx.saved_tensors
        passed: Tensor = gradients[0] * (x.abs() > 1)
        return passed


class MaskedLinear(nn.Module):
    """`y_i = m_i (w_i x + b_i)`, with one mask bit an output: `m_i = step(mean_j |W_ij| - kappa_i)`.

    Weights start Kaiming-uniform with a = sqrt 5, biases uniform in plus and minus 1/sqrt(in), kappa at 0, so that all
    outputs are kept. The mask multiplies the output, which is the same as masking the rows of W, for `out` products an
    image.

    Args:
        inputs, outputs: the sizes.
        surrogate: `dst` learns kappa. `reference` is FedMedCLIP's published code, whose mask never moves and leaves b.

    Attributes:
        weight: `(outputs, inputs)`; bias: `(outputs,)`; threshold: kappa, `(outputs,)`.
    """

    def __init__(self, inputs: int, outputs: int, surrogate: Surrogate = "dst") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.threshold = nn.Parameter(torch.zeros(outputs))
        self.surrogate: Surrogate = surrogate
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(inputs)
        nn.init.uniform_(self.bias, -bound, bound)

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.weight.shape[0]

    def mask(self) -> Tensor:
        """One number an output `(outputs,)`, 1 or 0; kappa and W are reached by its gradient."""
        above = self.weight.abs().mean(1) - self.threshold
        kind = _Step if self.surrogate == "dst" else _ReferenceStep
        kept: Tensor = kind.apply(above)
        return kept

    def forward(self, x: Tensor) -> Tensor:
        """`(B, inputs)` to `(B, outputs)`."""
        if self.surrogate == "reference":
            return functional.linear(x, self.weight) * self.mask() + self.bias
        return functional.linear(x, self.weight, self.bias) * self.mask()

    @torch.no_grad()
    def settle(self) -> None:
        """Keep kappa within bounds; where the mask has collapsed, begin anew with all outputs."""
        self.threshold.clamp_(-LARGEST, LARGEST)
        if self.surrogate == "dst" and float(self.mask().mean()) <= FEWEST:
            self.threshold.zero_()


def settle(module: nn.Module) -> None:
    """`MaskedLinear.settle` for every such layer in `module`: after each step of training."""
    for layer in module.modules():
        if isinstance(layer, MaskedLinear):
            layer.settle()
