"""ResNet-4: a stem, one residual block, a linear head; four weight layers in all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wardround.models.backbones.backbone import Backbone, average_pool


class Residual(nn.Module):
    """Two 3x3 convolutions with a skip: `ReLU(x + BN(conv(ReLU(BN(conv(x))))))`. Shape is kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, width, H, W)` to the same shape."""
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(hidden)))


def resnet4(
    *, image_size: int, width: int = 168, stem_kernel: int = 3, stem_stride: int = 2, name: str = "resnet4"
) -> Backbone:
    """Two blocks: stem and residual block, 513,576 parameters at width 168 with a 3x3 stem.

    Width 64 with a 7x7 stem is the `resnet4` of the PFLlib and HtFLlib libraries: 83,520 parameters, 85,925
    with a 37-way head. The stem's stride never changes the count. Its pooling is left out up to 64 pixels,
    where it would leave too little of the image.
    """
    layers = [
        nn.Conv2d(3, width, stem_kernel, stem_stride, padding=stem_kernel // 2, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    if image_size > 64:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    blocks = [nn.Sequential(*layers), Residual(width)]
    for block in blocks:
        block.apply(_initialise)
    return Backbone(f"wardround:{name}", "resnet4", blocks, pool=average_pool(), features=width)


def _initialise(module: nn.Module) -> None:
    """He's initialisation, as for every ResNet."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
