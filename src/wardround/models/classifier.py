"""The model that methods train: a frozen prefix, tuned blocks, a linear head, an optional logit corrector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Self

import torch
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models.backbones import Backbone, load_backbone
from wardround.models.logit_corrector import LogitCorrector
from wardround.models.options import ModelOptions
from wardround.models.prompts import Prompts, TextOptions, prompts_for
from wardround.models.text_head import AttentionAdapter, CosineHead, UnitLength
from wardround.seeds import torch_scope

Depth = int | Literal["all"]
ONE_MODALITY = ("image",)  # what images are where no source tells them apart


class Frozen(nn.Sequential):
    """Blocks that never train: no gradients, and eval mode whatever the model around them is set to.

    In training mode BatchNorm would move its running statistics although no parameter learns.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)


class Classifier(nn.Module):
    """A backbone whose last blocks train, with a linear head.

    uint8 images -> `prepare` -> `prefix` -> **h** -> (`before[i]`, `tuned[i]`) for each tuned block ->
    pooling -> `neck` -> dropout -> `head` -> `corrector`. The prefix never changes, so h can be computed once and kept:
    `forward` and `features` start from h. The backbone's blocks are taken over, not copied.

    `finetune_blocks` counts from the end; "all" freezes nothing, 0 trains the head alone. `dropout=None` takes the
    backbone's own rate. Raises InputError for more blocks than there are.

    Attributes:
        frozen: the blocks that stay as they were pretrained.
        tuned: the blocks that train.
        before: one module before each tuned block; the identity, until a method puts something there.
        neck: on the pooled features; the identity, until a method puts something there.
        head: `(B, features)` to `(B, classes)`.
        corrector: on the logits; the identity or a LogitCorrector.
        prompts: the classes in the encoder's text side, frozen; the identity where there is none.
        extras: what a method keeps beside the network, by name; empty, until a method puts something there.
        local_head: whether the head is meant to stay at its client; methods' rules ask.
        modalities: names of the kinds of images that the federation has.
        name: the backbone's.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        finetune_blocks: Depth,
        *,
        dropout: float | None = None,
        corrector: nn.Module | None = None,
        local_head: bool = False,
        modalities: Sequence[str] = ONE_MODALITY,
    ) -> None:
        super().__init__()
        cut = _first_tuned(backbone, finetune_blocks)
        self.name = backbone.name
        self.channels = backbone.channels
        self.normalise = backbone.normalise
        self.frozen = Frozen(*backbone.blocks[:cut])
        self.before = nn.ModuleList(nn.Identity() for _ in backbone.blocks[cut:])
        # An encoder's block comes frozen; what is tuned is not.
        self.tuned = nn.ModuleList(backbone.blocks[cut:]).requires_grad_(True)
        self.pool = backbone.pool
        self.neck: nn.Module = nn.Identity()
        self.dropout = nn.Dropout(backbone.dropout if dropout is None else dropout)
        self.head = nn.Linear(backbone.features, classes)
        self.local_head, self.modalities = local_head, tuple(modalities)
        self.corrector: nn.Module = nn.Identity() if corrector is None else corrector
        self.prompts: nn.Module = nn.Identity()
        self.extras = nn.ModuleDict()

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 images `(B, H, W, C)` to normalised float32 `(B, channels, H, W)`."""
        prepared: Tensor = self.normalise(images)
        return prepared

    @torch.no_grad()
    def prefix(self, x: Tensor) -> Tensor:
        """Normalised images to h, the output of the frozen blocks, without a graph."""
        h: Tensor = self.frozen(x)
        return h

    def inputs_of_pixels(self, pixels: Tensor) -> Tensor:
        """Pixels in 0..1, float32 `(B, H, W, C)`, to h, as `prepare` and `prefix` do, with a graph to the pixels."""
        h: Tensor = self.frozen(self.normalise.of_pixels(pixels))
        return h

    def features(self, h: Tensor) -> Tensor:
        """h to pooled features `(B, features)`, as the head takes them."""
        for before, block in zip(self.before, self.tuned, strict=True):
            h = block(before(h))
        pooled: Tensor = self.neck(self.pool(h))
        return pooled

    def classify(self, features: Tensor) -> Tensor:
        """Pooled features `(B, features)` to logits `(B, classes)`: dropout, head, corrector."""
        logits: Tensor = self.corrector(self.head(self.dropout(features)))
        return logits

    def forward(self, h: Tensor) -> Tensor:
        """h, the prefix's output (not images), to logits `(B, classes)`."""
        return self.classify(self.features(h))

    def logits_of_images(self, images: Tensor) -> Tensor:
        """uint8 images `(B, H, W, C)` to logits `(B, classes)`, through every part."""
        return self(self.prefix(self.prepare(images)))  # type: ignore[no-any-return]

    def site_shapes(self, image_size: int) -> list[tuple[int, ...]]:
        """Shape of each tuned block's input, without the batch: `(C, H, W)`, or `(N, D)` for tokens."""
        weight = self.head.weight
        x = torch.zeros(1, self.channels, image_size, image_size, dtype=weight.dtype, device=weight.device)
        shapes = []
        with torch.no_grad(), in_eval_mode(self):
            h = self.frozen(x)
            for block in self.tuned:
                shapes.append(tuple(h.shape[1:]))
                h = block(h)
        return shapes


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of `model` in eval mode for a while, then each back into the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def build_classifier(
    options: ModelOptions,
    classes: int | Sequence[str],
    channels: int,
    image_size: int,
    seed: int,
    text: TextOptions | None = None,
    modalities: Sequence[str] = ONE_MODALITY,
) -> Classifier:
    """The model that an experiment file asks for; the same seed gives the same weights everywhere.

    `classes` are their names, which an encoder's text side needs, or how many there are. `channels` and `image_size`
    (pixels) are those of the images, `text` the words for classes, `modalities` the kinds of images that the federation
    has. Raises InputError as `load_backbone` does, and for a number of blocks that the backbone does not have.
    """
    backbone = load_backbone(
        options.backbone,
        pretrained=options.pretrained,
        channels=channels,
        image_size=image_size,
        seed=seed,
        anchors=options.anchors,
    )
    kind = options.logit_corrector
    number = classes if isinstance(classes, int) else len(classes)
    corrector = None if kind == "none" else LogitCorrector(kind, number, options.corrector_tau)
    with torch_scope(seed, "head"):
        model = Classifier(
            backbone,
            number,
            options.finetune_blocks,
            dropout=options.dropout,
            corrector=corrector,
            local_head=options.head == "local",
            modalities=modalities,
        )
    if backbone.text is not None and not isinstance(classes, int):
        model.prompts = prompts_for(backbone.text, classes, text or TextOptions(), backbone.logit_scale, seed)
    with torch_scope(seed, "adapter"):
        _adapt(model, options)
    return model


def _adapt(model: Classifier, options: ModelOptions) -> None:
    """Put what `model.adapter` and `model.classifier` say behind the features.

    Raises:
        InputError: the encoder has no text side to compare with.
    """
    size = model.head.in_features
    if options.adapter == "attention":
        model.neck = AttentionAdapter(size)
    if options.classifier == "linear":
        return
    if not isinstance(model.prompts, Prompts):
        raise InputError(
            f'model.classifier = "text": {model.name!r} has no text side; take an encoder such as '
            'open_clip:ViT-B-32/openai or bridge:lite0-minilm, or "linear"'
        )
    model.neck = UnitLength() if options.adapter == "none" else model.neck
    model.head = CosineHead(model.prompts, size)  # type: ignore[assignment]


def _first_tuned(backbone: Backbone, finetune_blocks: Depth) -> int:
    """Index of the first block that trains. InputError where the backbone has fewer blocks."""
    total = len(backbone.blocks)
    if finetune_blocks == "all":
        return 0
    if not 0 <= finetune_blocks <= total:
        raise InputError(
            f"model.finetune_blocks = {finetune_blocks}: {backbone.name!r} has {total} blocks "
            f'(allowed: 0 to {total}, or "all")'
        )
    return total - finetune_blocks
