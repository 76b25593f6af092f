"""The small convolutional network of federated benchmarks: two 5x5 convolutions and a dense layer."""

from __future__ import annotations

from typing import Literal

from torch import nn

from wardround.errors import InputError
from wardround.models.backbones.backbone import Backbone

Norm = Literal["none", "bn", "gn"]
LARGEST_EXACT = 64
SMALLEST = 16


def cnn(channels: int, image_size: int, norm: Norm = "none") -> Backbone:
    """Three blocks: twice (5x5 convolution, norm, ReLU, 2x2 pooling), 32 and 64 channels; then Linear to 512.

    At 1x28x28 without norm the flattened map has 1024 elements and the backbone 576,896 parameters: 581,513
    with a 9-way head, 582,026 with a 10-way one. Above 64 pixels the map is first averaged to the 13x13 of a
    64-pixel image, so that the dense layer does not grow to a hundred million parameters.
    """
    if image_size < SMALLEST:
        raise InputError(f"wardround:cnn needs images of at least {SMALLEST} pixels, found {image_size}")
    side = _side(min(image_size, LARGEST_EXACT))
    squeeze = [nn.AdaptiveAvgPool2d(side)] if image_size > LARGEST_EXACT else []
    dense = nn.Sequential(*squeeze, nn.Flatten(1), nn.Linear(64 * side * side, 512), nn.ReLU())
    blocks = [_convolution(channels, 32, norm), _convolution(32, 64, norm), dense]
    name = "wardround:cnn" if norm == "none" else f"wardround:cnn-{norm}"
    half = (0.5,) * channels
    return Backbone(name, "cnn", blocks, pool=nn.Identity(), features=512, mean=half, std=half)


def _side(image_size: int) -> int:
    """Rows of the map after both convolutions (no padding) and both poolings."""
    return ((image_size - 4) // 2 - 4) // 2


def _convolution(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    """Convolution, norm (BatchNorm, or GroupNorm with 8 groups), ReLU, pooling."""
    norms: dict[Norm, list[nn.Module]] = {
        "none": [],
        "bn": [nn.BatchNorm2d(outputs)],
        "gn": [nn.GroupNorm(8, outputs)],
    }
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5), *norms[norm], nn.ReLU(), nn.MaxPool2d(2))
