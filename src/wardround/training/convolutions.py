"""Convolutions that are faster on processors than the library's own, for the shapes of mobile networks.

Two of them, each used only where `selftest` finds it faster:

- A depthwise convolution's weight gradient as a sum over shifts of the input, `dW[c,i,j] = sum_bhw x[b,c,sh+i,sw+j]
  g[b,c,h,w]`: about twice as fast as the library's on channels-last maps with 5x5 kernels, in the same precision.
- Pointwise (1x1) convolutions in bfloat16, everything else in float32. Autocast would put the depthwise layers into
  bfloat16 too, which processors without matching kernels run many times slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SMALLEST_KERNEL = 5  # the library's 3x3 weight gradient is the faster one


class FastConvolutions(TorchFunctionMode):
    """While active, `conv2d` calls of the right shapes take the faster way.

    Args:
        shifts: compute large depthwise kernels' weight gradients by shifts.
        pointwise: compute pointwise convolutions in bfloat16.
    """

    def __init__(self, shifts: bool, pointwise: bool) -> None:
        super().__init__()
        self.shifts, self.pointwise = shifts, pointwise

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take over `conv2d` where it pays."""
        if function is functional.conv2d:
            return self._conv2d(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if self.pointwise and groups == 1 and weight.shape[2:] == (1, 1):
            return _pointwise(x, weight, bias, _pair(stride), padding, dilation)
        plain = bias is None and not isinstance(padding, str) and _pair(dilation) == (1, 1)
        if self.shifts and plain and weight.requires_grad and _is_depthwise(x, weight, groups):
            result: Tensor = DepthwiseConvolution.apply(x, weight, _pair(stride), _pair(padding))
            return result
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: Any, dilation: Any
) -> Tensor:
    """A 1x1 `conv2d` in bfloat16. On channels-last maps it is a matrix product, whose gradients are faster."""
    narrow, kernel = x.bfloat16(), weight.bfloat16()
    offset = None if bias is None else bias.bfloat16()
    plain = stride == (1, 1) and padding in (0, (0, 0), [0, 0], "valid", "same")
    if plain and x.is_contiguous(memory_format=torch.channels_last):
        result = functional.linear(narrow.permute(0, 2, 3, 1), kernel.flatten(1), offset).permute(0, 3, 1, 2)
    else:
        result = functional.conv2d(narrow, kernel, offset, stride, padding, dilation)
    return result.float()


class DepthwiseConvolution(torch.autograd.Function):
    """A depthwise `conv2d` of x `(B, C, H, W)` with weight `(C, 1, k, k)` whose weight gradient is a sum of shifts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        """The library's own."""
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return functional.conv2d(x, weight, None, stride, padding, 1, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        """The library's own for the input, shifts for the weight."""
        x, weight = ctx.saved_tensors
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), x.shape[1],
                (True, False, False),
            )[0]  # fmt: skip
        return of_input, weight_gradient(x, gradient, weight.shape[2], ctx.stride, ctx.padding), None, None


def weight_gradient(
    x: Tensor, gradient: Tensor, kernel: int, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """`dW` `(C, 1, k, k)` of a depthwise convolution of x `(B, C, H, W)`, given the output's gradient."""
    maps, flow = x.permute(0, 2, 3, 1).contiguous(), gradient.permute(0, 2, 3, 1).contiguous()
    result = x.new_empty(kernel, kernel, x.shape[1])
    rows, columns = (
        [_overlap(i, *sizes) for i in range(kernel)]
        for sizes in zip(stride, padding, maps.shape[1:3], flow.shape[1:3], strict=True)
    )
    for i, (x_rows, g_rows) in enumerate(rows):
        for j, (x_columns, g_columns) in enumerate(columns):
            torch.sum(maps[:, x_rows, x_columns] * flow[:, g_rows, g_columns], (0, 1, 2), out=result[i, j])
    return result.permute(2, 0, 1).unsqueeze(1)


def _overlap(shift: int, stride: int, padding: int, size: int, outputs: int) -> tuple[slice, slice]:
    """Where in the input and in the output a kernel's row `shift` meets image and not padding."""
    offset = shift - padding
    first = max(0, -(offset // stride))
    last = max(first, min(outputs, (size - 1 - offset) // stride + 1))
    start = stride * first + offset
    return slice(start, max(start, start + stride * (last - first - 1) + 1), stride), slice(first, last)


def has_large_depthwise(model: torch.nn.Module) -> bool:
    """Whether `model` holds a depthwise convolution whose kernel is large enough for shifts."""
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    depthwise = [m for m in convolutions if m.groups == m.in_channels == m.out_channels]
    return any(min(m.kernel_size) >= SMALLEST_KERNEL for m in depthwise)


def _is_depthwise(x: Tensor, weight: Tensor, groups: int) -> bool:
    square = weight.shape[2] == weight.shape[3] >= SMALLEST_KERNEL
    return square and groups == x.shape[1] == weight.shape[0] and weight.shape[1] == 1


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
