"""Encoders of the open_clip library (Ilharco et al., OpenCLIP, 2021): `open_clip:NAME`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import InputError
from wardround.models.backbones.backbone import Backbone
from wardround.models.backbones.sources import Source, State
from wardround.models.encoders.open_clip_names import Description, describe, from_hub, prefixed
from wardround.models.encoders.open_clip_text import OpenClipText
from wardround.models.encoders.text import freeze
from wardround.models.encoders.transformers_names import from_transformers
from wardround.models.weights import read_state


class OpenClipSource(Source):
    """CLIP and its relatives, as one frozen block with a text side.

    Names, after `open_clip:`:
        `ViT-B-32/openai`: an architecture and the tag of published weights (hub or its cache).
        `ViT-B-32`: the same without published weights; `model.pretrained` is a file or false.
        `hf-hub:ORG/NAME`: a repository in open_clip's format, such as BiomedCLIP.
        `PATH/TO/FOLDER`: such a repository, copied: `open_clip_config.json` and the weights.
        `PATH/TO/config.json`: an architecture of one's own; `model.pretrained` is a file or false.

    Files may also be in the format of the transformers library, in which PubMedCLIP is published.
    """

    prefix = "open_clip"
    has_text = True

    def build(self, architecture: str, *, channels: int, image_size: int) -> nn.Module:
        """Both towers with random weights, in float32. InputError for unknown names and wrong configurations.

        `image_size` does not matter: the tower scales images to the size that it was trained at.
        """
        return _create(describe(architecture))

    def cut(self, network: nn.Module, architecture: str) -> Backbone:
        """The image tower as one block, the text tower beside it."""
        about = describe(architecture)
        image, text = ImageTower(network.visual), OpenClipText(network, about)
        name = prefixed(architecture)
        backbone = Backbone(
            name, "clip", [image], pool=nn.Identity(), features=text.dim, mean=about.mean, std=about.std, text=text
        )
        freeze(network)
        return backbone.eval()

    def download(self, network: nn.Module, architecture: str, *, image_size: int) -> tuple[State, str]:
        """The published weights, from the hub, its cache or the folder that was named. InputError: none."""
        file, origin = describe(architecture).weights()
        return read_state(file), origin

    def adapt(self, state: State, network: nn.Module) -> State:
        """Bring a file to open_clip's present names and to this network's number of positions."""
        from open_clip import model as library
        from open_clip.convert import convert_state_dict

        state = dict(from_transformers(state))
        state = convert_state_dict(network, state)
        if hasattr(network, "text"):
            state = library.convert_to_custom_text_state_dict(state)
        for old in ("text.transformer.embeddings.position_ids", "input_resolution", "context_length", "vocab_size"):
            state.pop(old, None)
        if "logit_scale" in state and state["logit_scale"].numel() == 1:
            state["logit_scale"] = state["logit_scale"].reshape(network.state_dict()["logit_scale"].shape)
        library.resize_pos_embed(state, network)
        return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


class ImageTower(nn.Module):
    """An encoder's image side: normalised images `(B, 3, H, W)` to features `(B, D)`, float32, not normalised.

    Images of another size than the encoder's are scaled to it, bicubically as in CLIP's own preprocessing.
    """

    def __init__(self, visual: Any) -> None:
        super().__init__()
        self.visual = visual
        size = visual.image_size
        self.size: tuple[int, int] = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if tuple(x.shape[-2:]) != self.size:
            x = functional.interpolate(x, self.size, mode="bicubic", antialias=True)
        features = self.visual(x)
        # CoCa's image side returns its tokens as well.
        pooled: Tensor = features[0] if isinstance(features, tuple) else features
        return pooled.float()


def _create(about: Description) -> nn.Module:
    """The network of a description, without open_clip's factory, which would log and download."""
    import open_clip

    config = copy.deepcopy(about.config)
    custom = config.pop("custom_text", False) or "hf_model_name" in config["text_cfg"]
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    config["vision_cfg"]["timm_model_pretrained"] = False
    config["text_cfg"]["hf_model_pretrained"] = False
    try:
        network: nn.Module = from_hub(about.name, "its text network", lambda: kind(**config))
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise InputError(
            f"model.backbone = {about.name!r}: open_clip cannot build it ({type(error).__name__}: {error})"
        ) from error
    return network.to(torch.float32)
