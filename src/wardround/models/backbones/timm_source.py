"""Networks of the timm library (Wightman, PyTorch Image Models), cut into blocks."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models.backbones.backbone import Backbone, named
from wardround.models.backbones.dense_blocks import dense_blocks
from wardround.models.backbones.sources import Source, State, check_patches, uncuttable, unknown
from wardround.models.weights import hub_file, packaged_state

FAMILIES = ("convnext", "densenet", "efficientnet", "resnet", "vit")


class TimmSource(Source):
    """`timm:NAME`, with or without the tag of the weights (`timm:resnet18.a1_in1k`)."""

    prefix = "timm"

    def build(self, architecture: str, *, channels: int, image_size: int) -> nn.Module:
        """A timm network for 3-channel images, without classifier; transformers for one `image_size`."""
        import timm

        _check_exists(architecture)
        network = _create(architecture, image_size)
        patch = getattr(getattr(network, "patch_embed", None), "patch_size", None)
        if isinstance(network, timm.models.VisionTransformer) and patch:
            check_patches(f"timm:{architecture}", image_size, patch[0])
        return network

    def cut(self, network: nn.Module, architecture: str) -> Backbone:
        """Blocks of an EfficientNet, ResNet, DenseNet, ViT or ConvNeXt."""
        from timm import models

        name = f"timm:{architecture}"
        cutters = {
            models.EfficientNet: _efficientnet,
            models.ResNet: _resnet,
            models.DenseNet: _densenet,
            models.VisionTransformer: cut_transformer,
            models.ConvNeXt: _convnext,
        }
        # Exact types: a subclass may run its parts in another order.
        cutter = cutters.get(type(network))
        if cutter is None:
            raise uncuttable(name, FAMILIES)
        config: Any = network.pretrained_cfg
        return cutter(network, name, mean=config["mean"], std=config["std"])

    def download(self, network: nn.Module, architecture: str, *, image_size: int) -> tuple[State, str]:
        """From an installed package where there is one (Lite0), else from the Hugging Face hub."""
        packaged = packaged_state(f"timm:{architecture}", network)
        if packaged is not None:
            return packaged
        config: Any = network.pretrained_cfg
        repository = config.get("hf_hub_id")
        if not repository:
            raise InputError(f"timm publishes no weights for {architecture!r}: set model.pretrained to false or a file")
        file = hub_file(f"timm:{architecture}", repository)
        donor = _create(architecture, image_size, pretrained=True, pretrained_cfg_overlay={"file": str(file)})
        return donor.state_dict(), f"hub {repository}"

    def adapt(self, state: State, network: nn.Module) -> State:
        """Resample a transformer's position embedding to the network's grid of patches."""
        from timm.models import vision_transformer

        if type(network) is not vision_transformer.VisionTransformer or "pos_embed" not in state:
            return state
        adapted: State = vision_transformer.checkpoint_filter_fn(state, network)
        return adapted


def _check_exists(architecture: str) -> None:
    """InputError for an unknown architecture or an unknown tag."""
    import timm

    base, _, tag = architecture.partition(".")
    if not timm.is_model(base):
        raise unknown(f"timm:{architecture}", timm.list_models())
    if tag and architecture not in (tags := timm.list_pretrained(f"{base}.*")):
        raise unknown(f"timm:{architecture}", tags)


def _create(architecture: str, image_size: int, **options: Any) -> nn.Module:
    """A timm network without classifier. Only transformers have a size; others refuse the argument."""
    import timm

    if timm.models.is_model_in_modules(architecture.partition(".")[0], ["vision_transformer"]):
        options["img_size"] = image_size
    network: nn.Module = timm.create_model(architecture, num_classes=0, **options)
    return network


def _efficientnet(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem, stages; the last stage with the closing 1x1 convolution and its norm.

    timm's own default has no dropout; 0.2 is what the architecture was published with.
    """
    stem = named(conv=network.conv_stem, bn=network.bn1)
    *stages, last = network.blocks
    closing = named(stage=last, conv=network.conv_head, bn=network.bn2)
    blocks = [stem, *stages, closing]
    return Backbone(
        name,
        "efficientnet",
        blocks,
        pool=network.global_pool,
        features=network.num_features,
        dropout=0.2,
        **norm,
    )


def _resnet(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem (convolution, norm, ReLU, pooling) and four stages."""
    stem = named(conv=network.conv1, bn=network.bn1, act=network.act1, pool=network.maxpool)
    blocks = [stem, network.layer1, network.layer2, network.layer3, network.layer4]
    return Backbone(name, "resnet", blocks, pool=network.global_pool, features=network.num_features, **norm)


def _densenet(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem, dense blocks with transitions, the last with the final norm (timm's includes the ReLU)."""
    blocks = dense_blocks(network.features)
    return Backbone(name, "densenet", blocks, pool=network.global_pool, features=network.num_features, **norm)


def _convnext(network: Any, name: str, **norm: Any) -> Backbone:
    """Stem and stages; the last stage ends with pooling and the norm after it, which has parameters."""
    *stages, last = network.stages
    closing = named(stage=last, norm_pre=network.norm_pre, head=network.head)
    blocks = [network.stem, *stages, closing]
    return Backbone(name, "convnext", blocks, pool=nn.Identity(), features=network.head_hidden_size, **norm)


def cut_transformer(network: Any, name: str, **norm: Any) -> Backbone:
    """Patch embedding, transformer blocks; the last block ends with the norm and the pooled token."""
    if network.attn_pool is not None:
        raise InputError(
            f"model.backbone = {name!r} pools by attention; transformers with a token or a mean can be cut"
        )
    *blocks, last = network.blocks
    pooled = TokenPool(network.global_pool, network.num_prefix_tokens, network.pool_include_prefix)
    closing = named(block=last, norm=network.norm, pooled=pooled, norm_pooled=network.fc_norm)
    return Backbone(
        name,
        "vit",
        [Embedding(network), *blocks, closing],
        pool=nn.Identity(),
        features=network.num_features,
        **norm,
    )


class Embedding(nn.Module):
    """The first part of a timm transformer: patches, class token, positions. To `(B, N, D)`."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        # A shallow copy without what follows: its forward_features is the embedding, in every timm variant.
        embedding = copy.copy(network)
        embedding._modules = dict(network._modules)
        embedding.blocks = nn.Sequential()
        embedding.norm = embedding.fc_norm = embedding.head = nn.Identity()
        self.tokens = embedding

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, C, H, W)` to tokens."""
        tokens: Tensor = self.tokens.forward_features(x)
        return tokens


class TokenPool(nn.Module):
    """Tokens `(B, N, D)` to one vector `(B, D)`: the class token, or a mean or maximum over patches."""

    def __init__(self, kind: str, prefix_tokens: int, include_prefix: bool) -> None:
        super().__init__()
        self.kind, self.prefix_tokens, self.include_prefix = kind, prefix_tokens, include_prefix

    def forward(self, tokens: Tensor) -> Tensor:
        """Pool as timm does."""
        from timm.models.vision_transformer import global_pool_nlc

        pooled: Tensor = global_pool_nlc(tokens, self.kind, self.prefix_tokens, self.include_prefix)
        return pooled
