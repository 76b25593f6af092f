"""The `[model]` section of an experiment file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from wardround.options import Options

CorrectorKind = Literal["affine", "prior", "fedlc", "posthoc"]


class ModelOptions(Options):
    """Which network is trained, from which weights, and how much of it."""

    backbone: str = Field(
        "timm:tf_efficientnet_lite0",
        description="Network: timm:NAME, torchvision:NAME or wardround:NAME (see `wardround backbones`).",
    )
    pretrained: bool | Annotated[str, Field(min_length=1)] = Field(
        True,
        description="true: published weights, from an installed package or a hub. false: random weights "
        "from the seed. A path, relative to the experiment file or the working directory: a .safetensors or .pth file.",
    )
    anchors: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="bridge:lite0-minilm: a CSV file of `image` (relative to its folder) and `caption`; the map from "
        "images to text is fitted to these pairs as well. A few for each word that matters lift zero-shot from chance.",
    )
    finetune_blocks: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        2,
        description='How many of the last blocks train; the rest is frozen. 0: the head only. "all": all.',
    )
    head: Literal["local", "shared"] = Field(
        "local",
        description="Whether the linear head stays at its client (the reading that matches PAFP's published "
        "count) or travels with the shared blocks.",
    )
    classifier: Literal["linear", "text"] = Field(
        "linear",
        description="linear: a head that trains. text: scaled cosines with the classes' prompts, for encoders that "
        "have a text side; nothing of it trains.",
    )
    adapter: Literal["none", "attention"] = Field(
        "none",
        description="attention: FedCLIP's adapter between features and head, `softmax(W2 tanh(W1 I)) * I` at length 1; "
        "shared.",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Dropout rate before the head. Not set: the backbone's own (0.2 for EfficientNets).",
    )
    logit_corrector: Literal["none"] | CorrectorKind = Field(
        "none",
        description="Client-specific correction of the logits for the client's label frequencies. affine: "
        "learned scale and shift; prior: log-prior added in training; fedlc: margin n^(-1/4) in training; "
        "posthoc: log-prior removed at inference.",
    )
    corrector_tau: float = Field(1.0, ge=0, description="Strength tau of the corrector kinds prior, fedlc and posthoc.")
