"""The small networks that Wardround brings itself: `wardround:NAME`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from wardround.errors import InputError
from wardround.models.backbones.backbone import Backbone
from wardround.models.backbones.cnn import cnn
from wardround.models.backbones.resnet4 import resnet4
from wardround.models.backbones.sources import Source, State, unknown
from wardround.models.backbones.vit_tiny import vit_tiny

Factory = Callable[[int, int], Backbone]

FACTORIES: dict[str, Factory] = {
    "resnet4": lambda channels, size: resnet4(image_size=size),
    "resnet4-stride4": lambda channels, size: resnet4(image_size=size, stem_stride=4, name="resnet4-stride4"),
    "resnet4-lib": lambda channels, size: resnet4(image_size=size, width=64, stem_kernel=7, name="resnet4-lib"),
    "cnn": lambda channels, size: cnn(channels, size),
    "cnn-bn": lambda channels, size: cnn(channels, size, norm="bn"),
    "cnn-gn": lambda channels, size: cnn(channels, size, norm="gn"),
    "vit-tiny": vit_tiny,
}
"""Name -> function of (channels, image size in pixels)."""


class OwnSource(Source):
    """`wardround:NAME`."""

    prefix = "wardround"

    def build(self, architecture: str, *, channels: int, image_size: int) -> Backbone:
        """One of `FACTORIES`."""
        if architecture not in FACTORIES:
            raise unknown(f"wardround:{architecture}", FACTORIES)
        return FACTORIES[architecture](channels, image_size)

    def cut(self, network: nn.Module, architecture: str) -> Backbone:
        """Nothing to do: these are written as blocks."""
        assert isinstance(network, Backbone)
        return network

    def download(self, network: nn.Module, architecture: str, *, image_size: int) -> tuple[State, str]:
        """There are none."""
        raise InputError(
            f"model.pretrained = true, but nobody publishes weights for 'wardround:{architecture}': "
            "set model.pretrained to false or to a local file"
        )
