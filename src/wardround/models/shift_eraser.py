"""FDSE's layers: an extractor that all clients share, and a client's own eraser of what skews its features."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models.records import Records

if TYPE_CHECKING:
    from wardround.models.classifier import Classifier


class ChannelAffine(nn.Module):
    """`w_c x + b_c` for each channel c; it starts as the identity.

    A convolution with 1x1 kernels and one group a channel is the same, and many times slower on processors.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` to the same shape."""
        return torch.addcmul(self.bias, x, self.weight)


class Eraser(nn.Module):
    """What a client learns for itself: an affine transform per channel, and a 3x3 depth-wise convolution of it.

    The convolution has no bias.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = ChannelAffine(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(B, C, H, W)` to the transformed maps and their convolution, both of the same shape."""
        scaled = self.scale(x)
        return scaled, self.depthwise(scaled)


class ShiftEraser(Records):
    """A domain-specific skew eraser (DSE) and the distribution of what leaves it.

    What is recorded is the tensor whose distribution is compared.

    Attributes:
        norm: a batch norm without affine parameters, whose running moments are the client's own.
        eraser: the client's own affine transform and depth-wise convolution.
        closing: a batch norm of what leaves the eraser; its running moments, averaged, are every client's target.
    """

    def __init__(self, channels: int, closing: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.eraser = Eraser(channels)
        self.closing = closing

    def close(self, h: Tensor) -> Tensor:
        """Record h `(B, C, H, W)`, count it in the running moments, and return it normalised."""
        self.keep(h)
        normalised: Tensor = self.closing(h)
        return normalised


class DecomposedConvolution(ShiftEraser):
    """What stands in for a convolution from C to D channels, after Wang et al., CVPR 2025.

    `x1 = scale(norm(extractor(x)))`, `x2 = depthwise(x1)`, output `closing([x1, x2] + bias)`. The extractor (DFE) is
    the convolution with its first `ceil(D / 2)` filters alone, and starts from these. It needs no bias, since a batch
    norm follows. For odd D the last map of x2 is left out.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        kept = -(-convolution.out_channels // 2)
        super().__init__(kept, nn.BatchNorm2d(convolution.out_channels))
        self.extractor = copy.deepcopy(convolution)  # of the same class: some pad in a way of their own
        self.extractor.weight = nn.Parameter(convolution.weight.detach()[:kept].clone())
        self.extractor.out_channels, self.extractor.bias = kept, None
        self.bias = nn.Parameter(torch.zeros(convolution.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` to `(B, D, H', W')`, as the convolution that it replaces."""
        both = torch.cat(self.eraser(self.norm(self.extractor(x))), dim=1)
        return self.close(both[:, : len(self.bias)] + self.bias.view(-1, 1, 1))


class InsertedEraser(ShiftEraser):
    """An eraser in front of a block whose weights are to be kept: `x + depthwise(scale(norm(x)))`.

    The depth-wise convolution starts at 0, so that nothing changes when it is inserted. `closing` only measures.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, nn.BatchNorm2d(channels, affine=False))
        nn.init.zeros_(self.eraser.depthwise.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` to the same shape."""
        erased: Tensor = x + self.eraser(self.norm(x))[1]
        if self.training:
            self.close(erased)
        return erased


def shift_erasers(model: nn.Module) -> list[ShiftEraser]:
    """The erasers of `model`, in its order."""
    return [module for module in model.modules() if isinstance(module, ShiftEraser)]


def decompose_convolutions(model: Classifier) -> None:
    """Replace every convolution of the trained blocks, except grouped ones, which have no features to halve.

    Raises:
        InputError: there is none.
    """
    found = [
        (parent, name, child)
        for parent in list(model.tuned.modules())
        for name, child in parent.named_children()
        if isinstance(child, nn.Conv2d) and child.groups == 1
    ]
    if not found:
        raise InputError(f"FDSE needs convolutions, and {model.name!r} has none among the blocks that train")
    for parent, name, convolution in found:
        setattr(parent, name, DecomposedConvolution(convolution))


def insert_erasers(model: Classifier, image_size: int) -> None:
    """Put an InsertedEraser in front of every block that trains.

    Args:
        model: whose `before` is set.
        image_size: in pixels.

    Raises:
        InputError: no block trains, or one takes tokens instead of a feature map.
    """
    shapes = model.site_shapes(image_size)
    if not shapes:
        raise InputError("model.finetune_blocks = 0: FDSE erases skew before blocks that train (allowed: 1 and more)")
    if any(len(shape) != 3 for shape in shapes):
        raise InputError(f"FDSE needs feature maps between blocks, and {model.name!r} passes tokens")
    model.before = nn.ModuleList(InsertedEraser(shape[0]) for shape in shapes)
