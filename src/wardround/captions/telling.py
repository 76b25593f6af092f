"""What a client's network is told of its training images, and what it learns from that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.captions.contrast import caption_loss
from wardround.captions.embedding import EmbeddedCaptions
from wardround.captions.options import CaptionOptions
from wardround.models.caption_fusion import CaptionBatch, Heard


@dataclass(frozen=True)
class ClientCaptions:
    """What a client's training images are told.

    Attributes:
        texts: of its training images, in their order.
        options: the `[captions]` section.
    """

    texts: EmbeddedCaptions
    options: CaptionOptions

    def batch(self, rows: Tensor, device: torch.device) -> CaptionBatch:
        """The captions of the images `rows`, int64 `(B,)`."""
        return self.texts.batch(rows, device)

    def loss(self, heard: Heard) -> Tensor | None:
        """The contrastive loss of a batch, without its weight alpha.

        None where it has no weight, or where fewer than two images of the batch have a caption: there is nothing to
        tell apart then.
        """
        says, options = heard.captions.says, self.options
        if not options.alpha or int((says >= 0).sum()) < 2:
            return None
        assert heard.image is not None
        assert heard.caption is not None
        return caption_loss(heard.image, heard.caption, says, options.temperature, options.positives_by_meaning)
