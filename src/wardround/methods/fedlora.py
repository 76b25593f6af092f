"""FedLoRA: clients learn low-rank changes of an encoder's attention together; its weights stay frozen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from wardround.errors import InputError
from wardround.federation.rules import Rules, modules_of_type
from wardround.federation.server import Reply, Server
from wardround.methods.base import Method, Weights
from wardround.methods.clip_losses import Contrastive
from wardround.methods.on_text import need_plain_features, prompts_of
from wardround.models.classifier import Classifier
from wardround.models.low_rank import LowRank, adapt_attention, attentions, mean_pair, narrowest, pair_names
from wardround.models.prompts import Prompts
from wardround.models.text_head import CosineHead, UnitLength
from wardround.training.client import Step
from wardround.training.losses import contrastive_loss


class FedLoRA(Method):
    """LoRA (Hu et al., ICLR 2022) on the attention of a frozen encoder, averaged: the FedLoRA-CLIP of FedMedCLIP.

    In the blocks that `model.finetune_blocks` names, each of the queries', keys', values' and output's weights becomes
    `W + alpha / rank * B A` with W frozen, A Kaiming-uniform and B = 0, so that the first prediction is the pretrained
    encoder's. Only A and B travel. Prediction: the nearest prompt by cosine; L = the symmetric InfoNCE of FedMedCLIP's
    L_con. A transformer without a text side keeps its linear head, shared or local as `model.head` says, and its task
    loss.

    Server: `average = "AB"` takes the means of A and of B, as is usual, whose product is not the mean of the products
    B_k A_k that clients have trained. `"product_svd"` takes the nearest product of the same rank to that mean; how far
    it is away, relative to the mean's norm, is logged as `product_residual`. The server then holds every client's A and
    B at once.

    Our reading: the published baseline adapts the text side, other layers and embeddings too, and trains some weights
    as they are. Here prompts are made once, and the image side alone is adapted.
    """

    name: ClassVar[str] = "fedlora"
    title: ClassVar[str] = "FedLoRA: low-rank changes of a frozen encoder's attention, shared"
    citation: ClassVar[str] = (
        "Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen. LoRA: Low-Rank Adaptation of Large Language Models. "
        "ICLR 2022."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature",)
    travels: ClassVar[str] = "A and B of every adapted weight; without a text side, the head where it is shared"
    stays: ClassVar[str] = "without a text side, the head where it is local; a logit corrector"
    extra_cost: ClassVar[str] = "four thin matrix products for each attention, in every pass"

    takes_captions: ClassVar[bool] = False  # with a text side its loss and head are that side's

    weights: Weights = "uniform"
    rank: int = Field(3, ge=1, description="of each low-rank change")
    alpha: float = Field(1.0, gt=0, description="changes are scaled by alpha / rank")
    average: Literal["AB", "product_svd"] = Field(
        "AB", description="what the server averages: A and B, or their products, brought back to the rank by an SVD"
    )
    contrastive: Literal["auto"] | Contrastive = Field(
        "auto", description="form of the loss; none: the task loss; auto: instance with a text side, none without"
    )

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put pairs beside the attention of the tuned blocks and, with a text side, the prompts in the head's place.

        Raises:
            InputError: nothing is tuned, there is no attention, or it is too narrow for the rank; a contrastive loss is
                asked for without a text side; or something stands between features and head.
        """
        need_plain_features(model, self.name)
        self._check_attention(model)
        self._check_loss(model)
        adapt_attention(model.tuned, self.rank, self.alpha / self.rank)
        if isinstance(model.prompts, Prompts):
            model.neck = UnitLength()
            model.head = CosineHead(prompts_of(model), model.head.in_features)  # type: ignore[assignment]

    def _check_attention(self, model: Classifier) -> None:
        if not len(model.tuned):
            raise InputError(f"model.finetune_blocks = 0 leaves {self.name} nothing to adapt (allowed: 1 or more)")
        found = attentions(model.tuned)
        if not found:
            raise InputError(
                f"model.backbone = {model.name!r} has no attention in the blocks that model.finetune_blocks names, "
                f"which {self.name} adapts; take a transformer such as open_clip:ViT-B-32/openai or "
                "timm:vit_tiny_patch16_224"
            )
        width = min(map(narrowest, found))
        if self.rank > width:
            raise InputError(
                f"method.rank = {self.rank}: {model.name!r} has attention of width {width} (allowed: 1 to {width})"
            )

    def _check_loss(self, model: Classifier) -> None:
        if self.contrastive not in ("auto", "none") and not isinstance(model.prompts, Prompts):
            raise InputError(
                f'method.contrastive = "{self.contrastive}": model.backbone = {model.name!r} has no text side '
                '(allowed: "auto", "none")'
            )

    def rules(self, model: Classifier) -> Rules:
        """Of the tuned blocks, A and B are shared and the rest is frozen."""
        rules = super().rules(model).frozen(model.tuned)
        return rules.shared(*modules_of_type(model.tuned, (LowRank,)))

    # ---- client half

    def loss(self, step: Step) -> Tensor:
        """The contrastive loss, or the task loss."""
        if self.contrastive == "none" or not isinstance(step.client.model.prompts, Prompts):
            return step.task_loss
        kind = "instance" if self.contrastive == "auto" else self.contrastive
        return contrastive_loss(step.logits, step.labels, kind)

    # ---- server half

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average as ever; with `product_svd`, the best pairs for the mean products then take the means' places."""
        if self.average == "AB":
            return super().combine(server, phase, replies)
        kept = list(replies)
        super().combine(server, phase, iter(kept))
        trained = [reply for reply in kept if reply.examples]
        if trained:
            total = sum(map(self.weight, trained))
            shares = [self.weight(reply) / total for reply in trained]
            self._set_pairs(server, [reply.message.under("state") for reply in trained], shares)

    def _set_pairs(self, server: Server, states: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> None:
        lost = whole = 0.0
        for names in pair_names(server.state):
            pair, left, all_of_it = mean_pair(states, shares, names)
            server.state |= pair
            lost, whole = lost + left, whole + all_of_it
        server.log["product_residual"] = math.sqrt(lost / whole) if whole else 0.0
