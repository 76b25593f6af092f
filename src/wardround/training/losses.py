"""Task losses, and the class weights that a client computes from its own labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from wardround.training.options import ClassWeights, TrainingOptions

HEAVY = 25.0  # a class weight above this is worth a warning
ContrastiveKind = Literal["instance", "supervised"]
TaskLoss = Callable[[Tensor, Tensor], Tensor]


def class_weights(counts: Tensor, kind: ClassWeights, clip: float | None = None) -> Tensor:
    """Weights `alpha_c` for label counts `n_c`, shape `(C,)`. An absent class weighs 0, never N/0.

    `raw` is N/n_c (as FLamby's baseline on pooled data), `balanced` is N/(C_present n_c), `mean1` is `raw` divided
    by its mean over the classes present, `none` is 1 for every class.

    >>> class_weights(torch.tensor([3, 1, 0]), "balanced")
    tensor([0.6667, 2.0000, 0.0000])
    """
    if kind == "none":
        return torch.ones(len(counts), device=counts.device)
    present = counts > 0
    raw = torch.where(present, counts.sum() / counts.clamp(min=1), 0.0)
    if kind == "balanced":
        raw = raw / present.sum().clamp(min=1)
    elif kind == "mean1":
        raw = raw * present.sum() / raw.sum().clamp(min=1e-12)
    return raw if clip is None else raw.clamp(max=clip)


def weight_cautions(counts: Mapping[str, Tensor], classes: Sequence[str], options: TrainingOptions) -> list[str]:
    """What to warn of when a client's class weights are so large that single images steer its training.

    Args:
        counts: by client, training images per class `(C,)`.
        classes: names of the classes.
        options: the `[training]` section.
    """
    found = []
    for client, images in counts.items():
        weights = class_weights(images, options.class_weights, options.class_weight_clip)
        heaviest = int(weights.argmax())
        if float(weights[heaviest]) > HEAVY:
            found.append(
                f"{client}: {float(weights[heaviest]):.0f} ({classes[heaviest]}, {int(images[heaviest])} of "
                f"{int(images.sum())} images)"
            )
    if not found:
        return []
    return [f"Large class weights: {'; '.join(found)}. Single images weigh heavily; class_weight_clip bounds them."]


def focal_loss(logits: Tensor, labels: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """`mean_i -alpha_y (1 - p_y)^gamma log p_y` over logits `(B, C)` (Lin et al., ICCV 2017; plain batch mean)."""
    log_p = functional.log_softmax(logits, dim=1).gather(1, labels[:, None]).squeeze(1)
    # 0^gamma has an infinite slope for gamma < 1, and p = 1 is reached in float32.
    doubt = (1 - log_p.exp()).clamp(min=torch.finfo(log_p.dtype).tiny)
    return (-weights[labels] * doubt**gamma * log_p).mean()


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """`mean_i -alpha_y log p_y`: unlike torch's weighted mean it does not divide by the batch's own weights."""
    return (weights[labels] * functional.cross_entropy(logits, labels, reduction="none")).mean()


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of `z + log n_c` (Ren et al., NeurIPS 2020). A class absent at this client takes no part."""
    log_counts = counts.clamp(min=1).to(logits.dtype).log()
    shift = torch.where(counts > 0, log_counts, torch.finfo(logits.dtype).min / 2)
    return cross_entropy(logits + shift, labels, weights)


def contrastive_loss(logits: Tensor, labels: Tensor, kind: ContrastiveKind) -> Tensor:
    """Symmetric InfoNCE (CLIP's loss) between the images of a batch and the prompts of their own classes, a scalar.

    `S_ij = s v_i . t_{y_j}`; the mean of the cross-entropies over rows and over columns. `instance` takes the diagonal
    for right, so that another image of the same class counts as wrong: the loss cannot fall below about `log(B / C)`.
    `supervised` spreads the target over all of the same class.

    Args:
        logits: `s v . t`, `(B, C)`.
        labels: int64 `(B,)`.
        kind: `instance` or `supervised`.
    """
    similarity = logits[:, labels]  # (B, B)
    if kind == "instance":
        target = torch.arange(len(labels), device=labels.device)
    else:
        same = (labels[:, None] == labels[None, :]).to(similarity.dtype)
        target = same / same.sum(1, keepdim=True)
    rows, columns = (functional.cross_entropy(s, target) for s in (similarity, similarity.T))
    return (rows + columns) / 2


def task_loss(options: TrainingOptions, counts: Tensor) -> TaskLoss:
    """The loss `(logits (B, C), labels (B,)) -> scalar` for a client with label counts `(C,)`."""
    if options.loss == "cross-entropy" and options.class_weights == "none":
        return functional.cross_entropy  # the same numbers in one operation
    if options.loss == "contrastive":
        return lambda logits, labels: contrastive_loss(logits, labels, "instance")
    weights = class_weights(counts, options.class_weights, options.class_weight_clip)
    if options.loss == "focal":
        return lambda logits, labels: focal_loss(logits, labels, weights, options.focal_gamma)
    if options.loss == "balanced-softmax":
        return lambda logits, labels: balanced_softmax(logits, labels, counts, weights)
    return lambda logits, labels: cross_entropy(logits, labels, weights)
