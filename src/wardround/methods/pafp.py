"""PAFP: feature alignment in front of the fine-tuned blocks of a pretrained backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Reply, Server
from wardround.methods.alignment import (
    Divergence,
    Moments,
    Reduce,
    SiteWeights,
    alignment_loss,
    moment_shape,
    site_weights,
)
from wardround.methods.alignment_sites import Watch, gradient_ratio, watching
from wardround.methods.alignment_target import Variance, distances, move_target, target_of, with_squares
from wardround.methods.base import Method
from wardround.methods.insertion import insertion_cost
from wardround.models.classifier import Classifier
from wardround.models.feature_alignment import Statistic, Variant, insert_alignment
from wardround.training.client import Client, Step

FEW_IMAGES = 100


class PAFP(Method):
    """Personalised Aligner Federated Pretrained (FLTA 2026).

    Model: a feature-alignment module FA_l, local to its client, before every fine-tuned block. Client k keeps
    running moments (mu_kl, v_kl) of what block l receives and minimises

        L_task + lambda * sum_l w_l * mean KL( N(mu_gl, v_gl) || N(mu_kl, v_kl) )

    from the second round on; it uploads the moments with phi_k. Server: phi = sum_k p_k phi_k, and the target
    g <- (1 - m_srv) g + m_srv sum_k p_k (mu_k, v_k), assigned in the first round.

    Symbols: theta_k = FA modules, logit corrector and a local head; phi = the fine-tuned blocks, buffers included.
    The paper's values of lambda, m_loc, m_srv and the number of groups are lost; the defaults are readings of ours.
    The effective strength is lambda * m_loc: at 0.01 alignment is inert (a thousandth of the task's gradient), at the
    default of 1 it is felt; sweep it from 0.1 to 10.
    """

    name: ClassVar[str] = "pafp"
    title: ClassVar[str] = "PAFP: personalised aligner, one optimiser"
    citation: ClassVar[str] = (
        "Federated Transfer Learning for Medical Image Classification under Mixed Skew. FLTA 2026."
    )
    travels: ClassVar[str] = "the trained blocks, buffers included; mean and variance at every alignment site"
    stays: ClassVar[str] = "feature-alignment modules; a local head; a logit corrector"
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    extra_cost: ClassVar[str] = "one set of moments up and one down a round (1.8 % of the state with EfficientNet-B0)"

    strength: float = Field(10.0, ge=0, alias="lambda", description="weight of the alignment loss (lambda)")
    m_loc: float = Field(0.1, gt=0, le=1, description="weight of the new batch in a client's running moments")
    m_srv: float = Field(0.1, gt=0, le=1, description="weight of the new round in the server's target; 1: no memory")
    variant: Variant = Field("exact", description="form of the FA module: only exact is the paper's")
    groups: int = Field(16, ge=1, description="groups of the FA module's GroupNorm; must divide the channels")
    statistic: Statistic = Field("output", description="moments of FA's output, or before its activation as in FDSE")
    reduce: Reduce = Field("element", description="moments per (channel, row, column), or per channel")
    divergence: Divergence = Field("kl", description="how local and target distributions are compared")
    site_weights: SiteWeights = Field("uniform", description="weights of the sites; deeper: exp(beta l), as in FDSE")
    beta: float = Field(0.1, ge=0, description="growth of the weights with depth, for site_weights = deeper")
    variance: Variance = Field(
        "within", description="target variance: mean of the clients', or with the variance between their means"
    )
    eps: float = Field(1e-3, gt=0, description="added to variances before they are compared")
    lr_local: float | None = Field(None, gt=0, description="learning rate of theta_k; none: as for the rest")
    diagnostics: bool = Field(
        True, description="log what inserting FA costs, and the alignment gradient relative to the task's"
    )

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put an FA module before every fine-tuned block.

        Raises:
            InputError: no block is fine-tuned, one takes no feature map, or `groups` does not divide its channels.
        """
        if not len(model.tuned):
            raise InputError("model.finetune_blocks = 0: PAFP aligns what tuned blocks receive (allowed: 1 and more)")
        insert_alignment(model, image_size, groups=self.groups, variant=self.variant, statistic=self.statistic)

    def discreet(self) -> Self:
        """Moments per channel: those per element over few images identify them."""
        return self.model_copy(update={"reduce": "channel"})

    def rules(self, model: Classifier) -> Rules:
        """FedAvg's, with the FA modules local."""
        return super().rules(model).local(model.before)

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """`l/mean` and `l/var` for every site l."""
        shapes = [moment_shape(site, self.reduce) for site in model.site_shapes(image_size)]
        return {f"{site}/{part}": shape for site, shape in enumerate(shapes) for part in ("mean", "var")}

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """Per-element moments over few images can identify them."""
        few = {name: n for name, n in examples.items() if 0 < n < FEW_IMAGES}
        if self.reduce != "element" or not few:
            return []
        who = ", ".join(f"{name} ({n})" for name, n in few.items())
        return [
            f"Per-element statistics leave clients with fewer than {FEW_IMAGES} training images: {who}. Such moments "
            'can identify single images; reduce = "channel" is the safer choice.'
        ]

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """Local training while the FA modules record what they put out."""
        if self.diagnostics and client.round == 1:
            client.log |= insertion_cost(client)
        with watching(client.model, self.reduce, self.m_loc) as client.scratch["watch"]:
            return super().train(client, phase)

    def optimizer(self, client: Client, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """One optimiser over phi and theta_k; with a learning rate of their own, theta_k are a group of their own."""
        if self.lr_local is None:
            return super().optimizer(client, parameters)
        return client.optimizer(self.two_groups(client, parameters))

    def two_groups(self, client: Client, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        """`parameters` as phi and theta_k apart, the latter with their learning rate; no empty group."""
        return client.apart(parameters, client.owned(Owner.LOCAL), self.lr_local)

    def loss(self, step: Step) -> Tensor:
        """Task loss plus lambda times the alignment loss, once there is a target."""
        task, pull = step.task_loss, self.pull(step)
        return task if pull is None else task + pull

    def pull(self, step: Step) -> Tensor | None:
        """lambda times the alignment loss, a scalar, compared with the task's in the second step of a round."""
        alignment = self.alignment(step)
        if alignment is None:
            return None
        if self.diagnostics and step.number == 1:
            ratio = gradient_ratio(step.client.model, step.task_loss, self.strength * alignment)
            step.client.log |= {} if ratio is None else {"alignment_gradient_ratio": ratio}
        return self.strength * alignment

    def alignment(self, step: Step) -> Tensor | None:
        """The alignment loss of one batch, a scalar; None without a target. Updates the running moments."""
        step.logits  # noqa: B018 - the forward pass fills the records
        watch: Watch = step.client.scratch["watch"]
        moments, received = watch.update(), step.client.received
        if not received:
            return None
        weights = site_weights(len(moments), self.site_weights, self.beta)
        targets = [Moments(received[f"{site}/mean"], received[f"{site}/var"]) for site in range(len(moments))]
        loss = alignment_loss(moments, targets, weights, self.divergence, self.eps)
        step.client.log["alignment_loss"] = float(loss.detach())
        return loss

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The running moments at the end of the round: training-mode, augmented-data moments."""
        watch: Watch = client.scratch["watch"]
        return watch.now()

    # ---- server half

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """The target moments; nothing in the first round."""
        return target_of(server.memory)

    def digest(self, reply: Reply) -> Mapping[str, Tensor]:
        """Moments, and the squares that the spread between clients is computed from."""
        return with_squares(reply.message.under("statistic"))

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        """Move the target towards the clients' average by m_srv."""
        server.log |= {f"statistic_distance/{site}": far for site, far in distances(average).items()}
        move_target(server.memory, average, self.m_srv, self.variance)
