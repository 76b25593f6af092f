"""The local loop that every method trains with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from wardround import seeds
from wardround.federation.rules import BATCH_NORMS
from wardround.training.client import Client, Step


class Backward(Protocol):
    """Computes gradients for one step and returns the loss."""

    def __call__(self, step: Step) -> Tensor:
        """Fill the `grad` of the parameters that train; return the loss, a scalar."""


def fit(
    client: Client,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    backward: Backward,
    epochs: int,
    fixed_statistics: bool = True,
) -> float:
    """Train `parameters` for `epochs` passes over the client's images; everything else stays as it is.

    Args:
        client: its model is changed in place.
        parameters: of `client.model`.
        optimizer: of these parameters.
        backward: a method's gradients.
        epochs: passes over the training images.
        fixed_statistics: see `only_training`.

    Returns:
        The mean loss over the steps; NaN without images.
    """
    if not len(client):
        return float("nan")
    total = torch.zeros((), device=client.device)
    steps = 0
    with only_training(client.model, parameters, fixed_statistics), dropout_stream(client):
        for step in client.steps(epochs):
            with single_image_statistics(client.model, len(step.labels)):
                optimizer.zero_grad(set_to_none=True)
                total += backward(step).detach()
            if client.options.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, client.options.clip_norm)
            optimizer.step()
            steps += 1
    return float(total / steps)


@contextmanager
def only_training(
    model: nn.Module, parameters: Iterable[nn.Parameter], fixed_statistics: bool = True
) -> Iterator[None]:
    """Train mode and gradients for `parameters` alone.

    With `fixed_statistics`, a batch-norm layer none of whose parameters train is put in eval mode: its running
    statistics belong to the part that stands still and must not drift. Afterwards everything is in eval mode, and
    `requires_grad` is what it was.
    """
    chosen = {id(parameter) for parameter in parameters}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if fixed_statistics and isinstance(module, BATCH_NORMS) and own and not any(id(p) in chosen for p in own):
            module.eval()
    try:
        yield
    finally:
        for parameter, trains in before:
            parameter.requires_grad_(trains)
            parameter.grad = None
        model.eval()


@contextmanager
def dropout_stream(client: Client) -> Iterator[None]:
    """Draw dropout masks from this client's own stream."""
    with seeds.torch_scope(client.seed, "dropout", client.round, client.name):
        yield


@contextmanager
def single_image_statistics(model: nn.Module, images: int) -> Iterator[None]:
    """With one image, batch-norm layers use their running statistics: one value has no variance."""
    layers = [m for m in model.modules() if isinstance(m, BATCH_NORMS) and m.training] if images == 1 else []
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
