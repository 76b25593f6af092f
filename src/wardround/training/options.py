"""The `[training]` section: local training, the same choices for every method."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wardround.options import Options

LossName = Literal["focal", "cross-entropy", "balanced-softmax", "contrastive"]
ClassWeights = Literal["none", "raw", "balanced", "mean1"]


class TrainingOptions(Options):
    """How a client trains in a round."""

    local_epochs: int = Field(1, ge=1, description="passes over the client's images in a round")
    batch_size: int = Field(32, ge=1, description="images in a batch")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="made anew every round")
    lr: float = Field(0.01, gt=0, description="learning rate")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="of adam and adamw")
    adam_eps: float = Field(1e-8, gt=0, description="of adam and adamw")
    lr_decay: float = Field(1.0, gt=0, le=1, description="the learning rate is multiplied by this every round")
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(1e-4, ge=0, description="L2 penalty, as the optimiser understands it")
    clip_norm: float | None = Field(
        10.0, gt=0, description="largest gradient norm, for each group of an optimiser; none: no clipping"
    )
    loss: LossName = Field(
        "focal",
        description="the task loss; contrastive: CLIP's, symmetric over the batch's images and their classes, in which "
        "class weights take no part",
    )
    focal_gamma: float = Field(2.0, ge=0, description="focusing parameter of the focal loss")
    class_weights: ClassWeights = Field(
        "balanced",
        description="from the client's own label counts n_c: N/n_c (raw), N/(C n_c) (balanced; C classes present), "
        "raw scaled to mean 1 (mean1); an absent class weighs 0",
    )
    class_weight_clip: float | None = Field(None, gt=0, description="largest class weight")
    cache: bool = Field(True, description="run the frozen blocks once and keep their outputs")
    cache_type: Literal["float16", "bfloat16", "float32"] = Field("float16", description="how they are kept")
    cache_ram_mib: int = Field(2048, ge=0, description="memory for them, over all workers; the rest stays on disk")
    augment_views: int = Field(
        0,
        ge=0,
        description="with augmentation: keep this many augmented views an image instead of drawing anew",
    )
    threads: int = Field(1, ge=1, description="threads a worker computes with; results depend on it")
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        "auto", description="auto: a short self-test picks the faster, and config.toml records it"
    )
    precision: Literal["auto", "float32", "pointwise-bfloat16", "bfloat16"] = Field(
        "float32",
        description="of the trained blocks' arithmetic: pointwise-bfloat16 has 1x1 convolutions in bfloat16, bfloat16 "
        "all that autocast lets; auto: what the self-test finds fastest",
    )
    frozen_precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of the frozen blocks' arithmetic; bfloat16, where a processor has it, is about a third faster and "
        "changes features by some tenths of a percent",
    )
    depthwise: Literal["auto", "library", "shifts"] = Field(
        "auto", description="how weight gradients of large depthwise kernels are computed; same precision either way"
    )
    compile: Literal["auto", "off", "on"] = Field(
        "off",
        description="torch.compile the trained blocks: faster with depthwise = shifts, but each worker compiles for up "
        "to a minute first, so it pays in long runs alone; auto: what the self-test finds faster, once compiled",
    )
    device: str = Field("auto", description="auto (a GPU when there is one), cpu, cuda, cuda:1, mps")
