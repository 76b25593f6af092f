"""A vision transformer small enough for tests and teaching."""

from __future__ import annotations

from wardround.models.backbones.backbone import Backbone
from wardround.models.backbones.timm_source import cut_transformer


def vit_tiny(channels: int, image_size: int) -> Backbone:
    """Width 64, four blocks, four heads; the largest patch of 16, 8, 4, 2 or 1 pixels with at least a 4x4 grid.

    Built from timm's transformer, so that it is cut as the large ones are.
    """
    from timm.models import VisionTransformer

    patch = next((p for p in (16, 8, 4, 2) if image_size % p == 0 and image_size >= 4 * p), 1)
    network = VisionTransformer(
        img_size=image_size,
        patch_size=patch,
        in_chans=channels,
        num_classes=0,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
    )
    half = (0.5,) * channels
    return cut_transformer(network, "wardround:vit-tiny", mean=half, std=half)
