"""Where a classifier's inputs come from: cached outputs of its frozen blocks, or images on the fly.

`Classifier.forward` takes what the frozen blocks put out. For images that do not change between epochs that output
is computed once, kept in half precision and shared by all methods and seeds with the same frozen weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from wardround.data import Samples
from wardround.data.transforms import Policy, augment, centre_crop
from wardround.errors import InputError
from wardround.models.classifier import Classifier

PREFIX_BATCH = 64
FrozenPrecision = Literal["float32", "bfloat16"]


class Inputs(Protocol):
    """Inputs of a classifier by row."""

    def __len__(self) -> int:
        """How many images."""

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """What `Classifier.forward` takes for `rows`; `stream` decides the augmentation, None for none."""


@dataclass(frozen=True)
class CachedInputs:
    """Outputs of the frozen blocks, kept in half precision in memory or in a mapped file.

    Attributes:
        views: `(N, ...)` each; maps of shape `(C, H, W)` are kept as `(H, W, C)`, which a channels-last network
            reads without a copy.
        device: where batches are needed.
        layout: the memory format in which they are needed.
    """

    views: Sequence[Tensor]
    device: torch.device
    layout: torch.memory_format

    def __len__(self) -> int:
        return len(self.views[0])

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """float32 `(B, ...)`; with several views, each image's view is drawn from `stream`."""
        if len(self.views) == 1 or stream is None:
            kept = self.views[0].index_select(0, rows)
        else:
            drawn = stream.integers(len(self.views), size=len(rows)).tolist()
            kept = torch.stack([self.views[view][row] for view, row in zip(drawn, rows.tolist(), strict=True)])
        kept = kept.to(self.device, torch.float32)
        return kept.permute(0, 3, 1, 2).contiguous(memory_format=self.layout) if kept.dim() == 4 else kept


@dataclass(frozen=True)
class ImageInputs:
    """Images, augmented when a stream is given, normalised and passed through the frozen blocks each time."""

    model: Classifier
    samples: Samples
    size: int
    policy: Policy
    device: torch.device
    precision: FrozenPrecision = "float32"

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """float32 `(B, ...)` on the device."""
        images = self.samples.images[rows.numpy()]
        if stream is None:
            images = centre_crop(images, self.size)
        else:
            images = augment(images, self.policy, self.size, stream)
        prepared = self.model.prepare(torch.from_numpy(images).to(self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            return self.model.prefix(prepared).float()


@dataclass(frozen=True)
class SometimesTold:
    """Features of images fused with their captions, which are hidden from a share of them, anew each time.

    Attributes:
        alone: features of images alone.
        told: features of the same images with what captions they have.
        hidden: that share.
    """

    alone: CachedInputs
    told: CachedInputs
    hidden: float

    def __len__(self) -> int:
        return len(self.alone)

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """float32 `(B, d)`; `stream` decides whose caption is hidden, None hides all."""
        alone = self.alone.batch(rows, None)
        if stream is None:
            return alone
        hidden = torch.from_numpy(stream.random(len(rows)) < self.hidden).to(alone.device)
        return torch.where(hidden[:, None], alone, self.told.batch(rows, None))


def prefix_outputs(inputs: ImageInputs, stream: np.random.Generator | None, dtype: torch.dtype) -> Tensor:
    """Outputs of the frozen blocks for every image, laid out as `CachedInputs` keeps them, on the CPU.

    The batches have a fixed size, so that the result does not depend on how the images are used later.

    Raises:
        InputError: an output is too large for `dtype`.
    """
    parts = []
    with torch.inference_mode():
        for rows in torch.split(torch.arange(len(inputs.samples)), PREFIX_BATCH):
            output = inputs.batch(rows, stream)
            output = output.permute(0, 2, 3, 1) if output.dim() == 4 else output
            _check_range(output, dtype)
            parts.append(output.to("cpu", dtype).contiguous())
    return torch.cat(parts)


def _check_range(output: Tensor, dtype: torch.dtype) -> None:
    """An output beyond the type's range would become infinite in the cache."""
    largest = float(output.abs().max())
    if largest > torch.finfo(dtype).max:
        kind = str(dtype).removeprefix("torch.")
        raise InputError(
            f'training.cache_type = "{kind}" cannot hold the frozen blocks\' outputs, which reach {largest:.3g}; '
            'allowed here: "bfloat16", "float32"'
        )
