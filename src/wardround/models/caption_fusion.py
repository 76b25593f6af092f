"""Captions in a network: projections of images and captions to one space, and their fusion by cross-attention (FM²)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wardround.models.classifier import Classifier

WIDTH = 256
HEADS = 2
DROPOUT = 0.3


@dataclass(frozen=True)
class CaptionBatch:
    """The captions of a batch of images, as a frozen text encoder sees them.

    Attributes:
        tokens: float32 `(B, T, D)`, 0 where there is no token.
        mask: bool `(B, T)`, where there is one; a row without any has no caption.
        says: int64 `(B,)`, what each caption counts as saying; -1 without a caption.
    """

    tokens: Tensor
    mask: Tensor
    says: Tensor

    def __len__(self) -> int:
        return len(self.says)

    def sentences(self) -> Tensor:
        """The mean of each caption's tokens, `(B, D)`; 0 without a caption."""
        return self.tokens.sum(1) / self.mask.sum(1, keepdim=True).clamp(min=1)

    def to(self, device: torch.device | None) -> CaptionBatch:
        """The same on a device; None leaves them where they are."""
        if device is None:
            return self
        return CaptionBatch(self.tokens.to(device), self.mask.to(device), self.says.to(device))

    def split(self, parts: int) -> list[CaptionBatch]:
        """This batch as smaller ones of nearly equal size, as `Tensor.tensor_split` cuts it."""
        pieces = (tensor.tensor_split(parts) for tensor in (self.tokens, self.mask, self.says))
        return [CaptionBatch(*piece) for piece in zip(*pieces, strict=True)]


class CaptionFusion(nn.Module):
    """`mean_n LayerNorm(x_n + CrossAttention(x_n, c))`: image tokens x ask, caption tokens c answer.

    An image without a caption attends to one learned token instead, the null caption, and to it alone. In training the
    captions of a share of the images are hidden, drawn anew each time from torch's global stream, so that the network
    learns to do without.

    The paper gives two heads and 256 dimensions. Residual, norm and mean are our reading, as is that all of this is
    shared: no caption can be read off it, and what is shared can predict by itself.

    Args:
        width: of tokens and of what comes out.
        heads: of the attention.
        dropout: the share of captions that are hidden.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS, dropout: float = DROPOUT) -> None:
        super().__init__()
        # Near 0, so that at first an image without a caption is fused with next to nothing.
        self.null = nn.Parameter(0.02 * torch.randn(width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, image: Tensor, caption: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Image tokens `(B, N, w)` and caption tokens `(B, T, w)`, bool `(B, T)` where there is one, to `(B, w)`.

        Without captions, every image attends to the null caption.
        """
        answers = self.null.expand(len(image), 1, -1)
        closed = torch.zeros(len(image), 1, dtype=torch.bool, device=image.device)
        if caption is not None and mask is not None:
            mask = self._hidden(mask)
            answers = torch.cat([answers.to(caption.dtype), caption], dim=1)
            closed = torch.cat([mask.any(1, keepdim=True), ~mask], dim=1)
        attended, _ = self.attention(image, answers, answers, key_padding_mask=closed, need_weights=False)
        fused: Tensor = self.norm(image + attended).mean(1)
        return fused

    def _hidden(self, mask: Tensor) -> Tensor:
        """`mask` without the captions that are hidden this time."""
        if not self.training or not self.dropout:
            return mask
        return mask & (torch.rand(len(mask), 1, device=mask.device) >= self.dropout)


@dataclass
class Heard:
    """What a network made of a batch of images with captions.

    Attributes:
        captions: the batch's.
        image: v, the projected image features `(B, w)`; None before the network ran.
        caption: t, the projected caption embeddings `(B, w)`; rows without a caption mean nothing.
    """

    captions: CaptionBatch
    image: Tensor | None = None
    caption: Tensor | None = None


class _Ear:
    """Holds what is heard at the moment. A copy hears nothing: it would go on doing so when the block has ended."""

    heard: Heard | None = None

    def __deepcopy__(self, memo: object) -> _Ear:
        return _Ear()


class CaptionedPool(nn.Module):
    """Stands in the place of a classifier's pooling: output of the last block -> pooled features.

    With a fusion, image tokens (the places of a feature map, or a transformer's tokens) go through P_v and are fused
    with caption tokens, which go through P_t. Without one, features are pooled as ever, and P_v of them is only there
    to be contrasted with P_t of captions.

    Captions come in through `listening`; without it, images have none. So whoever runs the network needs to know
    nothing of captions, and whoever evaluates it cannot give it one by mistake.

    Args:
        pool: the backbone's pooling.
        features: what it puts out.
        text_features: D of caption tokens; None where there will be no captions, as at a server or in a prediction.
        fusion: fuses; None for the loss alone.
        width: of P_v and P_t, and of the fusion.

    Attributes:
        image: P_v, part of what is shared.
        text: P_t, which stays at its client as the captions do; the identity where there are none.
        out_features: of the pooled features.
    """

    def __init__(
        self,
        pool: nn.Module,
        features: int,
        text_features: int | None,
        fusion: CaptionFusion | None,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.pool, self.features = pool, features
        self.image = nn.Linear(features, width)
        self.text: nn.Module = nn.Identity() if text_features is None else nn.Linear(text_features, width)
        self.fusion = fusion
        self.out_features = features if fusion is None else width
        self._ear = _Ear()

    @contextmanager
    def listening(self, captions: CaptionBatch | None) -> Iterator[Heard | None]:
        """Within the block, the images that the network sees have these captions; None for none.

        Raises:
            ValueError: in the block, where the network sees another number of images.
        """
        ear, before = self._ear, self._ear.heard
        ear.heard = None if captions is None else Heard(captions)
        try:
            yield ear.heard
        finally:
            ear.heard = before

    def forward(self, h: Tensor) -> Tensor:
        """`(B, C, H, W)`, `(B, N, D)` or `(B, D)` to `(B, out_features)`."""
        heard = self._ear.heard
        if heard is not None and len(heard.captions) != len(h):
            raise ValueError(f"captions of {len(heard.captions)} images for {len(h)} images")
        if self.fusion is None:
            pooled: Tensor = self.pool(h)
            if heard is not None:
                heard.image, heard.caption = self.image(pooled), self.text(heard.captions.sentences())
            return pooled
        tokens = self.image(image_tokens(h, self.pool, self.features))
        return self._fused(self.fusion, tokens, heard)

    def _fused(self, fusion: CaptionFusion, tokens: Tensor, heard: Heard | None) -> Tensor:
        """Projected image tokens `(B, N, w)` to `(B, w)`, with the captions that there are."""
        if heard is None:
            alone: Tensor = fusion(tokens)
            return alone
        heard.image, heard.caption = tokens.mean(1), self.text(heard.captions.sentences())
        fused: Tensor = fusion(tokens, self.text(heard.captions.tokens), heard.captions.mask)
        return fused


def telling(model: Classifier, captions: CaptionBatch | None) -> AbstractContextManager[Heard | None]:
    """Within the block, the images that `model` sees have these captions; None, or a model that takes none, for none.

    Outside of such a block no network is ever told a caption.
    """
    return model.pool.listening(captions) if isinstance(model.pool, CaptionedPool) else nullcontext()


def caption_projection(model: Classifier) -> list[nn.Module]:
    """P_t, which stays at its client with the captions; empty for a model that takes none."""
    return [model.pool.text] if isinstance(model.pool, CaptionedPool) else []


def image_tokens(h: Tensor, pool: nn.Module, features: int) -> Tensor:
    """What a backbone's last block puts out, as tokens `(B, N, features)`.

    A feature map's places in either layout, a transformer's tokens, and otherwise the pooled features as one token.
    """
    if h.dim() == 4 and h.shape[1] == features:
        return h.flatten(2).transpose(1, 2)
    if h.dim() in (3, 4) and h.shape[-1] == features:
        return h.flatten(1, -2)
    pooled: Tensor = pool(h)
    return pooled[:, None]
