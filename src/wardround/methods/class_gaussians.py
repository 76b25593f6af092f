"""One Gaussian a class: what clients measure of their features, and what the server pools, draws and learns from.

A covariance is a matrix `(d, d)`, or the variances `(d,)` where only its diagonal is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from wardround import seeds
from wardround.training.batches import shuffled_batches

BATCH, MOMENTUM = 64, 0.9  # those of smduan/Fed-CCVR, where no official code is known


def class_moments(features: Tensor, labels: Tensor, classes: int, diagonal: bool) -> dict[str, Tensor]:
    """A client's `count` `(C,)`, `mean` `(C, d)` and unbiased `covariance` of each class, of features `(N, d)`.

    The covariance of fewer than two images is 0, and so is the mean of none.
    """
    moments = [_moments(features[labels == c].double(), diagonal) for c in range(classes)]
    return {name: torch.stack([of[name] for of in moments]).float() for name in ("count", "mean", "covariance")}


def _moments(rows: Tensor, diagonal: bool) -> dict[str, Tensor]:
    mean = rows.sum(0) / max(len(rows), 1)
    scatter = (rows - mean).square().sum(0) if diagonal else (rows - mean).T @ (rows - mean)
    return {"count": torch.tensor(len(rows)), "mean": mean, "covariance": scatter / max(len(rows) - 1, 1)}


class ClassGaussians:
    """The Gaussians of all clients' images together, from each client's `class_moments`, in float64.

    Clients are merged one at a time (Chan, Golub, LeVeque, 1983), which is the pooled covariance of CCVR's equation 4,

        (n - 1) Sigma = sum_k (n_k - 1) Sigma_k + sum_k n_k mu_k mu_k^T - n mu mu^T,

    without the difference of its large numbers and without keeping what clients have sent.

    Attributes:
        counts: images per class, `(C,)`.
        means: `(C, d)`; 0 for an absent class.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        """Start without images; `shape` is that of the covariances, `(C, d, d)` or `(C, d)`."""
        self.counts = torch.zeros(shape[0], dtype=torch.float64)
        self.means = torch.zeros(shape[0], shape[1], dtype=torch.float64)
        self._scatter = torch.zeros(tuple(shape), dtype=torch.float64)

    def add(self, count: Tensor, mean: Tensor, covariance: Tensor) -> None:
        """Count in a client's moments."""
        for label in count.nonzero().flatten().tolist():
            before, own = float(self.counts[label]), float(count[label])
            step = mean[label].double() - self.means[label]
            between = step.square() if covariance.dim() == 2 else torch.outer(step, step)
            self._scatter[label] += (own - 1) * covariance[label].double() + before * own / (before + own) * between
            self.means[label] += own / (before + own) * step
            self.counts[label] += own

    def covariance(self, label: int, shrunk: bool = False) -> Tensor:
        """The unbiased covariance of one class, as it is or as `shrink` makes it; 0 for a single image."""
        n = float(self.counts[label])
        plain = self._scatter[label] / max(n - 1, 1)
        return shrink(plain, n) if shrunk else plain

    def draw(self, number: int, seed: int, shrunk: bool = False) -> tuple[Tensor, Tensor]:
        """`number` features of each class that has images, `(M, d)` and float32, and their labels `(M,)`."""
        found: list[int] = self.counts.nonzero().flatten().tolist()
        streams = [seeds.torch_stream(seed, f"virtual features {label}") for label in found]
        drawn = [self._sample(c, number, stream, shrunk) for c, stream in zip(found, streams, strict=True)]
        nothing = self.means[:0]
        return torch.cat([nothing, *drawn]).float(), torch.tensor(found).long().repeat_interleave(number)

    def _sample(self, label: int, number: int, stream: torch.Generator, shrunk: bool) -> Tensor:
        covariance = self.covariance(label, shrunk)
        noise = torch.randn(number, self.means.shape[1], generator=stream, dtype=torch.float64)
        if covariance.dim() == 1:
            return self.means[label] + noise * covariance.clamp(min=0).sqrt()
        values, vectors = torch.linalg.eigh(covariance)
        # The symmetric root does not depend on the eigenvectors that a library happens to choose.
        root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
        return self.means[label] + noise @ root


def shrink(covariance: Tensor, n: float) -> Tensor:
    """`(1 - rho) S + rho tr(S)/d I` for the covariance S `(d, d)` of n images, with the oracle-approximating rho.

    `rho = ((1 - 2/d) tr(S^2) + tr(S)^2) / ((n + 1 - 2/d) (tr(S^2) - tr(S)^2 / d))`, at most 1 (Chen, Wiesel, Eldar,
    Hero, IEEE Transactions on Signal Processing 2010, equation 23). It needs no images, only S.
    """
    d, trace, square = len(covariance), float(covariance.trace()), float(covariance.square().sum())
    far = (n + 1 - 2 / d) * (square - trace**2 / d)
    rho = min(((1 - 2 / d) * square + trace**2) / far, 1.0) if far > 0 else 1.0
    return (1 - rho) * covariance + rho * trace / d * torch.eye(d, dtype=covariance.dtype)


def retrain(
    head: Sequence[Tensor], features: Tensor, labels: Tensor, epochs: int, lr: float, order: torch.Generator
) -> list[Tensor]:
    """The linear classifier `head`, weight `(C, d)` and bias `(C,)`, after epochs of SGD on `features` `(M, d)`."""
    parameters = [tensor.clone().requires_grad_() for tensor in head]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)
    for _ in range(epochs):
        for rows in shuffled_batches(len(labels), BATCH, order):
            optimizer.zero_grad()
            loss = functional.cross_entropy(functional.linear(features[rows], *parameters), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [parameter.detach() for parameter in parameters]
