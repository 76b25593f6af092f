"""Where a classifier's inputs come from: cached outputs of its frozen blocks, or images on the fly.

`Classifier.forward` takes what the frozen blocks put out. For images that do not change between epochs that output
is computed once, kept in half precision and shared by all methods and seeds with the same frozen weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from wardround.data import Samples
from wardround.data.transforms import Policy, augment, centre_crop
from wardround.models.classifier import Classifier

PREFIX_BATCH = 64


class Inputs(Protocol):
    """Inputs of a classifier by row."""

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """What `Classifier.forward` takes for `rows`; `stream` decides the augmentation, None for none."""


@dataclass(frozen=True)
class CachedInputs:
    """Outputs of the frozen blocks, kept in half precision in memory or in a mapped file.

    Attributes:
        outputs: `(views, N, ...)`; images of shape `(C, H, W)` are kept as `(H, W, C)`, which a channels-last
            network reads without a copy.
        device: where batches are needed.
    """

    outputs: Tensor
    device: torch.device

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """float32 `(B, ...)`; with several views, each image's view is drawn from `stream`."""
        views = len(self.outputs)
        if views == 1 or stream is None:
            kept = self.outputs[0, rows]
        else:
            kept = self.outputs[torch.from_numpy(stream.integers(views, size=len(rows))), rows]
        kept = kept.to(self.device, torch.float32)
        return kept.permute(0, 3, 1, 2) if kept.dim() == 4 else kept


@dataclass(frozen=True)
class ImageInputs:
    """Images, augmented when a stream is given, normalised and passed through the frozen blocks each time."""

    model: Classifier
    samples: Samples
    size: int
    policy: Policy
    device: torch.device

    def batch(self, rows: Tensor, stream: np.random.Generator | None) -> Tensor:
        """float32 `(B, ...)` on the device."""
        images = self.samples.images[rows.numpy()]
        if stream is None:
            images = centre_crop(images, self.size)
        else:
            images = augment(images, self.policy, self.size, stream)
        return self.model.prefix(self.model.prepare(torch.from_numpy(images).to(self.device)))


def prefix_outputs(inputs: ImageInputs, stream: np.random.Generator | None, dtype: torch.dtype) -> Tensor:
    """Outputs of the frozen blocks for every image, laid out as `CachedInputs` keeps them, on the CPU.

    The batches have a fixed size, so that the result does not depend on how the images are used later.
    """
    parts = []
    with torch.inference_mode():
        for rows in torch.split(torch.arange(len(inputs.samples)), PREFIX_BATCH):
            output = inputs.batch(rows, stream)
            output = output.permute(0, 2, 3, 1) if output.dim() == 4 else output
            parts.append(output.to("cpu", dtype).contiguous())
    return torch.cat(parts)
