"""Per-FedAvg: federated meta-learning of a model that one step, or few, fit to any client."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround import seeds
from wardround.errors import InputError
from wardround.methods.adapting import Adapting
from wardround.methods.proximal import anchors
from wardround.training.client import Client, Step
from wardround.training.local import fit, single_image_statistics
from wardround.training.options import TrainingOptions


class PerFedAvg(Adapting):
    """Fallah et al., NeurIPS 2020, algorithm 1. Clients minimise `F(w) = f(w - alpha grad f(w))`.

    A batch has parts D1, D2 and, for the Hessian-free variant, D3, each of `training.batch_size` images:

        g = grad f(w - alpha grad f(w; D1); D2)
        w <- w - beta g                                                                      (first-order)
        w <- w - beta (g - alpha (grad f(w + delta g; D3) - grad f(w - delta g; D3)) / 2 delta)  (Hessian-free)

    First-order is the safe choice. Where the gradient has kinks (ReLU, max pooling) the differences of the second form
    miss the Hessian's product by as much as the product itself, whatever delta; on smooth networks they are good to
    0.4 %.

    beta is `training.lr`. An epoch visits every image once, as in other methods, hence takes fewer steps. The personal
    model is adapted on training images by plain SGD at rate alpha, which does not decay: it is part of F.
    """

    name: ClassVar[str] = "per-fedavg"
    title: ClassVar[str] = "Per-FedAvg: a model that is easy to adapt"
    citation: ClassVar[str] = (
        "Fallah, Mokhtari, Ozdaglar. Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic "
        "Meta-Learning Approach. NeurIPS 2020."
    )
    skews: ClassVar[tuple[str, ...]] = ("label", "concept")
    stays: ClassVar[str] = f"{Adapting.stays}; what adaptation changes"
    extra_cost: ClassVar[str] = (
        "hessian-free: a third more gradients an image; adaptation whenever models are evaluated"
    )

    start: Literal["trained", "received"] = Field(
        "received", description="adapt the model that local training left, or the one that the round began with"
    )
    variant: Literal["first-order", "hessian-free"] = Field(
        "first-order", description="how F's gradient is estimated; hessian-free needs a smooth network"
    )
    alpha: float = Field(0.01, ge=0, description="rate of the inner step and of adaptation")
    delta: float = Field(1e-3, gt=0, description="step of the Hessian-free variant's differences, in gradients")
    adaptation: Literal["epoch", "step"] = Field("epoch", description="adapt for one pass over the images, or one step")

    def refuse(self, training: TrainingOptions) -> None:
        """Raise `InputError` where the Hessian-free variant would take differences of rounding errors."""
        if self.variant == "hessian-free" and training.precision != "float32":
            raise InputError(
                f'training.precision = "{training.precision}": the differences of gradients that variant = '
                '"hessian-free" takes would be rounding errors (allowed: "float32")'
            )

    def steps(self, client: Client) -> Iterable[Step]:
        """The round's images in batches of all parts."""
        return client.steps(client.options.local_epochs, batch_size=self._parts * client.options.batch_size)

    def backward(self, step: Step) -> Tensor:
        """Fill in the gradient of F; returns the loss on D2 after the inner step."""
        parameters = self.parameters(step.client)
        first, second, *third = step.split(self._parts)
        _, inner = self._gradient(first, parameters)
        with moved(parameters, inner, -self.alpha):
            loss, gradient = self._gradient(second, parameters)
        for part in third:
            gradient = list(torch._foreach_sub(gradient, self.curvature(part, parameters, gradient), alpha=self.alpha))
        for parameter, value in zip(parameters, gradient, strict=True):
            parameter.grad = value
        return loss

    def curvature(self, step: Step, parameters: list[nn.Parameter], direction: list[Tensor]) -> list[Tensor]:
        """The product of the Hessian on a batch and `direction`, by central differences under one dropout mask."""
        client, sides = step.client, []
        for side in (self.delta, -self.delta):
            mask = seeds.torch_scope(client.seed, f"dropout curvature {step.number}", client.round, client.name)
            with mask, moved(parameters, direction, side):
                sides.append(self._gradient(replace(step), parameters)[1])
        return list(torch._foreach_div(torch._foreach_sub(*sides), 2 * self.delta))

    def adapt(self, client: Client) -> None:
        """One epoch or one step of plain SGD on the task loss."""
        parameters, steps = self.parameters(client), client.steps(1, "adaptation")
        chosen = steps if self.adaptation == "epoch" else itertools.islice(steps, 1)
        fit(client, parameters, torch.optim.SGD(parameters, lr=self.alpha), super().backward, chosen)

    @property
    def _parts(self) -> int:
        return 2 if self.variant == "first-order" else 3

    def _gradient(self, step: Step, parameters: list[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
        with single_image_statistics(step.client.model, len(step.labels)):
            loss = self.loss(step)
        return loss, list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


@contextmanager
def moved(parameters: list[nn.Parameter], direction: list[Tensor], distance: float) -> Iterator[None]:
    """Within the block `parameters` are further by `distance * direction`; then what they were, to the bit."""
    weights, start = list[Tensor](parameters), anchors(parameters)
    with torch.no_grad():
        torch._foreach_add_(weights, direction, alpha=distance)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, start)
