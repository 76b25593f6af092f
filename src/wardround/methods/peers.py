"""What a client's model learns from others: a teacher's probabilities, and classifiers that others trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.training.client import Step


def distillation_loss(step: Step, teacher: nn.Module) -> Tensor:
    """`KL(teacher || student)` at temperature 1, mean over the batch, a scalar; the student is the client's model."""
    with torch.no_grad(), step.client.arithmetic():
        wanted = teacher(step.inputs).float().log_softmax(1)
    return functional.kl_div(step.logits.log_softmax(1), wanted, reduction="batchmean", log_target=True)


def crossed_loss(step: Step, weight: Tensor, bias: Tensor) -> Tensor:
    """`sum_j L(C_j(f), y)` over J linear classifiers of the model's features f, a scalar; L is the task loss.

    Asked for before the logits, f serves for both.

    Args:
        step: the batch.
        weight: `(J, C, d)`.
        bias: `(J, C)`.
    """
    others, classes, _ = weight.shape
    logits = functional.linear(step.features, weight.flatten(0, 1), bias.flatten()).view(-1, classes)
    return others * step.client.task_loss(logits, step.labels.repeat_interleave(others))
