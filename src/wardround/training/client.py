"""One client while it answers a message: its model, data, memory and streams. Methods work on this."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wardround import seeds
from wardround.captions.telling import ClientCaptions
from wardround.federation.rules import Owner, Rules
from wardround.models.caption_fusion import CaptionBatch, Heard, telling
from wardround.models.classifier import Classifier
from wardround.training.arithmetic import arithmetic
from wardround.training.batches import batch_starts, shuffled_batches
from wardround.training.inputs import Inputs
from wardround.training.losses import TaskLoss, task_loss
from wardround.training.options import TrainingOptions


@dataclass
class Client:
    """What a method sees of one client in one round.

    Attributes:
        name: the client's name.
        round: counted from 1.
        seed: the experiment's seed.
        model: holds the received shared state and the client's own local state; training changes it in place.
        rules: who owns each entry of the model.
        inputs: the training inputs.
        labels: their labels, int64 `(N,)`.
        modality: their modalities, int64 `(N,)`, indices into `model.modalities`.
        counts: training images per class, `(C,)`, of the whole training split.
        options: the `[training]` section.
        received: tensors that the server sent besides the shared state, by name.
        memory: tensors that the method keeps at this client between rounds; they never travel.
        log: numbers for the report, sent with the reply.
        scratch: whatever the method needs until the end of this round.
        phase: the exchange of the round that is going on.
        fits: how often the model has been trained in this exchange.
        unlabelled: images of held-out sites, without labels, for a method that is `transductive`; else None.
        shown: modalities int64 `(B,)` of the images that are being predicted; None where they are not known.
        captions: of the training images, which `steps` tell the network; None without captions.
    """

    name: str
    round: int
    seed: int
    model: Classifier
    rules: Rules
    inputs: Inputs
    labels: Tensor
    modality: Tensor
    counts: Tensor
    options: TrainingOptions
    received: Mapping[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    log: dict[str, float] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    phase: str = "train"
    fits: int = 0
    unlabelled: Inputs | None = None
    shown: Tensor | None = None
    captions: ClientCaptions | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @cached_property
    def task_loss(self) -> TaskLoss:
        """`(logits (B, C), labels (B,)) -> scalar`, with class weights from this client's own labels."""
        return task_loss(self.options, self.counts.to(self.device))

    def steps(self, epochs: int, purpose: str = "batches", batch_size: int | None = None) -> Iterator[Step]:
        """The steps of `epochs` passes over the training images, the same whichever worker takes them.

        Args:
            epochs: how many passes.
            purpose: another word gives another order, for a method that passes more than once a round.
            batch_size: images in a batch; None for the configured number.
        """
        order = seeds.torch_stream(self.seed, purpose, self.round, self.name)
        augmentation = seeds.numpy_stream(self.seed, f"augment {purpose}", self.round, self.name)
        number = 0
        for _ in range(epochs):
            for rows in shuffled_batches(len(self), batch_size or self.options.batch_size, order):
                yield self._step(number, rows, augmentation, self.captions)
                number += 1

    def _step(
        self, number: int, rows: Tensor, augmentation: np.random.Generator | None, captions: ClientCaptions | None
    ) -> Step:
        inputs = self.inputs.batch(rows, augmentation)
        labels, modality = (known.index_select(0, rows).to(self.device) for known in (self.labels, self.modality))
        told = None if captions is None else captions.batch(rows, self.device)
        return Step(self, number, inputs, labels, modality, told)

    def batches(self, epochs: int) -> int:
        """How many steps `steps(epochs)` has."""
        return epochs * len(batch_starts(len(self), self.options.batch_size))

    def rate(self, lr: float | None = None) -> float:
        """The learning rate `lr`, by default `training.lr`, after this round's decay."""
        return (self.options.lr if lr is None else lr) * self.options.lr_decay ** (self.round - 1)

    def apart(
        self, parameters: Sequence[nn.Parameter], own: Iterable[nn.Parameter], lr: float | None, **settings: Any
    ) -> list[dict[str, Any]]:
        """Groups for `optimizer`: `parameters` without those that are in `own`, and these; no empty group.

        Args:
            parameters: all that train.
            own: the parameters that stand apart, with learning rate `lr` (None: `training.lr`) and `settings`.
        """
        chosen = {id(parameter) for parameter in own}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if id(p) not in chosen]},
            {"params": [p for p in parameters if id(p) in chosen], "lr": self.rate(lr), **settings},
        ]
        return [group for group in groups if group["params"]]

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """A new optimiser as configured, for parameter groups as torch takes them."""
        options, fused = self.options, self.device.type in ("cpu", "cuda")
        common: dict[str, Any] = {"lr": self.rate(), "weight_decay": options.weight_decay, "fused": fused}
        if options.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=options.momentum, **common)
        kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, betas=options.adam_betas, eps=options.adam_eps, **common)

    def owned(self, *owners: Owner) -> list[nn.Parameter]:
        """The model's parameters that belong to any of `owners`, in its order."""
        return self.rules.parameters(self.model, *owners)

    def snapshot(self, *owners: Owner) -> dict[str, Tensor]:
        """Copies of the model's entries that belong to any of `owners`; by default of all that are not frozen."""
        chosen = self.rules.pick(self.model.state_dict(), *(owners or (Owner.SHARED, Owner.LOCAL)))
        return {name: tensor.clone() for name, tensor in chosen.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Copy the entries of `state` into the model."""
        entries = self.model.state_dict()
        for name, tensor in state.items():
            entries[name].copy_(tensor)

    def reference(self, state: Mapping[str, Tensor] | None = None) -> Classifier:
        """Another network like the model as it is now, in eval mode and without gradients; frozen blocks are shared.

        Args:
            state: entries that have other values there, as `snapshot` gives them.
        """
        twin = copy.deepcopy(self.model, {id(self.model.frozen): self.model.frozen})
        if state is not None:
            twin.load_state_dict(state, strict=False)
        return twin.requires_grad_(False).eval()

    @torch.no_grad()
    def training_features(self, told: bool = False) -> Tensor:
        """Pooled features `(N, d)` of the training images without augmentation, on the processor, as the model is.

        They are those of the images alone, as in a test, or with `told` fused with their captions.
        """
        batches, captions = torch.split(torch.arange(len(self)), self.options.batch_size), self.captions
        return torch.cat([self._step(0, rows, None, captions if told else None).features.cpu() for rows in batches])

    def arithmetic(self) -> AbstractContextManager[object]:
        """The way in which the trained blocks compute."""
        return arithmetic(self.options, self.device)


@dataclass
class Step:
    """One batch of local training.

    Attributes:
        client: whose batch it is.
        number: counted from 0 in this round.
        inputs: `(B, ...)`, outputs of the frozen blocks.
        labels: int64 `(B,)`.
        modality: int64 `(B,)`.
        captions: what the network is told of the images; None for nothing.
        heard: what it made of images and captions, once it ran.
    """

    client: Client
    number: int
    inputs: Tensor
    labels: Tensor
    modality: Tensor
    captions: CaptionBatch | None = None
    heard: Heard | None = field(default=None, init=False)

    @cached_property
    def features(self) -> Tensor:
        """The pooled features `(B, features)`, float32. Asked for before the logits, they serve for both."""
        with self.client.arithmetic(), telling(self.client.model, self.captions) as self.heard:
            return self.client.model.features(self.inputs).float()

    @cached_property
    def logits(self) -> Tensor:
        """The model's logits `(B, C)`, float32, computed when first asked for."""
        model = self.client.model
        if "features" in self.__dict__:
            return model.classify(self.features)
        # The model as a whole, since that is what may have been compiled.
        with self.client.arithmetic(), telling(model, self.captions) as self.heard:
            logits: Tensor = model(self.inputs)
        return logits.float()

    @property
    def task_loss(self) -> Tensor:
        """The task loss of this batch, a scalar; with captions, alpha times their contrastive loss on top."""
        return self.with_captions(self.client.task_loss(self.logits, self.labels))

    def with_captions(self, loss: Tensor) -> Tensor:
        """`loss`, and alpha times the captions' contrastive loss: for a method whose loss is not the task loss."""
        captions, contrast = self.client.captions, self.caption_loss
        return loss if captions is None or contrast is None else loss + captions.options.alpha * contrast

    @cached_property
    def caption_loss(self) -> Tensor | None:
        """The contrastive loss of images and captions, a scalar; None without captions, or too few. It is logged."""
        self.logits  # noqa: B018 - the forward pass fills `heard`
        captions, client = self.client.captions, self.client
        loss = None if captions is None or self.heard is None else captions.loss(self.heard)
        if loss is not None:
            total, batches = client.scratch.get("caption losses", (0.0, 0))
            client.scratch["caption losses"] = total, batches = total + float(loss.detach()), batches + 1
            client.log["caption_loss"] = total / batches
        return loss

    def split(self, parts: int) -> list[Step]:
        """This batch as `parts` smaller ones of nearly equal size; with fewer images than that, the batch each time."""
        if len(self.labels) < parts:
            return [replace(self) for _ in range(parts)]
        divided = zip(*(whole.tensor_split(parts) for whole in (self.inputs, self.labels, self.modality)), strict=True)
        told = [None] * parts if self.captions is None else self.captions.split(parts)
        return [
            Step(self.client, self.number, inputs, labels, modality, captions)
            for (inputs, labels, modality), captions in zip(divided, told, strict=True)
        ]
