"""FDSE's regulariser: what leaves a client's erasers is to be distributed as on average over all clients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wardround.methods.alignment import Divergence, Moments, RunningMoments, alignment_loss, site_weights
from wardround.models.shift_eraser import ShiftEraser


class Consistency:
    """The running moments per channel of what leaves each eraser in one round, beside those of all clients.

    Args:
        layers: of a model as the server sent it: the running moments of their closing batch norms are the targets.
        m: weight of a new batch in the running moments.
    """

    def __init__(self, layers: Sequence[ShiftEraser], m: float) -> None:
        self.layers = layers
        self.targets = [_moments(layer) for layer in layers]
        self.running = [RunningMoments("channel", m) for _ in layers]

    def update(self) -> list[Moments]:
        """Take in what the last forward pass recorded; the moments carry gradients."""
        records = [layer.recorded for layer in self.layers if layer.recorded is not None]
        return [running.update(record) for running, record in zip(self.running, records, strict=True)]

    def loss(self, beta: float, divergence: Divergence, eps: float) -> Tensor:
        """`sum_l w_l * divergence_l` after the last forward pass, a scalar, with `w_l ~ exp(beta l)` of sum 1."""
        weights = site_weights(len(self.layers), "deeper", beta)
        return alignment_loss(self.update(), self.targets, weights, divergence, eps)


def _moments(layer: ShiftEraser) -> Moments:
    mean, var = layer.closing.running_mean, layer.closing.running_var
    assert mean is not None
    assert var is not None
    return Moments(mean.clone(), var.clone())
