"""FedLC: logits are calibrated by the client's own label counts before the cross-entropy."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from wardround.methods.base import FedAvg
from wardround.training.client import Step

Denominator = Literal["all", "others"]
Absent = Literal["mask", "plus-one"]


class FedLC(FedAvg):
    """Zhang et al., ICML 2022. Client k minimises the cross-entropy of `z_c - tau n_kc^(-1/4)`; it predicts with z.

    n_kc are client k's training images of class c: rare classes get the larger margin. The loss is the method's own, so
    `training.loss` and the class weights do not apply. The paper's denominator sums over the classes other than the
    label; that loss is unbounded below, and training can diverge. `others` gives it, the default is the ordinary
    softmax. The margin of an absent class would be infinite: `mask` takes it at its word, the class takes no part;
    `plus-one` counts one more image of every class. With tau = 0 this is federated averaging on the plain
    cross-entropy.
    """

    name: ClassVar[str] = "fedlc"
    title: ClassVar[str] = "FedLC: logits calibrated by local label counts"
    citation: ClassVar[str] = (
        "Zhang, Li, Li, Xu, Wu, Ding, Wu. Federated Learning with Label Distribution Skew via Logits Calibration. "
        "ICML 2022."
    )
    skews: ClassVar[tuple[str, ...]] = ("label",)

    tau: float = Field(1.0, ge=0, description="scale of the margins")
    denominator: Denominator = Field(
        "all", description="the softmax is over all classes, or, as published and unbounded below, without the label"
    )
    absent: Absent = Field(
        "mask", description="classes without images: out of the loss, or margins with one more image of every class"
    )

    def loss(self, step: Step) -> Tensor:
        """The calibrated loss of one batch, whatever `training.loss` says."""
        counts = step.client.counts.to(step.logits.device)
        shifts = margins(counts, self.tau, self.absent)
        return step.with_captions(calibrated_loss(step.logits, step.labels, shifts, self.denominator))


def margins(counts: Tensor, tau: float, absent: Absent) -> Tensor:
    """`tau n_c^(-1/4)` for label counts n_c `(C,)`. That of a class which is masked is huge, but finite.

    >>> margins(torch.tensor([16, 1, 0]), 1.0, "plus-one")[2]
    tensor(1.)
    """
    if absent == "plus-one" or not tau:
        return tau * (counts + 1) ** -0.25
    huge = torch.finfo(torch.float32).max / 4
    return torch.where(counts > 0, tau * counts.clamp(min=1) ** -0.25, huge)


def calibrated_loss(logits: Tensor, labels: Tensor, margins: Tensor, denominator: Denominator) -> Tensor:
    """Mean of `-log(e^g_y / sum_i e^g_i)` with g = z - margin, over logits z `(B, C)`; `others` sums over i != y.

    An image whose class has no rival, because all others are masked, has the loss 0 under `others`.
    """
    calibrated = logits - margins
    if denominator == "all":
        return functional.cross_entropy(calibrated, labels)
    own = calibrated.gather(1, labels[:, None]).squeeze(1)
    lowest = torch.finfo(logits.dtype).min
    rivals = calibrated.scatter(1, labels[:, None], lowest).logsumexp(1)
    return torch.where(rivals > lowest / 8, rivals - own, 0.0).mean()
