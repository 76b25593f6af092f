"""LP++'s classifier: class prototypes blended with prompts, and the steps that its curvature allows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.models.prompts import Aside, Prompts

SMALLEST = 1e-12  # of a block's curvature: where it is 0, so is the gradient


class BlendedHead(nn.Module):
    """In the place of a linear head: logits `v . (w_c + alpha_c t_c)`. It starts as the prompts at the encoder's scale.

    Args:
        prompts: the classes t_c, which stay the model's own.
        size: D.
    """

    def __init__(self, prompts: Prompts, size: int) -> None:
        super().__init__()
        self.in_features, self.out_features = size, len(prompts.names)
        self.prototypes = nn.Parameter(torch.zeros(self.out_features, size))
        self.alpha = nn.Parameter(torch.full((self.out_features,), float(prompts.scale)))
        self._aside = Aside(prompts)

    @property
    def text(self) -> Tensor:
        """t, `(C, D)`, of length 1."""
        vectors: Tensor = self._aside.value.vectors
        return vectors

    @property
    def weight(self) -> Tensor:
        """Prototypes and prompts together, `(C, D)`."""
        return self.prototypes + self.alpha[:, None] * self.text

    def forward(self, v: Tensor) -> Tensor:
        """Vectors of length 1 `(B, D)` to logits `(B, C)`."""
        return functional.linear(v, self.weight)


@torch.no_grad()
def descend(head: BlendedHead, features: Tensor, labels: Tensor, cycles: int, w_steps: int) -> Tensor:
    """Lower the mean cross-entropy by `cycles` times `w_steps` steps on the prototypes w and one on alpha.

        w     <- w     - 4N / lambda_max(V^T V)             dL/dw
        alpha <- alpha - 4N / max_c sum_i (v_i . t_c)^2     dL/dalpha

    A step is the inverse of a bound on the curvature of one class's part of its block. All classes move at once, for
    which the curvature is at most twice that, so that no step makes the loss rise.

    Args:
        head: changed in place.
        features: V, all of a client's, `(N, D)`, of length 1.
        labels: int64 `(N,)`.
        cycles, w_steps: see above.

    Returns:
        The loss before each step, `(cycles * (w_steps + 1),)`.
    """
    cosines, losses = functional.linear(features, head.text), []
    w_rate = 4 * len(labels) / max(largest_eigenvalue(features), SMALLEST)
    alpha_rate = 4 * len(labels) / max(float(cosines.square().sum(0).max()), SMALLEST)
    for step in range(1, cycles * (w_steps + 1) + 1):
        logits = head(features)
        losses.append(functional.cross_entropy(logits, labels))
        slope = (torch.softmax(logits, 1) - functional.one_hot(labels, head.out_features)) / len(labels)
        if step % (w_steps + 1):
            head.prototypes.sub_(slope.T @ features, alpha=w_rate)
        else:
            head.alpha.sub_((slope * cosines).sum(0), alpha=alpha_rate)
    return torch.stack(losses)


def largest_eigenvalue(rows: Tensor) -> float:
    """Of `V^T V`, and so of the smaller of that and `V V^T`, for rows V `(N, D)`."""
    n, d = rows.shape
    return float(torch.linalg.eigvalsh(rows.T @ rows if d < n else rows @ rows.T)[-1])
