"""Where a network comes from: a source builds, cuts and downloads the architectures that it names."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models.backbones.backbone import Backbone

State = dict[str, Tensor]


class Source(ABC):
    """One prefix of backbone names: `timm`, `torchvision` or `wardround`."""

    prefix: str
    has_text: bool = False

    @abstractmethod
    def build(self, architecture: str, *, channels: int, image_size: int) -> nn.Module:
        """The network with random weights and no classifier. InputError for an unknown name."""

    @abstractmethod
    def cut(self, network: nn.Module, architecture: str) -> Backbone:
        """The blocks of `network`, sharing its tensors. InputError where we do not know how to cut it."""

    @abstractmethod
    def download(self, network: nn.Module, architecture: str, *, image_size: int) -> tuple[State, str]:
        """The published weights under the network's own names, and where they came from. InputError: none."""

    def anchored(self, architecture: str, anchors: Path, *, image_size: int) -> tuple[State, str]:
        """Weights that are fitted to the captioned images of `anchors`, and where they came from.

        Raises:
            InputError: this source fits none.
        """
        raise InputError(f"model.anchors: {self.prefix}:{architecture} fits nothing; only bridge:lite0-minilm does")

    def adapt(self, state: State, network: nn.Module) -> State:
        """Bring a file's weights to this network: old names, another number of positions."""
        return state


def unknown(name: str, known: Iterable[str]) -> InputError:
    """The error for a backbone that does not exist, with the names nearest to it."""
    prefix, _, architecture = name.partition(":")
    near = difflib.get_close_matches(architecture, list(known), n=3, cutoff=0.4)
    hint = f"; nearest: {', '.join(f'{prefix}:{found}' for found in near)}" if near else ""
    return InputError(f"model.backbone = {name!r} does not exist{hint} (`wardround backbones` lists them)")


def uncuttable(name: str, families: Iterable[str]) -> InputError:
    """The error for an architecture that we cannot cut into blocks."""
    return InputError(
        f"model.backbone = {name!r} cannot be cut into blocks; these families of architectures can: "
        f"{', '.join(sorted(families))}"
    )


def check_patches(name: str, image_size: int, patch: int) -> None:
    """A vision transformer tiles the image with square patches. InputError where they do not fit."""
    if image_size % patch:
        below, above = image_size - image_size % patch, image_size + patch - image_size % patch
        raise InputError(
            f"model.backbone = {name!r} needs an image size divisible by {patch}, found {image_size} "
            f"(nearest: {below or above} or {above})"
        )
