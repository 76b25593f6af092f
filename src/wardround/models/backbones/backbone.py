"""A backbone: blocks in order, then a pooling without parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models.catalogue import CITATIONS

if TYPE_CHECKING:
    from wardround.models.encoders.text import TextTower

Triple = tuple[float, ...]


class Normalise(nn.Module):
    """uint8 images to the numbers a network was trained on: `(x / 255 - mean) / std`, per channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Triple, std: Triple) -> None:
        super().__init__()
        centre, spread = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / (255 * spread), persistent=False)
        self.register_buffer("shift", -centre / spread, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 `(B, H, W, C)` to float32 `(B, channels, H, W)`; grey images are repeated over all channels.

        Raises InputError for colour images where the network takes one channel.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8, found {images.dtype}")
        return self._normalised(images)

    def of_pixels(self, pixels: Tensor) -> Tensor:
        """float32 `(B, H, W, C)` in 0..1 to what `forward` makes of the same images as uint8, to within rounding.

        Gradients pass. Raises InputError as `forward` does.
        """
        if not pixels.is_floating_point():
            raise TypeError(f"pixels must be floating-point numbers in 0..1, found {pixels.dtype}")
        return self._normalised(255 * pixels)

    def _normalised(self, images: Tensor) -> Tensor:
        """`(B, H, W, C)` in 0..255 to float32 `(B, channels, H, W)`."""
        if images.shape[-1] not in (1, len(self.scale)):
            raise InputError(f"images have {images.shape[-1]} channels, the backbone takes {len(self.scale)}")
        planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return planes * self.scale + self.shift


class Backbone(nn.Module):
    """A network without its classifier, cut into blocks.

    Attributes:
        name: the name it was loaded by, such as `timm:resnet18`.
        family: key of `catalogue.CITATIONS`.
        blocks: the stem first; the closing layers (a last 1x1 convolution, a last norm) go with the last
        stage.
            Every parameter and buffer of the backbone belongs to a block.
        pool: output of the last block -> `(B, features)`; it has no state.
        features: the pooled dimension.
        mean, std: per channel, of images scaled to 0..1.
        dropout: the rate that the architecture puts before its classifier.
        pretrained: what was asked for: True, False or a path.
        weights: in words, where the weights came from.
        text: the text side of an encoder, which is no module: frozen, and not part of the state; None for others.
        logit_scale: what an encoder multiplies cosines of image and text by.
    """

    def __init__(
        self,
        name: str,
        family: str,
        blocks: Iterable[nn.Module],
        *,
        pool: nn.Module,
        features: int,
        mean: Triple = (0.5, 0.5, 0.5),
        std: Triple = (0.5, 0.5, 0.5),
        dropout: float = 0.0,
        text: TextTower | None = None,
    ) -> None:
        super().__init__()
        self.name, self.family, self.features, self.dropout = name, family, features, dropout
        self.mean, self.std = tuple(mean), tuple(std)
        self.blocks = nn.ModuleList(blocks)
        self.pool = pool
        self.normalise = Normalise(self.mean, self.std)
        self.pretrained: bool | str = False
        self.weights = "random"
        self.text = text
        self.logit_scale = 100.0

    @property
    def citation(self) -> str:
        """The paper that introduced the architecture."""
        return CITATIONS[self.family]

    @property
    def channels(self) -> int:
        """How many channels the first block takes."""
        return len(self.mean)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images `(B, channels, H, W)` to pooled features `(B, features)`."""
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.pool(x)
        return features


def average_pool() -> nn.Sequential:
    """Mean over rows and columns: `(B, C, H, W)` to `(B, C)`."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))


def named(**modules: nn.Module) -> nn.Sequential:
    """A sequence whose state keeps readable names.

    >>> list(named(stage=nn.Linear(1, 1), closing=nn.ReLU()).state_dict())
    ['stage.weight', 'stage.bias']
    """
    return nn.Sequential(OrderedDict(modules))
