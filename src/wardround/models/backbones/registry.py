"""Find a backbone by its name, build it from the seed, give it weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from wardround.errors import InputError, suggestion
from wardround.models.backbones.backbone import Backbone
from wardround.models.backbones.own_source import OwnSource
from wardround.models.backbones.sources import Source
from wardround.models.backbones.timm_source import TimmSource
from wardround.models.backbones.torchvision_source import TorchvisionSource
from wardround.models.encoders.bridge_source import BridgeSource
from wardround.models.encoders.open_clip_source import OpenClipSource
from wardround.models.weights import as_blocks, fit_state, quiet_hubs, read_state
from wardround.seeds import torch_scope

SOURCES: dict[str, Source] = {
    source.prefix: source
    for source in (TimmSource(), TorchvisionSource(), OwnSource(), OpenClipSource(), BridgeSource())
}
"""Prefix of a backbone's name -> where it comes from."""


def load_backbone(
    name: str,
    *,
    pretrained: bool | str,
    channels: int = 3,
    image_size: int = 224,
    seed: int,
    anchors: str | None = None,
) -> Backbone:
    """The backbone called `name`, cut into blocks.

    `pretrained`: True for published weights, False for random ones drawn from `seed`, or the path of a file.
    `channels` matters to the small networks of Wardround; the others always take 3, and grey images are
    repeated. `image_size` (pixels) matters to networks that are built for one size: transformers and the
    small CNN. `anchors` is a file of captioned images for an encoder whose weights are fitted here. Encoders come
    frozen, with a text side. Raises InputError for an unknown name, an architecture
    that cannot be cut, and weights that cannot be had or do not fit.
    """
    quiet_hubs()
    source, architecture = _resolve(name)
    with torch_scope(seed, "model"):
        network = source.build(architecture, channels=channels, image_size=image_size)
    backbone = source.cut(network, architecture)
    if pretrained is not False:
        _give_weights(backbone, network, source, architecture, pretrained, image_size, anchors)
    elif anchors is not None:
        raise InputError("model.anchors: goes with model.pretrained = true")
    if backbone.text is not None:
        backbone.logit_scale = backbone.text.logit_scale  # one of the weights
    return backbone


def has_text(name: str) -> bool:
    """Whether the backbone called `name` has a text side. InputError for a name of no source."""
    return _resolve(name)[0].has_text


def _resolve(name: str) -> tuple[Source, str]:
    """Split `timm:resnet18` into its source and the architecture."""
    prefix, colon, architecture = name.partition(":")
    if not colon:
        raise InputError(
            f"model.backbone = {name!r} names no source: write {' or '.join(f'{p}:{name}' for p in SOURCES)}"
        )
    if prefix not in SOURCES:
        raise InputError(f"model.backbone = {name!r}: unknown source {prefix!r}{suggestion(prefix, SOURCES)}")
    return SOURCES[prefix], architecture


def _give_weights(
    backbone: Backbone,
    network: nn.Module,
    source: Source,
    architecture: str,
    pretrained: bool | str,
    image_size: int,
    anchors: str | None,
) -> None:
    """Load weights into `network`, whose tensors the backbone shares, and note where they came from."""
    if anchors is not None:
        state, origin = source.anchored(architecture, Path(anchors), image_size=image_size)
    elif isinstance(pretrained, str):
        state, origin = read_state(pretrained), f"file {pretrained}"
    else:
        state, origin = source.download(network, architecture, image_size=image_size)
    # A classifier that was exported has no text side: what has one needs the library's whole file.
    own = as_blocks(state) if backbone.text is None else None
    if own is not None:
        fit_state(backbone, own, origin)
    else:
        fit_state(network, source.adapt(state, network), origin)
    backbone.pretrained, backbone.weights = pretrained, origin
