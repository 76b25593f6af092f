"""Cut the features of a DenseNet; torchvision and timm name their layers alike."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from wardround.models.backbones.backbone import named


def dense_blocks(features: nn.Sequential, **closing: nn.Module) -> list[nn.Module]:
    """Stem, then each dense block with the transition after it; the last with final norm and `closing`."""
    groups = list(_groups(features))
    groups[-1].update(closing)
    return [named(**group) for group in groups]


def _groups(features: nn.Sequential) -> Iterator[dict[str, nn.Module]]:
    """Named layers, a new group at each dense block."""
    group: dict[str, nn.Module] = {}
    for name, layer in features.named_children():
        if name.startswith("denseblock"):
            yield group
            group = {}
        group[name] = layer
    yield group
