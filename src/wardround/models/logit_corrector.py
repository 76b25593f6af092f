"""The client-specific logit corrector of PAFP, whose published definition is lost: four readings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wardround.models.label_counts import KnowsLabelCounts
from wardround.models.options import CorrectorKind


class LogitCorrector(nn.Module, KnowsLabelCounts):
    """Correct logits z `(B, classes)` for the label frequencies of one client.

    With n_c the client's training images of class c and pi_c = (n_c + 1) / (N + C):

    =========  ==============================  ==================  ===========================================
    kind       in training                     at inference        reading
    =========  ==============================  ==================  ===========================================
    affine     a * z + b                       a * z + b           learned; a = 1, b = 0 at the start prior
    z + tau * log pi + b            z                   logit adjustment (balanced softmax); b learned fedlc
    z - tau * max(n, 1)^(-1/4)      z                   Zhang et al., FedLC, ICML 2022 posthoc    z
    z - tau * log pi    Menon et al., logit adjustment, ICLR 2021
    =========  ==============================  ==================  ===========================================

    Training and inference are told apart by the module's mode. The last three correct the same imbalance as
    class weights in the loss; with both, it is corrected twice. FedLC's margin is infinite for an absent
    class, hence max(n, 1). Only `affine` (scale, bias) and `prior` (bias) have state; counts belong to a
    client's data and are never part of it.
    """

    counts: Tensor

    def __init__(self, kind: CorrectorKind, classes: int, tau: float = 1.0) -> None:
        super().__init__()
        self.kind, self.tau = kind, tau
        self.register_buffer("counts", torch.zeros(classes), persistent=False)
        if kind == "affine":
            self.scale = nn.Parameter(torch.ones(classes))
        if kind in ("affine", "prior"):
            self.bias = nn.Parameter(torch.zeros(classes))

    def set_counts(self, counts: Sequence[int] | Tensor) -> None:
        """Tell the corrector whose data it corrects: training images per class, shape `(classes,)`.

        Until then every class counts as equally frequent. Raises ValueError for another length or a negative
        count.
        """
        given = torch.as_tensor(counts, dtype=self.counts.dtype)
        if given.shape != self.counts.shape or bool((given < 0).any()):
            raise ValueError(f"{len(self.counts)} counts >= 0 are needed, found {given.tolist()}")
        self.counts.copy_(given)

    @property
    def log_prior(self) -> Tensor:
        """log pi, shape `(classes,)`; finite for absent classes."""
        return ((self.counts + 1) / (self.counts.sum() + len(self.counts))).log()

    def forward(self, logits: Tensor) -> Tensor:
        """Corrected logits, shape `(B, classes)`."""
        if self.kind == "affine":
            return self.scale * logits + self.bias
        if self.kind == "posthoc":
            return logits if self.training else logits - self.tau * self.log_prior
        if not self.training:
            return logits
        if self.kind == "prior":
            return logits + self.tau * self.log_prior + self.bias
        return logits - self.tau * self.counts.clamp(min=1) ** -0.25
