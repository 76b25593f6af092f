"""A linear layer that learns which of its outputs to keep."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Surrogate = Literal["dst", "reference"]
LARGEST = 5.0  # thresholds stay within plus and minus this
FEWEST = 0.01  # a mask that keeps no more than this share of the outputs has collapsed
REFERENCE_MARGIN = 0.01


def dst_slope(x: Tensor) -> Tensor:
    """What stands for the derivative of the step at x in Dynamic Sparse Training (Liu et al., ICLR 2020).

    `2 - 4|x|` up to |x| = 0.4, then 0.4 up to 1, then 0.
    """
    far = x.abs()
    return torch.where(far <= 0.4, 2 - 4 * far, torch.where(far <= 1, 0.4, 0.0))


def reference_slope(x: Tensor) -> Tensor:
    """The same in the published code of FedMedCLIP: 1 where |x| > 1, which x never is."""
    return (x.abs() > 1).to(x.dtype)


class Mask(NamedTuple):
    """What decides which outputs are kept.

    Attributes:
        above: `u - kappa`, `(outputs,)`.
        kept: its step, 1 or 0, `(outputs,)`.
    """

    above: Tensor
    kept: Tensor


class _MaskedProduct(torch.autograd.Function):
    """`m * (W x + b)` with all its gradients in one go; without `masks_bias`, `m * (W x) + b`.

    The mask's own gradient reaches W through `mean_j |W_ij|`: `slope_i (g_i . y_i) sign(W_ij) / in`. Written out it
    takes two passes over W; by the chain of single operations it would be six.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, mask: Mask, surrogate: Surrogate
    ) -> Tensor:
        """The product, `(B, out)`."""
        masks_bias = surrogate == "dst"
        product = functional.linear(x, weight, bias if masks_bias else None)
        ctx.save_for_backward(x, weight, product, *mask)
        ctx.surrogate = surrogate
        return product * mask.kept if masks_bias else product * mask.kept + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, W, b and kappa."""
        x, weight, product, above, kept = ctx.saved_tensors
        whole, is_dst = gradients[0], ctx.surrogate == "dst"
        passed = whole * kept
        pull = (dst_slope if is_dst else reference_slope)(above) * (whole * product).sum(0)
        of_weight = passed.T @ x
        if bool(pull.any()):
            of_weight.addcmul_(weight.sign(), (pull / weight.shape[1])[:, None])
        of_bias = (passed if is_dst else whole).sum(0)
        of_x = passed @ weight if ctx.needs_input_grad[0] else None
        return of_x, of_weight, of_bias, -pull, None, None


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
        """1 for an output that is kept, else 0, `(outputs,)`."""
        return self._mask(settled=False).kept

    def forward(self, x: Tensor) -> Tensor:
        """`(B, inputs)` to `(B, outputs)`. In training, thresholds are first brought within bounds."""
        mask = self._mask(settled=self.training and torch.is_grad_enabled())
        product: Tensor = _MaskedProduct.apply(x, self.weight, self.bias, self.threshold, mask, self.surrogate)
        return product

    def settle(self) -> None:
        """Keep kappa within bounds; where the mask has collapsed, begin anew with all outputs."""
        self._mask(settled=True)

    @torch.no_grad()
    def _mask(self, settled: bool) -> Mask:
        """The mask as W and kappa are; with `settled`, kappa is brought within bounds first."""
        size = self.weight.abs().mean(1)
        if settled:
            self.threshold.clamp_(-LARGEST, LARGEST)
        mask = self._step(size - self.threshold)
        if settled and self.surrogate == "dst" and float(mask.kept.mean()) <= FEWEST:
            self.threshold.zero_()
            mask = self._step(size)
        return mask

    def _step(self, above: Tensor) -> Mask:
        kept = above >= 0 if self.surrogate == "dst" else above > REFERENCE_MARGIN
        return Mask(above, kept.to(above.dtype))


def settle(module: nn.Module) -> None:
    """`MaskedLinear.settle` for every such layer in `module`: after the last step of training."""
    for layer in module.modules():
        if isinstance(layer, MaskedLinear):
            layer.settle()
