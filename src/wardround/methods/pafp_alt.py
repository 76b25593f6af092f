"""PAFP-alt: shared and local parameters take turns, and the alignment loss never reaches the shared ones."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.federation.rules import Owner
from wardround.methods.pafp import PAFP
from wardround.training.client import Client, Step


class PAFPAlt(PAFP):
    """PAFP with alternating optimisation (FLTA 2026, section IV-B): phi on L_task, theta_k on L_task + lambda L_align.

    - `exclusive` (default; the paper speaks of alternating rounds): rounds t with t mod T = 0 train theta_k with
      phi fixed, all other rounds train phi with theta_k fixed.
    - `additive`: phi trains in every round, theta_k besides when t mod T = 0. Both gradients come from one forward
      pass, and lambda L_align does not leak into phi.

    Moments are measured and uploaded every round. While phi is fixed its batch norms are in eval mode, so that the
    uploaded buffers do not drift, unless `drift` is set.
    """

    name: ClassVar[str] = "pafp-alt"
    title: ClassVar[str] = "PAFP with alternating optimisation"

    every: int = Field(2, ge=1, description="local parameters train in every T-th round (T)")
    schedule: Literal["exclusive", "additive"] = Field("exclusive", description="what the other rounds train")
    head_always: bool = Field(False, description="train a local head in every round, not every T-th alone")
    drift: bool = Field(False, description="let the shared batch norms' statistics move while phi is fixed")

    def model_post_init(self, context: object) -> None:
        """With T = 1 the exclusive schedule would never train phi."""
        if self.schedule == "exclusive" and self.every < 2:
            raise ValueError("every = 1 would never train the shared parameters; allowed: 2 and more")

    def local_turn(self, round: int) -> bool:
        """Whether theta_k trains in `round`."""
        return round % self.every == 0

    def parameters(self, client: Client) -> list[nn.Parameter]:
        """phi, theta_k or both, as the schedule says."""
        turn = self.local_turn(client.round)
        owners = {Owner.LOCAL} if turn else {Owner.SHARED}
        if self.schedule == "additive":
            owners |= {Owner.SHARED}
        chosen = client.owned(*owners)
        if self.head_always and client.model.local_head and not turn:
            chosen += list(client.model.head.parameters())
        return chosen

    def fixed_statistics(self) -> bool:
        """As `drift` says."""
        return not self.drift

    def optimizer(self, client: Client, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Two optimisers in one: phi and theta_k are groups, so that neither's gradient norm clips the other."""
        return client.optimizer(self.two_groups(client, parameters))

    def loss(self, step: Step) -> Tensor:
        """The joint loss in a local turn, the task loss otherwise; moments are measured in both."""
        if self.local_turn(step.client.round):
            return super().loss(step)
        self.alignment(step)
        return step.task_loss

    def backward(self, step: Step) -> Tensor:
        """In an additive local turn, the gradient of lambda L_align is added for theta_k alone."""
        if self.schedule == "exclusive" or not self.local_turn(step.client.round):
            return super().backward(step)
        task, pull = step.task_loss, self.pull(step)
        task.backward(retain_graph=pull is not None)  # type: ignore[no-untyped-call]
        if pull is None:
            return task
        local = [p for p in step.client.owned(Owner.LOCAL) if p.requires_grad]
        for parameter, gradient in zip(local, torch.autograd.grad(pull, local, allow_unused=True), strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return task + pull.detach()
