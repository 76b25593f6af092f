"""Networks of torchvision, cut into blocks."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from wardround.models.backbones.backbone import Backbone, average_pool, named
from wardround.models.backbones.dense_blocks import dense_blocks
from wardround.models.backbones.sources import Source, State, check_patches, uncuttable, unknown
from wardround.models.weights import url_state

FAMILIES = ("convnext", "densenet", "efficientnet", "resnet", "vit")


class TorchvisionSource(Source):
    """`torchvision:NAME`, any classification network of `torchvision.models` in one of our families."""

    prefix = "torchvision"

    def build(self, architecture: str, *, channels: int, image_size: int) -> nn.Module:
        """A torchvision network for 3-channel images whose last linear layer is an identity."""
        from torchvision import models

        if architecture not in (names := models.list_models(module=models)):
            raise unknown(f"torchvision:{architecture}", names)
        if architecture.startswith("vit_"):
            check_patches(f"torchvision:{architecture}", image_size, int(architecture.rpartition("_")[2]))
            return _headless(models.get_model(architecture, image_size=image_size))
        return _headless(models.get_model(architecture))

    def cut(self, network: nn.Module, architecture: str) -> Backbone:
        """Blocks of an EfficientNet, ResNet, DenseNet, ViT or ConvNeXt."""
        from torchvision import models

        name = f"torchvision:{architecture}"
        cutters = {
            models.EfficientNet: _efficientnet,
            models.ResNet: _resnet,
            models.DenseNet: _densenet,
            models.VisionTransformer: _transformer,
            models.ConvNeXt: _convnext,
        }
        cutter = cutters.get(type(network))
        if cutter is None:
            raise uncuttable(name, FAMILIES)
        preset = models.get_model_weights(architecture).DEFAULT.transforms()
        return cutter(network, name, mean=tuple(preset.mean), std=tuple(preset.std))

    def download(self, network: nn.Module, architecture: str, *, image_size: int) -> tuple[State, str]:
        """torchvision's default weights for the architecture."""
        from torchvision import models

        weights = models.get_model_weights(architecture).DEFAULT
        return url_state(f"torchvision:{architecture}", weights.url), f"torchvision {weights}"

    def adapt(self, state: State, network: nn.Module) -> State:
        """Rename the layers of old DenseNet files; resample a transformer's position embedding."""
        from torchvision.models import vision_transformer

        state = {re.sub(r"(denselayer\d+\.(?:norm|relu|conv))\.(\d)\.", r"\1\2.", key): v for key, v in state.items()}
        if not isinstance(network, vision_transformer.VisionTransformer) or "encoder.pos_embedding" not in state:
            return state
        adapted: State = vision_transformer.interpolate_embeddings(
            network.image_size, network.patch_size, state, reset_heads=True
        )
        return adapted


def _headless(network: Any) -> nn.Module:
    """Replace the last linear layer by an identity; norms inside a classifier stay."""
    if hasattr(network, "fc"):
        network.fc = nn.Identity()
    elif hasattr(network, "heads"):
        network.heads = nn.Identity()
    elif isinstance(network.classifier, nn.Sequential):
        network.classifier[-1] = nn.Identity()
    else:
        network.classifier = nn.Identity()
    body: nn.Module = network
    return body


def _efficientnet(network: Any, name: str, **norm: Any) -> Backbone:
    """features[0..n-2] one block each, the last stage together with the closing 1x1 convolution."""
    *blocks, last, closing = network.features
    return Backbone(
        name,
        "efficientnet",
        [*blocks, named(stage=last, closing=closing)],
        pool=average_pool(),
        features=closing[0].out_channels,
        dropout=network.classifier[0].p,
        **norm,
    )


def _resnet(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem (convolution, norm, ReLU, pooling) and four stages."""
    stem = named(conv=network.conv1, bn=network.bn1, act=network.relu, pool=network.maxpool)
    blocks = [stem, network.layer1, network.layer2, network.layer3, network.layer4]
    width = 512 * network.layer4[0].expansion
    return Backbone(name, "resnet", blocks, pool=average_pool(), features=width, **norm)


def _densenet(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem, dense blocks with their transitions, the last with the final norm and ReLU."""
    blocks = dense_blocks(network.features, act=nn.ReLU())
    width = network.features.norm5.num_features
    return Backbone(name, "densenet", blocks, pool=average_pool(), features=width, **norm)


def _convnext(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem, and each stage with the downsampling before it; pooling and its norm close the last."""
    stem, first, *rest = network.features
    stages = [named(downsample=down, stage=stage) for down, stage in zip(rest[::2], rest[1::2], strict=True)]
    stages[-1].add_module("pool", network.avgpool)
    stages[-1].add_module("norm", network.classifier[0])
    width = network.classifier[0].normalized_shape[0]
    return Backbone(name, "convnext", [stem, first, *stages], pool=nn.Flatten(1), features=width, **norm)


def _transformer(network: Any, name: str, **norm: Any) -> Backbone:
    """Patch embedding, transformer blocks, the last with the norm; pooling takes the class token."""
    *blocks, last = network.encoder.layers
    closing = named(block=last, norm=network.encoder.ln)
    return Backbone(
        name,
        "vit",
        [Embedding(network), *blocks, closing],
        pool=ClassToken(),
        features=network.hidden_dim,
        **norm,
    )


class Embedding(nn.Module):
    """The first part of a torchvision transformer: patches, class token, positions. To `(B, 1 + N, D)`."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.patches = network.conv_proj
        self.class_token = network.class_token
        self.positions = network.encoder.pos_embedding
        self.dropout = network.encoder.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, C, H, W)` to tokens."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), patches], dim=1)
        embedded: Tensor = self.dropout(tokens + self.positions)
        return embedded


class ClassToken(nn.Module):
    """Tokens `(B, 1 + N, D)` to the class token `(B, D)`."""

    def forward(self, tokens: Tensor) -> Tensor:
        """The first token."""
        return tokens[:, 0]
