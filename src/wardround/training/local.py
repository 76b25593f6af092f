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
    steps: Iterable[Step],
    fixed_statistics: bool = True,
) -> float:
    """Train `parameters` on the batches of `steps`; everything else stays as it is.

    Args:
        client: its model is changed in place.
        parameters: of `client.model`.
        optimizer: of these parameters.
        backward: a method's gradients.
        steps: each is taken once.
        fixed_statistics: see `only_training`.

    Returns:
        The mean loss over the steps; NaN without any.
    """
    losses = []
    with only_training(client.model, parameters, fixed_statistics), dropout_stream(client):
        for step in steps:
            with single_image_statistics(client.model, len(step.labels)):
                optimizer.zero_grad(set_to_none=True)
                losses.append(backward(step).detach())
            clip_gradients(optimizer, client.options.clip_norm)
            optimizer.step()
    return float(torch.stack(losses).mean()) if losses else float("nan")


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float | None) -> None:
    """Scale the gradients of each parameter group to a norm of at most `largest`; None leaves them.

    Groups are clipped apart: what one part of the model wants must not shorten the steps of another.
    """
    if largest is not None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], largest)


@contextmanager
def only_training(
    model: nn.Module, parameters: Iterable[nn.Parameter], fixed_statistics: bool = True
) -> Iterator[None]:
    """Train mode and gradients for `parameters` alone.

    With `fixed_statistics`, a batch-norm layer that stands still (see `stands_still`) is put in eval mode: its
    running statistics must not drift. Afterwards everything is in eval mode, and `requires_grad` is what it was.
    """
    chosen = {id(parameter) for parameter in parameters}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
    model.train()
    for name, module in model.named_modules():
        if fixed_statistics and isinstance(module, BATCH_NORMS) and stands_still(model, name):
            module.eval()
    try:
        yield
    finally:
        for parameter, trains in before:
            parameter.requires_grad_(trains)
            parameter.grad = None
        model.eval()


def stands_still(model: nn.Module, name: str) -> bool:
    """Whether nothing trains in the module called `name`; one without parameters goes with what it is part of."""
    parameters = list(model.get_submodule(name).parameters())
    if not parameters and name:
        return stands_still(model, name.rpartition(".")[0])
    return not any(parameter.requires_grad for parameter in parameters)


@contextmanager
def dropout_stream(client: Client) -> Iterator[None]:
    """Draw dropout masks from this client's own stream, another one each time that it trains in a round."""
    purpose = f"dropout {client.fits}" if client.fits else "dropout"
    client.fits += 1
    with seeds.torch_scope(client.seed, purpose, client.round, client.name):
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
