"""FACMIC: a shared attention adapter whose features are drawn towards those of the site that it will be used at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from wardround import seeds
from wardround.errors import InputError
from wardround.methods.base import Weights
from wardround.methods.fedclip import FedCLIP
from wardround.methods.lmmd import lmmd, ramp_after
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.classifier import Classifier
from wardround.models.text_head import CosineHead
from wardround.training.batches import shuffled_batches
from wardround.training.client import Client, Step
from wardround.training.local import single_image_statistics


class NormalisedAdapter(nn.Module):
    """`v = (a * I) / ||a * I||` with `a = softmax(W2 leaky_relu(batch_norm(W1 I)))` over the features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(size, size), nn.BatchNorm1d(size), nn.LeakyReLU(), nn.Linear(size, size), nn.Softmax(dim=1)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Image features `(B, D)` to `(B, D)`."""
        return functional.normalize(self.layers(features) * features, dim=1)


class FACMIC(FedCLIP):
    """Wu et al., MICCAI 2024: FedCLIP with another adapter, and with the features of a held-out site to come close to.

    L = L_con(v, t) + lmmd_weight * ramp * LMMD(v, z): v are the adapted features of a client's batch, z those of a
    batch of the held-out site's images, whose classes are guessed by the softmax of scaled cosines z . t. The site's
    labels are not used. See `wardround.methods.lmmd`. In the adapter's batch norm each of the two batches is normalised
    by itself, and the running statistics are of both. Server: the mean of the adapters. Prediction: the nearest prompt
    by cosine.

    It is transductive: what it is tested on at the held-out site, it has seen in training. It needs `data.held_out`
    or `data.held_out_share`, and those images at every client.

    The authors' code leaves z without the adapter (`target_adapter = "unadapted"`), starts the ramp anew every round
    (`ramp = "round"`), so that few local steps leave the discrepancy nearly without weight, and weighs clients by their
    batches. `lmmd_weight = 0` trains the adapter on L_con alone and needs no held-out site.
    """

    name: ClassVar[str] = "facmic"
    title: ClassVar[str] = "FACMIC: a shared adapter drawn to a held-out site's unlabelled images (transductive)"
    citation: ClassVar[str] = (
        "Wu, Desrosiers, Chaddad. FACMIC: Federated Adaptative CLIP Model for Medical Image Classification. "
        "MICCAI 2024."
    )
    travels: ClassVar[str] = "the adapter: two linear layers and a batch norm"
    extra_cost: ClassVar[str] = "the held-out site's images at every client, and a batch of them in every step"
    transductive: ClassVar[bool] = True

    weights: Weights = "examples"
    lmmd_weight: float = Field(1.0, ge=0, description="multiplies the discrepancy, beside the ramp from 0 to 0.46")
    target_adapter: Literal["adapted", "unadapted"] = Field(
        "adapted", description="the held-out site's features as the adapter makes them, or as they leave the encoder"
    )
    ramp: Literal["client", "round"] = Field(
        "client", description="the discrepancy's weight grows with the steps taken at a client in all, or in a round"
    )

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put the adapter behind the encoder, and the prompts in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = NormalisedAdapter(model.head.in_features)
        model.head = CosineHead(prompts_of(model), model.head.in_features)  # type: ignore[assignment]

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """That the held-out site is no longer unseen."""
        if not self.lmmd_weight:
            return []
        return [
            "facmic is transductive: every client trained on the held-out site's images, without their labels. Its "
            "scores there do not compare with those of methods that never saw the site."
        ]

    def train(self, client: Client, phase: str) -> float:
        """Local training beside the held-out site's images; then the steps taken are noted.

        Raises:
            InputError: there are no such images.
        """
        if not self.lmmd_weight:
            return super().train(client, phase)
        taken = int(client.memory.get("steps", 0))
        client.scratch |= {"taken": taken, "target": unlabelled_batches(client)}
        loss = super().train(client, phase)
        if self.ramp == "client":
            client.memory["steps"] = torch.tensor(taken + client.batches(client.options.local_epochs))
        return loss

    def loss(self, step: Step) -> Tensor:
        """The contrastive loss, and the discrepancy as far as the ramp has come."""
        if not self.lmmd_weight:
            return super().loss(step)
        client, v = step.client, step.features  # asked for first, so that one forward pass serves both terms
        contrastive, z = super().loss(step), self._target(client)
        distance = lmmd(v, z, step.labels, torch.softmax(prompts_of(client.model).logits(z), 1))
        client.log["lmmd"] = float(distance.detach())
        return contrastive + self.lmmd_weight * ramp_after(client.scratch["taken"] + step.number) * distance

    def _target(self, client: Client) -> Tensor:
        """Features `(B, D)` of length 1 of the next of the held-out site's batches."""
        model, h = client.model, next(client.scratch["target"])
        if self.target_adapter == "unadapted":
            return functional.normalize(model.pool(h).float(), dim=1)
        with single_image_statistics(model, len(h)), client.arithmetic():
            return model.features(h).float()


def unlabelled_batches(client: Client) -> Iterator[Tensor]:
    """Batches of the held-out site's images without augmentation, as `Step.inputs`, pass after pass without an end.

    Raises:
        InputError: there are no such images.
    """
    inputs = client.unlabelled
    if inputs is None or not len(inputs):
        raise InputError(
            "method.name = facmic: it needs the images of a site that is no client; set data.held_out or "
            "data.held_out_share (method.lmmd_weight = 0 does without)"
        )
    order = seeds.torch_stream(client.seed, "unlabelled batches", client.round, client.name)
    return (inputs.batch(rows, None) for rows in _passes(len(inputs), client.options.batch_size, order))


def _passes(count: int, size: int, order: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from shuffled_batches(count, size, order)
